"""Forwards, and memory, of a run."""

import sys

import pytest
import torch

from hf_semspec.bench.accounting import accounted, peak_memory
from hf_semspec.bench.subject import controlled_subject
from tests.bench.shared import SMALLEST


def test_forwards_are_counted_and_forward_is_put_back():
    subject = controlled_subject(0.7, target_size=SMALLEST, draft_size=SMALLEST, vocab=200)
    given = subject.batch(1, 0)
    with accounted(subject.model, subject.draft) as account:
        subject.model.generate(given.ids, attention_mask=given.mask, max_new_tokens=5, do_sample=False)
        subject.draft(given.ids)
    assert (account.target.calls, account.target.tokens) == (5, 16 + 4)
    assert (account.draft.calls, account.draft.tokens) == (1, 16)
    assert 0 < account.target.seconds + account.draft.seconds <= account.seconds
    with pytest.raises(KeyError), accounted(subject.model, subject.draft):
        raise KeyError
    assert "forward" not in vars(subject.model)
    assert "forward" not in vars(subject.draft)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_is_what_the_block_took_whatever_ran_before():
    megabytes = []
    for size in (40, 40, 10):
        with peak_memory(torch.device("cpu")) as peak:
            held = [torch.ones(size, 1000, 25) for _ in range(10)]
            del held
        megabytes.append(peak.value / 1e6)
    assert megabytes == pytest.approx([40, 40, 10], abs=4)
