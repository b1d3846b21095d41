"""What drafts, and how it is loaded."""
