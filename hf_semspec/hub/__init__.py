"""What is stored beside a model or in a Hub repository."""
