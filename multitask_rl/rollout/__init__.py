"""What the actor says: engines that generate token-exact rollouts."""
