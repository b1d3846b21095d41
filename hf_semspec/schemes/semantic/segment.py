"""Where a segment ends by its text, whatever tokens the text is made of."""


class Segment:
    """A segment of one row that is being written.

    Args:
        stop, think_end: the texts that end a segment, and the reasoning; `None` for never.
        most (`int`): tokens at which it ends anyway.

    `rest` is what was added behind the stop, the beginning of the next segment.
    """

    def __init__(self, stop: str | None, think_end: str | None, most: int) -> None:
        self.stop, self.think_end, self.most = stop, think_end, most
        self.begin()

    def begin(self, text: str = "") -> None:
        """Start anew behind `text`, tokens of the target's that belong to the segment but are not counted."""
        self.text, self.tokens = text, 0
        self.ended = False
        self.rest = ""
        self.thought_ended = self.think_end is not None and self.think_end in text

    def add(self, text: str, tokens: int) -> bool:
        """Append `text`, which is `tokens` tokens long; returns whether a draft of it ends here."""
        known = len(self.text)
        self.text += text
        self.tokens += tokens
        place = self._find(self.stop, known)
        if place >= 0 and not self.ended:
            self.rest = self.text[place:]
        self.ended = self.ended or self.tokens >= self.most or place >= 0
        self.thought_ended = self.thought_ended or self._find(self.think_end, known) >= 0
        return self.ended or self.thought_ended

    def copy(self) -> "Segment":
        """The same segment, for another writer, whose tokens count from 0."""
        other = Segment(self.stop, self.think_end, self.most)
        other.text = self.text
        other.ended, other.thought_ended = self.ended, self.thought_ended
        return other

    def _find(self, mark: str | None, known: int) -> int:
        """Where `mark` ends if that is behind the first `known` characters, else -1."""
        if mark is None:
            return -1
        place = self.text.find(mark, max(known - len(mark) + 1, 0))
        return place if place < 0 else place + len(mark)
