"""What every room stands on and none of them owns: checks of values, JSON files, warnings said once, wrapped models."""
