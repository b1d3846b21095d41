"""`easd`: entropy-aware speculative decoding."""
