"""Configs of `lossless` and `easd`: as they are stored, with every field set, and drawn at random."""

import math

from hypothesis import strategies as st

from hf_semspec.configuration import EASDConfig

LOSSLESS = {
    "scheme": "lossless",
    "verification": None,
    "num_draft_tokens": 5,
    "num_chains": 1,
    "draft": "model",
    "max_ngram": 3,
    "compile_draft": False,
    "cost_profile": None,
}
EASD = {
    "scheme": "easd",
    "num_draft_tokens": 5,
    "num_chains": 1,
    "draft": "model",
    "max_ngram": 3,
    "target_entropy_threshold": 1.0,
    "draft_entropy_threshold": 1.0,
    "overlap_threshold": 0.8,
    "top_n": 10,
    "penalty": 0.0,
    "trigger": "entropy",
    "trigger_rate": 0.0,
    "calibrated_for": None,
    "compile_draft": False,
    "cost_profile": None,
}
CALIBRATED = {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": None}
FULL = EASDConfig(
    num_draft_tokens="auto",
    num_chains=3,
    target_entropy_threshold=math.inf,
    draft_entropy_threshold=0.25,
    overlap_threshold=2,
    top_n=7,
    penalty=1,
    trigger="random",
    trigger_rate=0.125,
    calibrated_for=CALIBRATED,
)
COUNTS = st.integers(1, 64)
NON_NEGATIVE = st.floats(0, allow_nan=False)
EASD_CONFIGS = st.builds(
    EASDConfig,
    num_draft_tokens=COUNTS | st.just("auto"),
    num_chains=COUNTS,
    target_entropy_threshold=NON_NEGATIVE,
    draft_entropy_threshold=NON_NEGATIVE,
    overlap_threshold=NON_NEGATIVE,
    top_n=st.integers(1, 1000),
    penalty=st.floats(0, 1),
    trigger=st.sampled_from(["entropy", "random"]),
    trigger_rate=st.floats(0, 1),
    calibrated_for=st.none() | st.just(CALIBRATED),
)
