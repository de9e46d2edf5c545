"""A constraint besides its plugin: judging while sampling, the multiplier, whether it is satisfied."""
