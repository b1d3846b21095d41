"""How transformers comes to call us."""
