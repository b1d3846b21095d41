"""P̂ and Q̂ of drafted segments, by the scorer that the config names."""

import torch

from .call_state import CallState
from .probe import SemanticProbe
from .segment_turns import Reading, Writing
from .semantic_config import SemanticConfig


class Scorer:
    """Scores of drafted segments.

    Args:
        call: the call.
        config: the scheme's config.
    """

    def __init__(self, call: CallState, config: SemanticConfig) -> None:
        self.call, self.config = call, config
        self.probe = SemanticProbe.from_pretrained(str(config.probe)) if config.scorer == "probe" else None

    @property
    def needs_features(self) -> bool:
        """Whether it looks at hidden states."""
        return self.probe is not None

    @property
    def needs_laws(self) -> bool:
        """Whether it looks at the tokens' probabilities."""
        return self.config.scorer in ("sequence", "likelihood")

    def __call__(self, rows: list[int], written: Writing, reading: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        """P̂ and Q̂ of the segment of each of `rows`, (rows,), linear."""
        config = self.config
        counts = torch.tensor(reading.counts, dtype=torch.float64, device=self.call.device)
        if self.probe is not None:
            assert reading.features is not None and written.features is not None
            means = [sums / counts.unsqueeze(1) for sums in (reading.features, written.features[rows])]
            return self.probe.target(means[0]), self.probe.draft(means[1])
        if reading.log_p is not None:
            lengths = counts if config.scorer == "likelihood" else torch.ones_like(counts)
            log_p, log_q = reading.log_p / lengths, written.log_q[rows] / lengths
            # Only the ratio decides: a long segment's own probability is nothing in float64.
            larger = torch.maximum(log_p, log_q) if config.scorer == "sequence" else torch.zeros_like(log_p)
            return (log_p - larger).exp(), (log_q - larger).exp()
        ones = torch.ones_like(counts)
        if config.scorer == "none":
            return 0 * ones, ones
        coins = torch.rand(len(rows), generator=self.call.randomness.second, device=self.call.device)
        return (coins < config.accept_rate).double(), ones
