"""Thresholds of easd from the entropies of whole calls."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from hf_semspec import EASDConfig, SemSpecConfig, calibrate_easd
from tests.helpers import WEAK_DRAFTS
from tests.models import draft_of, prompts, row_of, tiny

pytestmark = WEAK_DRAFTS


def test_calibration_returns_a_config_that_triggers_at_its_percentile(tmp_path: Path) -> None:
    model = tiny("llama", 4, initializer_range=0.15)
    draft, inputs = draft_of(model, "near"), prompts((5, 8, 3), seed=4)
    rows = [row_of(inputs, row) for row in range(3)]
    base = EASDConfig(num_draft_tokens=3, overlap_threshold=0.0)
    calibration = calibrate_easd(model, draft, rows, 60, config=base, max_new_tokens=24, progress=False)
    report = json.loads(json.dumps(calibration.report))
    assert report["positions"] == len(calibration.target_entropies) > 20
    below = (calibration.target_entropies <= calibration.config.target_entropy_threshold).double().mean()
    assert float(below) == pytest.approx(0.6, abs=0.05)
    assert calibration.config.num_draft_tokens == 3
    assert calibration.config.calibrated_for == report["sampling"]
    config = SemSpecConfig(calibration.config, max_new_tokens=24, return_dict_in_generate=True)
    config.save_pretrained(tmp_path)
    assert SemSpecConfig.from_pretrained(tmp_path).scheme_config == calibration.config
    assert model.generate(**inputs, assistant_model=draft, generation_config=config).stats.triggered > 0
    calibration.plot(tmp_path / "entropies.png")
    assert (tmp_path / "entropies.png").stat().st_size > 1000


def test_calibration_takes_every_setting_it_is_given() -> None:
    model = tiny("llama", 4)
    row = row_of(prompts((5,)), 0)
    settings = GenerationConfig(do_sample=True, top_k=3, suppress_tokens=list(range(5, 97)))
    calibration = calibrate_easd(model, model, [row], generation_config=settings, max_new_tokens=12, progress=False)
    assert calibration.config.calibrated_for == {"do_sample": True, "temperature": 1.0, "top_k": 3, "top_p": 1.0}
    assert float(calibration.target_entropies.max()) <= math.log(3) + 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"percentile": 101}, "percentile=101"),
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": ["text"]}, "tokenizer=None"),
        ({"prompts": [3]}, "prompts holds a int"),
        ({"max_new_tokens": 1}, "max_new_tokens=1"),
    ],
)
def test_bad_calibration_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    model = tiny("llama", 6)
    values: dict[str, Any] = {"prompts": [row_of(prompts((4,)), 0)], "progress": False, **arguments}
    with pytest.raises(ValueError, match=message):
        calibrate_easd(model, model, **values)
