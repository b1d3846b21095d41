"""`lossless`: ordinary speculative sampling, exact for any draft."""
