"""P̂ and Q̂ of drafted segments, by the scorer that the config names."""

import torch

from ...engine.call import CallState
from .config import SemanticConfig
from .probe import SemanticProbe
from .reading import Evidence


class Scorer:
    """Scores of segments.

    Args:
        call: the call.
        config: the scheme's config.

    Raises:
        ValueError: its probe cannot be read, or was made for models of other sizes.
    """

    def __init__(self, call: CallState, config: SemanticConfig) -> None:
        self.call, self.config = call, config
        self.probe: SemanticProbe | None = None
        if config.scorer == "probe":
            self.probe = SemanticProbe.from_pretrained(str(config.probe))
            request = call.request
            self.probe.check(
                str(config.probe), request.model, request.draft, request.generation_config, config.segment_stop
            )

    @property
    def needs_features(self) -> bool:
        """Whether it looks at hidden states."""
        return self.probe is not None

    @property
    def needs_laws(self) -> bool:
        """Whether it looks at the tokens' probabilities."""
        return self.config.scorer in ("sequence", "likelihood")

    def __call__(self, counts: list[int], target: Evidence, draft: Evidence) -> tuple[torch.Tensor, torch.Tensor]:
        """P̂ and Q̂ of segments of `counts` tokens, (rows,), linear, by what either model thinks of them."""
        config = self.config
        lengths = torch.tensor(counts, dtype=torch.float64, device=self.call.device)
        ones = torch.ones_like(lengths)
        if self.probe is not None:
            assert target.features is not None and draft.features is not None
            means = [sums / lengths.unsqueeze(1) for sums in (target.features, draft.features)]
            return self.probe.target(means[0]), self.probe.draft(means[1])
        if self.needs_laws:
            assert target.log_prob is not None and draft.log_prob is not None
            lengths = lengths if config.scorer == "likelihood" else ones
            log_p, log_q = target.log_prob / lengths, draft.log_prob / lengths
            # Only the ratio decides: a long segment's own probability is nothing in float64.
            larger = torch.maximum(log_p, log_q) if config.scorer == "sequence" else torch.zeros_like(log_p)
            return (log_p - larger).exp(), (log_q - larger).exp()
        if config.scorer == "none":
            return 0 * ones, ones
        coins = self.call.randomness.coins(len(counts))
        return (coins < config.accept_rate).double(), ones
