"""Schemes that decide about requests, `parse` and `semantic`, over models that an OpenAI-compatible server runs."""

from .client import OpenAIServer, ServerError
from .parse import parse
from .results import Served, Usage
from .semantic import semantic

__all__ = ["OpenAIServer", "Served", "ServerError", "Usage", "parse", "semantic"]
