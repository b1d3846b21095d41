"""The target as a judge: what it is asked, which tokens answer, and its verdicts on prefixes of drafted answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...common.warn_once import warn_once
from ...engine.call import CallState
from ...engine.masks import Slots, packed_slots
from ...engine.misfits import without_a_law
from ...engine.model import CachedModel, context_of
from ...engine.prefixes import Prefixes
from ...engine.processors import Processors
from ...engine.text import TokenTexts, find_tokenizer
from .config import PARSEConfig
from .prefixes import boundaries, kept_prefix

_ANSWER = "ANSWER-TO-BE-JUDGED"


@dataclass
class Verdict:
    """What the judge says of one row's answer.

    Args:
        lengths: b_i, the judged prefixes, in tokens of the answer; the last is the whole answer.
        confidences: c_i in [0, 1]; nan where it was not judged.
    """

    lengths: list[int]
    confidences: list[float]


@dataclass(frozen=True)
class Answer:
    """A drafted answer of one row.

    Args:
        start: new tokens that the row held before it.
        ids: what is judged, a closing EOS left out.
        finished: whether it ended by a stopping rule, and not for want of the draft's context.
        closed: whether an EOS followed.
    """

    start: int
    ids: list[int]
    finished: bool
    closed: bool

    @property
    def written(self) -> int:
        """Its tokens, a closing EOS included."""
        return len(self.ids) + self.closed


class Judge:
    """Judges drafted answers with the target, whose cache takes in prompts and answers on the way.

    Args:
        call: the call.
        target: the target, which reads whole texts.
        config: the scheme's config.

    Raises:
        ValueError: there is no tokenizer, or it cannot tell the two labels apart.
    """

    def __init__(self, call: CallState, target: CachedModel, config: PARSEConfig) -> None:
        self.call = call
        self.target = target
        self.config = config
        self.tokenizer = tokenizer = find_tokenizer(call.request.model, call.request.tokenizer)
        self.labels = label_ids(tokenizer, config.labels)
        self.part, self.full = questions(tokenizer, config)
        self.processors = Processors(call.request.processors)
        self.context = context_of(call.request.model) or math.inf
        self.pieces = TokenTexts(tokenizer).pieces

    def __call__(self, live: Sequence[int], answers: Sequence[Answer], cached: Sequence[int]) -> list[Verdict]:
        """Judge the answers that the canvas holds for the rows `live`.

        Args:
            cached: for each row, how many of its tokens the target's cache holds, fewer than precede its answer.
        """
        config = self.config
        lengths = [boundaries(self.pieces(answer.ids), config.segment_tokens) or [0] for answer in answers]
        ends = self.call.lengths(live)
        befores = [end - answer.written for end, answer in zip(ends, answers, strict=True)]
        most = 0 if config.boundary == "cascade" else max(len(row) for row in lengths) - 1
        wholes = [[before + row[-1]] for before, row in zip(befores, lengths, strict=True)]
        parts = [
            ([before + n for n in row[:-1]] + [-1] * most)[:most] for before, row in zip(befores, lengths, strict=True)
        ]
        if config.single_pass:
            packed = [[*whole, *part] for whole, part in zip(wholes, parts, strict=True)]
            values = self._pass(live, cached, ends, packed, [self.full, *[self.part] * most], befores)
        else:
            values = self._pass(live, cached, ends, wholes, [self.full], befores)
            for i, answer in enumerate(answers):
                if answer.finished and values[i][0] >= config.accept_threshold:
                    parts[i] = [-1] * most
            if any(n >= 0 for row in parts for n in row):
                more = self._pass(live, ends, ends, parts, [self.part] * most, None)
                values = [[*full, *part] for full, part in zip(values, more, strict=True)]
        verdicts = []
        for row, (full, *partial) in zip(lengths, values, strict=True):
            verdicts.append(Verdict(row, [*(partial + [math.nan] * len(row))[: len(row) - 1], full]))
        return verdicts

    def _pass(
        self,
        live: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        prefixes: list[list[int]],
        suffixes: Sequence[list[int]],
        befores: Sequence[int] | None,
    ) -> list[list[float]]:
        """The confidences after each of `prefixes`, nan for -1 and for what the target's context cannot hold.

        Args:
            starts, ends: for each row, the columns of its text that are fed on the way.
            prefixes: for each row, the columns that each copy of its suffix follows; -1 for none.
            suffixes: the ids of each copy, the same for all rows.
            befores: for each row, the column where its answer begins, if the laws of its tokens may be wanted.
        """
        sizes = [len(suffix) for suffix in suffixes]
        fitting = [
            [n if n + size <= self.context else -1 for n, size in zip(row, sizes, strict=True)] for row in prefixes
        ]
        if fitting != prefixes:
            warn_once(
                f"the judge's question does not fit into the target's context of {self.context} tokens behind the "
                "longest prefixes: these count as not valid",
                late=True,
            )
        skip = None
        if befores is not None and (self.call.scores.wanted or self.call.logits.wanted):
            skip = min(before - 1 - start for before, start in zip(befores, starts, strict=True))
        asked = [i for i in range(len(sizes)) if any(row[i] >= 0 for row in fitting)]
        values = [[math.nan] * len(sizes) for _ in live]
        if not asked and list(starts) == list(ends):
            return values
        copies = [[row[i] for i in asked] for row in fitting]
        logits = self._packed(live, starts, ends, copies, [suffixes[i] for i in asked], skip)
        text = logits.shape[1] - len(asked)
        if skip is not None:
            assert befores is not None
            self._record(logits[:, :text], live, [start + skip for start in starts], ends, befores)
        found = confidence(logits[:, text:], *self.labels).tolist()
        for own, row, kept in zip(values, found, copies, strict=True):
            for i, c, n in zip(asked, row, kept, strict=True):
                own[i] = c if n >= 0 else math.nan
                if math.isnan(c) and n >= 0:
                    raise without_a_law("target", self.call.request.model)
        return values

    def _packed(
        self,
        live: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        prefixes: list[list[int]],
        suffixes: Sequence[list[int]],
        skip: int | None,
    ) -> torch.Tensor:
        """Logits after every copy, (rows, copies, vocabulary), and before them, unless `skip` is `None`, those after
        each of the text's columns but the first `skip`."""
        if not self.target.reads_packed:
            return self._expanded(live, starts, ends, prefixes, suffixes, skip)
        sizes = [len(suffix) for suffix in suffixes]
        slots = packed_slots(starts, ends, prefixes, sizes)
        text = slots.columns.shape[1] - sum(sizes)
        ids = self._block(live, starts, ends, text, [token for suffix in suffixes for token in suffix])
        places = [text + sum(sizes[: i + 1]) - 1 for i in range(len(sizes))]
        return self._feed(ids, slots, places if skip is None else [*range(skip, text), *places])

    def _expanded(
        self,
        live: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        prefixes: list[list[int]],
        suffixes: Sequence[list[int]],
        skip: int | None,
    ) -> torch.Tensor:
        """As `_packed` for a model that cannot read a packed block: the copies of a row are a batch over copies of its
        cache."""
        text, logits = max(end - start for start, end in zip(starts, ends, strict=True)), []
        if text:
            fed = self.target.feed(self.call.canvas.read(live, text, 0), ends, keep=1 if skip is None else text - skip)
            logits.append(fed[:, : 0 if skip is None else fed.shape[1]])
        for size in dict.fromkeys(len(suffix) for suffix in suffixes):
            copies = [i for i, suffix in enumerate(suffixes) if len(suffix) == size]
            step = max(self.config.max_packed_tokens // size, 1)
            for first in range(0, len(copies), step):
                part = copies[first : first + step]
                ids = torch.tensor([suffixes[i] for i in part], device=self.call.device)
                # A copy that is not judged stands behind the first column, and what it says is dropped.
                seen = [[max(own[i], 1) for i in part] for own in prefixes]
                rows = [self.target.feed_copies(ids, own, row) for row, own in enumerate(seen)]
                logits.append(torch.stack(rows))
        return torch.cat([part.to(self.call.device) for part in logits], dim=1)

    def _block(
        self, live: Sequence[int], starts: Sequence[int], ends: Sequence[int], text: int, suffixes: list[int]
    ) -> torch.Tensor:
        """(rows, width) ids: each row's text from its first column on, filling, and the copies."""
        device, filler = self.call.device, self.call.canvas.filler
        copies = torch.tensor(suffixes, dtype=torch.long, device=device).expand(len(live), -1)
        if not text:
            return copies
        counts = torch.tensor([[end - start] for start, end in zip(starts, ends, strict=True)], device=device)
        place = torch.arange(text, device=device).expand(len(live), -1)
        ids = self.call.canvas.read(live, text, 0).gather(1, (place + text - counts).clamp(max=text - 1))
        return torch.cat([torch.where(place < counts, ids, filler), copies], dim=1)

    def _feed(self, ids: torch.Tensor, slots: Slots, keep: list[int]) -> torch.Tensor:
        """Logits (rows, len(keep), vocabulary), in as many forwards as `max_packed_tokens` asks for."""
        step = max(self.config.max_packed_tokens // len(ids), 1)
        logits = []
        for first in range(0, ids.shape[1], step):
            part = slice(first, first + step)
            inside = [place - first for place in keep if first <= place < first + step]
            logits.append(self.target.feed_packed(ids[:, part], slots[part], inside).to(self.call.device))
        return torch.cat(logits, dim=1)

    def _record(
        self,
        logits: torch.Tensor,
        live: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        befores: Sequence[int],
    ) -> None:
        """Put the laws of the answers' tokens on record: `logits` (rows, columns, vocabulary) of each row's text from
        column `starts` on."""
        call = self.call
        counts = [end - before for end, before in zip(ends, befores, strict=True)]
        widest = max(counts)
        first = [before - 1 - start for before, start in zip(befores, starts, strict=True)]
        places = torch.tensor(first, device=call.device).unsqueeze(1) + torch.arange(widest, device=call.device)
        places = places.clamp(max=logits.shape[1] - 1).unsqueeze(-1).expand(-1, -1, logits.shape[-1])
        raw = logits.gather(1, places).float()  # (rows, answer, vocabulary)
        columns = [width - count for width, count in zip(call.canvas.widths(live), counts, strict=True)]
        news = [column - call.canvas.prompt_width for column in columns]
        call.logits.put(raw, live, news, counts)
        if call.scores.wanted:
            scores = self.processors(
                raw.clone().unsqueeze(1), call.canvas.shown[:, :1], live, columns, self._texts(live, columns, counts)
            )
            call.scores.put(scores.squeeze(1), live, news, counts)

    def _texts(self, live: Sequence[int], columns: Sequence[int], counts: Sequence[int]) -> Prefixes | None:
        """Which texts there are between the `columns` of answers of `counts` tokens."""
        if not self.processors.wants_text:
            return None
        canvas, most = self.call.canvas, max(counts)
        canvas.reserve(max(columns) + most)
        answers = [canvas.shown[row, :1, column : column + most] for row, column in zip(live, columns, strict=True)]
        there = (
            torch.arange(1, most + 1, device=self.call.device) < torch.tensor(counts, device=self.call.device)[:, None]
        )
        return Prefixes(canvas, live, torch.stack(answers), there.unsqueeze(1))


def confidence(logits: torch.Tensor, correct: Sequence[int], incorrect: Sequence[int]) -> torch.Tensor:
    """P(correct) / (P(correct) + P(incorrect)) of raw `logits` (..., vocabulary), each summed over its label's ids;
    float32, nan where they hold nan or +inf."""
    logits = logits.float()
    weights = [logits[..., list(ids)].logsumexp(dim=-1) for ids in (correct, incorrect)]
    return torch.sigmoid(weights[0] - weights[1]).masked_fill(torch.maximum(*weights) == torch.inf, torch.nan)


def decide(config: PARSEConfig, answer: Answer, verdict: Verdict, uniform: float) -> tuple[int, bool]:
    """How many tokens of `answer` are kept, and whether it is returned as it is; `uniform` in [0, 1) is for
    `boundary="random"`."""
    accepted = answer.finished and verdict.confidences[-1] >= config.accept_threshold
    index = kept_prefix(verdict.confidences, config.boundary, config.prefix_threshold, uniform)
    return answer.written if accepted else verdict.lengths[index - 1] if index else 0, accepted


def questions(tokenizer: Any, config: PARSEConfig) -> tuple[list[int], list[int]]:
    """The ids that ask about a prefix, and about a whole answer; see [`suffix_ids`]."""
    words = dict(zip(("{correct}", "{incorrect}"), config.labels, strict=True))
    part, full = (
        suffix_ids(tokenizer, filled(prompt, words)) for prompt in (config.judge_prompt, config.full_judge_prompt)
    )
    return part, full


def suffix_ids(tokenizer: Any, prompt: str) -> list[int]:
    """The ids that end the answer, ask `prompt` and begin the judge's reply, by the tokenizer's chat template; plain
    text where it has none. A template that opens a thought gets it closed at once.

    Raises:
        ValueError: the chat template does not show the answer as it is.
    """
    text = f"\n\n{prompt}\n"
    if getattr(tokenizer, "chat_template", None):
        turns = [("user", "question"), ("assistant", _ANSWER), ("user", prompt)]
        messages = [{"role": role, "content": content} for role, content in turns]
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        _, found, text = rendered.rpartition(_ANSWER)
        if not found:
            raise ValueError("the tokenizer's chat template leaves out the assistant's answer: parse cannot use it")
        if text.rstrip().endswith("<think>"):
            text = text.rstrip() + "\n\n</think>\n\n"
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def label_ids(tokenizer: Any, labels: tuple[str, str]) -> tuple[list[int], list[int]]:
    """The ids of the two labels: of every spelling (as given, lower case, with and without a leading space) that is
    one token for both; of their first tokens where there is none.

    Raises:
        ValueError: the tokenizer cannot tell them apart.
    """
    variants = []
    for change in (str, str.lower):
        for space in ("", " "):
            pair = [tokenizer(space + change(label), add_special_tokens=False)["input_ids"] for label in labels]
            if all(pair) and pair[0][0] != pair[1][0]:
                variants.append(pair)
    single = [pair for pair in variants if all(len(ids) == 1 for ids in pair)]
    unknown = getattr(tokenizer, "unk_token_id", None)
    chosen = [pair for pair in single or variants[:1] if unknown not in (pair[0][0], pair[1][0])]
    correct, incorrect = ({pair[i][0] for pair in chosen} for i in (0, 1))
    if not chosen or correct & incorrect:
        raise ValueError(f'the tokenizer cannot tell labels={labels!r} apart: pass others, such as ("Yes", "No")')
    return sorted(correct), sorted(incorrect)


def filled(prompt: str, words: dict[str, str]) -> str:
    """`prompt` with the labels in their places."""
    for name, word in words.items():
        prompt = prompt.replace(name, word)
    return prompt
