"""Traces made by hand, long or hostile, and the tokenizers that spell them."""

import math
import random

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from hf_semspec.trace import Answer, Event, ParticleRound, Population, Prefix, Row, Span, Trace

HOSTILE = (
    "</script><script>window.pwned = 1</script>",
    '"><img src=x onerror="window.pwned = 1">',
    "' onfocus='window.pwned = 1",
    "<!--",
    "</style></div>]]>",
    "&lt;b&gt;",
    "\u202eevil\u2066",
    "\x00\x1b[31m",
    "\ud800",
    "{{ 7 * 7 }}",
    "\n",
    "\t",
    "   ",
)


class Words:
    """A tokenizer that only decodes: id i is word i, the hostile ones first."""

    WORDS = (*HOSTILE, *(f" word{i}" for i in range(200)))

    def decode(self, ids, **kwargs):
        return "".join(self.WORDS[token % len(self.WORDS)] for token in ids)


def bytes_tokenizer():
    """Byte-level, every byte a token: a character of UTF-8 takes as many tokens as bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(tokenizer_models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def speculated(length, *, rows=1, seed=0, vocabulary=213, spans=False):
    """A trace of easd: blocks of five drafts, some accepted, rejected, triggered; the last tokens cut."""
    chance = random.Random(seed)
    made = []
    for _ in range(rows):
        row = Row([chance.randrange(vocabulary) for _ in range(12)], length)
        row.events.append(Event("plain", chance.randrange(vocabulary), 0, 0, log_p=-0.5, target_entropy=1.0))
        at, forward = 1, 0
        while at < length + 2:
            forward += 1

            def event(kind, t, at=at, forward=forward):
                numbers = (-chance.random(), -3 * chance.random(), 4 * chance.random(), 4 * chance.random())
                cut = at + t >= length and kind in ("accepted", "residual", "resampled", "bonus")
                others = (5,) if kind == "accepted" and t == 1 else ()
                return Event(kind, chance.randrange(vocabulary), at + t, forward, cut, *numbers, others)

            accepted = chance.randrange(6)
            row.events += [event("accepted", t) for t in range(accepted)]
            outcome = "bonus" if accepted == 5 else chance.choice(("residual", "residual", "resampled"))
            if outcome != "bonus":
                row.events.append(event("triggered" if outcome == "resampled" else "rejected", accepted))
                row.events += [event("untested", t) for t in range(accepted + 1, 5)]
            row.events.append(event(outcome, accepted))
            if spans and forward % 3 == 0:
                numbers = {"p_hat": 0.7, "rule": "<ratio>"}
                row.spans.append(
                    Span(at, at + accepted + 1, "by the draft", forward % 2 == 0, numbers, len(row.events))
                )
            at += accepted + 1
        made.append(row)
    settings = {
        "scheme": "easd",
        "num_draft_tokens": 5,
        "trigger": "entropy",
        "target_entropy_threshold": 2.0,
        "draft_entropy_threshold": 1.5,
        "do_sample": True,
        "temperature": 0.7,
    }
    return Trace("easd", settings, made)


def judged(length, *, answers=2, seed=0, vocabulary=213):
    """A trace of parse: answers of `length` tokens, each cut to a judged prefix, and tokens of the target between."""
    chance = random.Random(seed)
    row = Row([3, 4], 0)
    at = 0
    for number in range(answers):
        ids = [chance.randrange(vocabulary) for _ in range(length)]
        lengths = [*range(6, length, 6), length]
        confidences = [math.nan if n == 12 else chance.random() for n in lengths]
        whole = number == answers - 1
        kept = length if whole else lengths[len(lengths) // 2]
        pairs = tuple(Prefix(n, c) for n, c in zip(lengths, confidences, strict=True))
        row.answers.append(Answer(at, length, kept, whole, pairs, len(row.events)))
        row.events += [Event("kept" if t < kept else "unkept", token, at + t, number) for t, token in enumerate(ids)]
        at += kept
        if not whole:
            row.events.append(Event("plain", 20, at, number, log_p=-0.1, target_entropy=0.2))
            at += 1
    row.length = at
    settings = {"scheme": "parse", "prefix_threshold": 0.5, "accept_threshold": 0.8, "segment_tokens": 6}
    return Trace("parse", settings, [row])


def weighted(length, *, particles=8, gamma=8, seed=0, vocabulary=213):
    """A trace of smc, with resamplings every third round and one collapse."""
    chance = random.Random(seed)
    rounds = [ParticleRound(0, [[7]] * particles, None, None, False, False, list(range(particles)))]
    at = 1
    while at < length:
        tokens = [[chance.randrange(vocabulary) for _ in range(gamma + 1)] for _ in range(particles)]
        weights = [chance.gauss(0, 1.5) for _ in range(particles)]
        weights[0] = -math.inf
        peak = max(weights)
        shares = [math.exp(value - peak) for value in weights]
        ess = sum(shares) ** 2 / sum(share**2 for share in shares)
        moved = len(rounds) % 3 == 0
        sources = sorted(chance.choices(range(particles), shares, k=particles)) if moved else list(range(particles))
        rounds.append(ParticleRound(at, tokens, weights, ess, moved, len(rounds) == 5, sources))
        at += gamma + 1
    population = Population(rounds, rounds[-1].log_weights, [1])
    row = Row([1], at, population=0, slot=1)
    slot = 1
    lineage = []
    for number, entry in reversed(list(enumerate(rounds))):
        slot = entry.ancestors[slot]
        lineage.append((number, entry, slot))
    for number, entry, slot in reversed(lineage):
        last = len(entry.tokens[slot]) - 1
        kinds = ["plain"] if number == 0 else ["accepted"] * last + ["bonus"]
        row.events += [
            Event(kind, token, entry.start + t, number, log_p=-0.3, log_q=-0.4 if kind == "accepted" else math.nan)
            for t, (kind, token) in enumerate(zip(kinds, entry.tokens[slot], strict=True))
        ]
    settings = {
        "scheme": "smc",
        "num_particles": particles,
        "ess_threshold": 0.5,
        "do_sample": True,
        "temperature": 1.0,
    }
    return Trace("smc", settings, [row], [population])
