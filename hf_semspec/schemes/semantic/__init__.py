"""`semantic`: acceptance of whole segments by their meaning."""
