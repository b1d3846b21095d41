"""EAGLE-3 heads: drafts that read the target's hidden states (arXiv 2503.01840)."""
