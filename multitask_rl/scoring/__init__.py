"""How good was it: reward and constraint plugins, pooled, isolated, timed."""
