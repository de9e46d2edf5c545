"""The models of a run, for sampling and learning alike: the actor, its tokens, the sampled distribution."""
