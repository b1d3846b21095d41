"""What seeded calls of every scheme gave when tests/data/digests.json was recorded: a change that is meant to alter no
behaviour leaves all of it as it is.

`python -m tests.test_digests --record` records every call anew.
"""

import hashlib
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_semspec import SemSpecConfig
from tests.digest_cases import CASES, GIVEN, PAD, PADS, draft_of, model, probe, prompts, tokens

# What random models bring about.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in ("fewer than 10%", "of .* particles hardly more", "The target scores", "input_ids holds only")
]

FILE = Path(__file__).parent / "data" / "digests.json"
RECORDS = ("triggers", "target_entropies", "draft_entropies", "verdicts", "boundaries", "kept_tokens", "segments")
RECORDS += ("particles", "log_weights", "ess", "ancestors", "log_evidence", "sequence_log_weights")
# These hold floats of float32 steps inside the models, which another vector width changes in the last digits.
FLOATS = ("records", "scores", "cache", "trace")


class Stream:
    """Keeps what it is given, in order."""

    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.puts.append("end")


def run(name: str, seed: int = 3, **changed: Any) -> tuple[Any, dict[str, Any]]:
    """The output of the call, or of its second turn, and everything that is to stay as it is."""
    case, scheme = CASES[name], name.split()[0]
    target, inputs = model(case.target), prompts(case.rows)
    fields = {"max_new_tokens": 20, "pad_token_id": PAD, "return_dict_in_generate": True, **case.fields, **changed}
    fields |= {"probe": probe().name} if fields.get("scorer") == "probe" else {}
    models = {"assistant_model": draft_of(case.target, case.draft)} if case.draft else {}
    needed = {"tokenizer": tokens()} if scheme in ("parse", "semantic") else {}
    shapes, outputs, stream = [], [], Stream()

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        shapes.append(list(ids.shape))

    def call() -> None:
        more = dict(needed)
        for part in case.given:
            more |= GIVEN[part]() if part in GIVEN else {}
        more |= {"streamer": stream} if "stream" in case.given else {}
        config = SemSpecConfig(scheme, **fields)
        outputs.append(target.generate(**inputs, **models, **more, generation_config=config))

    handle = target.register_forward_pre_hook(note, with_kwargs=True)
    torch.manual_seed(seed)
    try:
        call()
        if "turn" in case.given:
            ids = torch.cat([outputs[0].sequences, torch.tensor([[40, 41, 42]])], dim=1)
            shown = ids[:, -4:] if "suffix" in case.given else ids  # the cache lacks the last token, too
            inputs = {"input_ids": shown, "attention_mask": torch.ones_like(ids), **cache_of(outputs[0])}
            call()
    finally:
        handle.remove()
    output = outputs[-1]
    return output, {
        "ids": output.sequences,
        "stats": [[one.stats.to_dict() for one in outputs], shapes],
        "records": [{key: getattr(one, key) for key in RECORDS if hasattr(one, key)} for one in outputs],
        "scores": [(one.get("scores"), one.get("logits")) for one in outputs],
        "cache": states(output, [0] if target.config.is_encoder_decoder else PADS[case.rows]),
        "trace": output.trace.to_dict() | {"settings": None} if fields.get("trace") else None,  # a field may come
        "stream": stream.puts,
        "draws": torch.rand(()),  # how far the call has moved the global generator
    }


def cache_of(output: Any) -> dict[str, Any]:
    name = "cache" if "cache" in output else "past_key_values"
    return {name: output[name]}


def states(output: Any, pads: list[int]) -> list[Any]:
    """Keys and values of every layer where the rows of the returned cache have a token; `pads` precede them."""
    (cache,) = cache_of(output).values()
    cache, found = getattr(cache, "self_attention_cache", cache), []
    new = [row.emitted for row in output.stats.rows]
    width, total = output.sequences.shape[1] - max(new), cache.get_seq_length()
    for layer in cache.layers:
        gone = total - layer.keys.shape[2]  # columns that a sliding window has passed
        for row, emitted in enumerate(new):
            real = slice(max(pads[row * len(pads) // len(new)] - gone, 0), width + emitted - gone)
            found.append((layer.keys[row, :, real], layer.values[row, :, real]))
    return found


def steady(value: Any) -> Any:
    """`value` for JSON: without times, and floats only as far as they do not depend on the order of a sum."""
    if isinstance(value, float):
        return float(f"{round(value, 6) + 0.0:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): steady(one) for name, one in value.items() if "seconds" not in str(name)}
    if isinstance(value, (list, tuple)):
        return [steady(one) for one in value]
    if isinstance(value, torch.Tensor):
        return steady(value.tolist())
    return steady(vars(value)) if hasattr(value, "__dict__") else value


def digested(name: str, **changed: Any) -> dict[str, Any]:
    output, parts = run(name, **changed)
    texts = {part: json.dumps(steady(value), sort_keys=True) for part, value in parts.items()}
    digests = {part: hashlib.sha256(text.encode()).hexdigest()[:16] for part, text in texts.items()}
    return {"sequences": output.sequences.tolist(), "digests": digests}


def environment() -> dict[str, Any]:
    return {
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def recorded() -> dict[str, Any]:
    """What the file holds; skips under other versions, whose draws and forwards may differ."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    here, there = environment(), content["environment"]
    for key in ("torch", "transformers"):
        if here[key] != there[key]:
            pytest.skip(f"tests/data/digests.json was recorded with {key} {there[key]}, and this is {here[key]}")
    return content


@pytest.mark.parametrize("name", CASES)
def test_a_call_gives_what_it_gave(name: str) -> None:
    content, found = recorded(), digested(name)
    expected, there = content["cases"][name], content["environment"]
    assert found["sequences"] == expected["sequences"]
    same = there["machine"] == environment()["machine"]
    compared = [part for part in expected["digests"] if same or part not in FLOATS]
    differ = [part for part in compared if found["digests"][part] != expected["digests"][part]]
    assert not differ, f"{name}: {', '.join(differ)} not as recorded under {there}"


def test_every_recorded_call_is_made() -> None:
    assert list(recorded()["cases"]) == list(CASES)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("lossless sampled", {"seed": 4}),
        ("lossless rules greedy", {"repetition_penalty": 1.5}),
        ("easd sampled", {"penalty": 1.0}),
        ("parse greedy", {"prefix_threshold": 0.9}),
        ("semantic likelihood", {"accept_ratio": 0.5}),
        ("smc", {"seed": 4}),
    ],
)
def test_another_call_is_told_apart(name: str, changed: dict[str, Any]) -> None:
    found, expected = digested(name, **changed), recorded()["cases"][name]
    assert found["sequences"] != expected["sequences"]
    assert all(found["digests"][part] != expected["digests"][part] for part in ("ids", "stats", "cache"))


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit("usage: python -m tests.test_digests --record")
    torch.set_num_threads(1)
    lines = [f"{json.dumps(name)}: {json.dumps(digested(name), separators=(',', ':'))}" for name in CASES]
    cases = "{\n" + ",\n".join(lines) + "\n}"
    FILE.write_text(f'{{"environment": {json.dumps(environment())},\n"cases": {cases}}}\n', encoding="utf-8")
