"""What comes back from servers, a prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engine.outputs import RowStats, SegmentRecord


@dataclass
class Usage:
    """What was spent, as the servers count it: requests that were answered, and tokens.

    Args:
        requests (`int`): answered requests; repeated ones count once.
        prompt_tokens, completion_tokens (`int`): read and written.
        cached_tokens (`int`): those of the prompts that came from the prefix cache, where the server says so.
    """

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Served:
    """What became of one prompt.

    Args:
        text (`str`): the answer, without special tokens.
        ids (`list[int]`): its ids, EOS included where the server hands it out.
        verdicts, boundaries (`list`): parse: the confidences, and the new tokens that each judged prefix holds.
        kept_tokens (`int`): parse: tokens kept of the draft's answers.
        segments (`list[SegmentRecord]`): semantic: its segments, in order.
        stats (`RowStats`): counts in tokens; `written`, `kept` and `emitted` are set.
        target, draft (`Usage`): what either server spent on it.
        error (`str`, *optional*): why there is no answer.
        transient (`bool`): whether asking again may help.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    verdicts: list[float] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    kept_tokens: int = 0
    segments: list[SegmentRecord] = field(default_factory=list)
    stats: RowStats = field(default_factory=RowStats)
    target: Usage = field(default_factory=Usage)
    draft: Usage = field(default_factory=Usage)
    error: str | None = None
    transient: bool = False
