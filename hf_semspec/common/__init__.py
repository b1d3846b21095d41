"""What every room stands on: checks of values, JSON files, warnings said once, wrapped models."""
