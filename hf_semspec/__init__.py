"""Semantic speculative decoding behind Hugging Face `generate`: one changed line, published schemes, honest
statistics."""

from .calibration.easd import calibrate_easd
from .calibration.parse import calibrate_parse
from .calibration.semantic import train_semantic_probe
from .configuration import (
    EASDConfig,
    LosslessConfig,
    PARSEConfig,
    SemanticConfig,
    SemSpecConfig,
    SMCConfig,
    register_scheme,
    unregister_scheme,
)
from .drafts.load import load_draft
from .engine.outputs import DecodingStats, SemSpecOutput, record_stats
from .integration.register import register, unregister

__version__ = "0.1.0"

__all__ = [
    "DecodingStats",
    "EASDConfig",
    "LosslessConfig",
    "PARSEConfig",
    "SMCConfig",
    "SemSpecConfig",
    "SemSpecOutput",
    "SemanticConfig",
    "__version__",
    "calibrate_easd",
    "calibrate_parse",
    "load_draft",
    "record_stats",
    "register",
    "register_scheme",
    "train_semantic_probe",
    "unregister",
    "unregister_scheme",
]

register()
