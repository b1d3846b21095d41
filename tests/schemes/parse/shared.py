"""What the tests of `parse` share."""

from typing import Any

import pytest
import torch

from hf_semspec.schemes.parse import judge as judging

# The thresholds that the verdicts of `Script` are made for.
SCRIPTED = {"accept_threshold": 0.93, "prefix_threshold": 0.5}


class Script:
    """The judge says what it is told: of row `i`, the first `cuts[i]` prefixes pass, and all of it if `full[i]`."""

    def __init__(self, patch: pytest.MonkeyPatch, cuts: list[int], full: list[bool], single: bool = True) -> None:
        self.cuts, self.full, self.single, self.calls = cuts, full, single, 0
        patch.setattr(judging, "confidence", self)

    def __call__(self, logits: torch.Tensor, *labels: Any) -> torch.Tensor:
        self.calls += 1
        values = [
            [0.95 if full else 0.1] + [0.9 if i < cut else 0.1 for i in range(logits.shape[1])]
            for cut, full in zip(self.cuts, self.full, strict=True)
        ]
        first = int(not self.single and self.calls == 2)
        return torch.tensor(values)[:, first : first + logits.shape[1]]


KEPT = {
    "all": {"accept_threshold": 0.0},
    "some": {"boundary": "random", "prefix_threshold": 0.0, "accept_threshold": 2.0},
    "none": {},
}
ALL = {"accept_threshold": 0.0}
