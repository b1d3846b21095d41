"""Big offline jobs: any number of prompts, each answered by one line of JSON, over any number of interruptions."""

from .run import generate_lines

__all__ = ["generate_lines"]
