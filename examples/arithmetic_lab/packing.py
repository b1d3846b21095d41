"""Batches in which every solution is judged after every step, all in one forward."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from .task import Problem, prefix_is_right
from .tokenizer import LABELS, judging_suffix, prompt_text

IGNORE = -100


@dataclass
class Packed:
    """A batch of L columns: the base sequence, then a copy of the judging suffix for each boundary, then padding."""

    input_ids: torch.Tensor  # (B, L)
    position_ids: torch.Tensor  # (B, L)
    mask: torch.Tensor  # (B, 1, L, L), 0 where a row's column is seen and the dtype's least number where it is not
    targets: torch.Tensor  # (B, L), the next character of the base sequence, IGNORE where nothing is to be learned
    labels: torch.Tensor  # (B, L), the label's token at the last token of each copy, IGNORE elsewhere
    slips: (
        torch.Tensor
    )  # (B, L), at each written character 1 if it is wrong after what stands before it, else 0, or IGNORE
    whole: torch.Tensor  # (B, L), True at the last token of the copy that judges the whole answer


@dataclass
class Row:
    """One solution, as it was written, with what is to be learned of it."""

    problem: Problem
    text: str
    expected: list[bool]  # one a character of `text`: False where it must not be imitated
    known: int | None = None  # the number of characters for which `expected` also tells right from wrong; None is all
    finished: bool = True  # whether the end token was written
    judged: bool = True  # whether it carries judging copies


def boundaries(text: str) -> list[int]:
    """Where a solution is judged: after each newline, and at its end."""
    cuts = [index + 1 for index, char in enumerate(text) if char == "\n"]
    return cuts if cuts and cuts[-1] == len(text) else [*cuts, len(text)]


class Packer:
    """Packs rows with one tokenizer.

    Args:
        tokenizer: The lab's tokenizer.
        multiple: The number of columns is rounded up to a multiple of this.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, multiple: int = 8):
        self.tokenizer, self.multiple = tokenizer, multiple
        self.suffix = self.encode(judging_suffix(tokenizer))
        self.yes, self.no = (self.encode(label)[0] for label in LABELS)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, none added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def __call__(self, rows: list[Row]) -> Packed:
        """One batch, rows padded on the right.

        Args:
            rows: The B solutions.
        """
        packed = [self.pack_row(row) for row in rows]
        length = max(len(ids) for ids, *_ in packed)
        length = -(-length // self.multiple) * self.multiple
        shape = (len(rows), length)
        batch = Packed(
            input_ids=torch.full(shape, self.tokenizer.pad_token_id),
            position_ids=torch.zeros(shape, dtype=torch.long),
            mask=torch.full((len(rows), 1, length, length), torch.finfo(torch.float32).min),
            targets=torch.full(shape, IGNORE),
            labels=torch.full(shape, IGNORE),
            slips=torch.full(shape, IGNORE),
            whole=torch.zeros(shape, dtype=torch.bool),
        )
        for index, (ids, positions, base, targets, copies) in enumerate(packed):
            used = len(ids)
            batch.input_ids[index, :used] = torch.tensor(ids)
            batch.position_ids[index, :used] = torch.tensor(positions)
            batch.targets[index, : len(targets)] = torch.tensor(targets)
            slips = [int(not ok) for ok in rows[index].expected[: rows[index].known]]
            begin = base - rows[index].finished - len(rows[index].text)
            batch.slips[index, begin : begin + len(slips)] = torch.tensor(slips, dtype=torch.long)
            seen = batch.mask[index, 0]
            seen.fill_diagonal_(0)  # a padding row that sees nothing would be NaN
            seen[:base, :base].masked_fill_(torch.ones(base, base).tril().bool(), 0)
            for start, prefix, right, whole in copies:
                end = start + len(self.suffix)
                seen[start:end, :prefix] = 0
                seen[start:end, start:end].masked_fill_(torch.ones(end - start, end - start).tril().bool(), 0)
                batch.labels[index, end - 1] = self.yes if right else self.no
                batch.whole[index, end - 1] = whole
        return batch

    def pack_row(self, row: Row) -> tuple[list[int], list[int], int, list[int], list[tuple[int, int, bool, bool]]]:
        """Ids, positions, length without copies, targets, and (start, prefix length, right, whole) of each copy."""
        prompt, text = self.encode(prompt_text(self.tokenizer, row.problem.question)), self.encode(row.text)
        end = [self.tokenizer.eos_token_id] if row.finished else []
        ids = prompt + text + end
        learned = [*(token if ok else IGNORE for token, ok in zip(text, row.expected, strict=True)), *end]
        targets = [IGNORE] * (len(prompt) - 1) + learned
        base, positions, copies = len(ids), list(range(len(ids))), []
        for cut in boundaries(row.text) if row.judged else ():
            prefix = len(prompt) + cut
            right = prefix_is_right(row.problem, row.text[:cut])
            copies.append((len(ids), prefix, right, cut == len(row.text)))
            ids = ids + self.suffix
            positions += range(prefix, prefix + len(self.suffix))
        return ids, positions, base, targets, copies
