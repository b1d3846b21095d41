"""`smc`: sequential Monte Carlo speculative decoding."""
