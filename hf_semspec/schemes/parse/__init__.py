"""`parse`: parallel prefix verification."""
