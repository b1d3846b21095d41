"""Folders that `generate(custom_generate=...)` runs: a scheme with its settings, for whoever has only transformers."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

from ..configuration import SemSpecConfig, scheme_from_dict
from ..drafts.choose import asks_for_model
from .sidecar import Sidecar

# The oldest version whose `run` a recipe may call.
REQUIREMENT = "hf-semspec>=0.1.0"

_GENERATE = '''"""Decode with a scheme of hf-semspec, by `model.generate(custom_generate=..., assistant_model=...)`.

Written by `hf-semspec export-recipe`. CONFIG holds the scheme and its settings; the installed package does the rest.
"""

CONFIG = {config}


def generate(*inputs, model, **arguments):
    """What `model.generate` takes, decoded with CONFIG where the call says nothing else."""
    try:
        from hf_semspec.hub.recipe import run
    except ImportError as error:
        raise ImportError('This recipe runs the package hf-semspec: pip install "{requirement}"') from error
    return run(model, CONFIG, *inputs, **arguments)
'''

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- custom_generate
- speculative-decoding
- hf-semspec
{base_model}---

# A generation recipe: `{scheme}`

Decodes with the scheme `{scheme}` of the package hf-semspec: {drafting}, the target decides.

    pip install "{requirement}"

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({target})
model = AutoModelForCausalLM.from_pretrained({target}, dtype="auto")
{load_draft}
inputs = tokenizer("The tides are caused by", return_tensors="pt")
out = model.generate(
    **inputs,
{pass_draft}    custom_generate="THIS REPOSITORY OR FOLDER",
    trust_remote_code=True,
    max_new_tokens=64,
)
print(tokenizer.decode(out[0]))
```

`trust_remote_code=True` lets transformers run `custom_generate/generate.py`, which calls the installed package and
holds nothing but the settings below; transformers refuses without it. Arguments of the call beat these settings. With
hf-semspec imported no code of this repository is needed:

```python
from hf_semspec import SemSpecConfig

config = SemSpecConfig.from_pretrained("THIS REPOSITORY OR FOLDER", max_new_tokens=64)
out = model.generate(**inputs, {beside}generation_config=config)
```

## Settings

```json
{config}
```
{calibration}{results}"""


def export_recipe(
    folder: str | os.PathLike[str], config: SemSpecConfig, sidecar: Sidecar | None = None, *, overwrite: bool = False
) -> Path:
    """
    Write a folder for `model.generate(custom_generate=folder, trust_remote_code=True, assistant_model=...)`.

    It holds `custom_generate/generate.py` and its `requirements.txt`, `generation_config.json`, `semspec.json` and a
    model card, `README.md`. Uploaded as it is, it is a repository of the Hub.

    Args:
        folder: Where to; it may hold a model already.
        config ([`SemSpecConfig`]): The scheme with its settings.
        sidecar ([`Sidecar`], *optional*): What it was made for.
        overwrite (`bool`): Replace files of these names.

    Returns:
        The folder.

    Raises:
        ValueError: If a file of these names is there and `overwrite` is off, or the config has no scheme.
    """
    folder, sidecar = Path(folder), sidecar or Sidecar()
    entries = stored_entries(config)
    texts = {
        "custom_generate/generate.py": _GENERATE.format(
            config=pformat(entries, width=110, sort_dicts=False), requirement=REQUIREMENT
        ),
        "custom_generate/requirements.txt": REQUIREMENT + "\n",
        "README.md": _card(entries, sidecar),
    }
    there = [name for name in (*texts, "generation_config.json", "semspec.json") if (folder / name).exists()]
    if there and not overwrite:
        raise ValueError(f"{folder} holds {', '.join(there)} already: name another folder, or say --overwrite")
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    SemSpecConfig.from_dict(entries).save_pretrained(folder)
    sidecar.save_pretrained(folder)
    return folder


def run(model: Any, entries: Mapping[str, Any], *inputs: Any, **arguments: Any) -> Any:
    """
    `model.generate` with the recipe's config where the call does not bring a scheme of its own.

    Args:
        model: The target.
        entries (`dict`): The config as `SemSpecConfig.from_dict` takes it.
        inputs, arguments: Those of `generate`; its settings, given loose or as a plain `GenerationConfig`, beat the
            recipe's.

    Returns:
        What `generate` returns.

    Raises:
        ValueError: If an entry or an argument is malformed or refused.
    """
    given = arguments.pop("generation_config", None)
    if getattr(given, "semspec", None) is not None:
        config = copy.deepcopy(given)
    else:
        own = {} if given is None else given.to_diff_dict()
        config = SemSpecConfig.from_dict({**entries, **{name: own[name] for name in own if name not in _NOT_SETTINGS}})
    arguments = config.update(**arguments)
    # The class's method: where the model's own folder holds the recipe, `model.generate` is what called this.
    return type(model).generate(model, *inputs, generation_config=config, **arguments)


_NOT_SETTINGS = ("transformers_version", "semspec", "_from_model_config")


def stored_entries(config: SemSpecConfig) -> dict[str, Any]:
    """The settings of a config as JSON holds them, without the version of transformers.

    Raises:
        ValueError: If there is no scheme, or a value is not JSON.
    """
    if config.semspec is None:
        raise ValueError("this config has no scheme: its `semspec` entry is None")
    entries = {name: value for name, value in config.to_diff_dict().items() if name not in _NOT_SETTINGS[:1]}
    try:
        plain: dict[str, Any] = json.loads(json.dumps(entries, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"a recipe holds values of JSON only: {error}") from None
    return plain


def takes_draft(entry: Mapping[str, Any]) -> bool:
    """Whether a call of the scheme that `entry` describes has a draft model."""
    return asks_for_model(scheme_from_dict(entry))


def call_arguments(entry: Mapping[str, Any]) -> list[str]:
    """What such a call needs beside prompt and settings, as it is written."""
    words = entry["scheme"] == "parse" or getattr(scheme_from_dict(entry), "reads_text", False)
    return ["assistant_model=draft"] * takes_draft(entry) + ["tokenizer=tokenizer"] * words


def _card(entries: Mapping[str, Any], sidecar: Sidecar) -> str:
    def section(title: str, content: Any) -> str:
        return "" if content is None else f"\n## {title}\n\n```json\n{_json(content)}\n```\n"

    # A string of JSON is one of YAML and of Python too.
    draft = json.dumps(sidecar.draft or "DRAFT")
    passed = call_arguments(entries["semspec"])
    return _CARD.format(
        drafting="a draft model writes" if takes_draft(entries["semspec"]) else "what the text repeats is drafted",
        load_draft=f'draft = AutoModelForCausalLM.from_pretrained({draft}, dtype="auto")\n'
        if takes_draft(entries["semspec"])
        else "",
        pass_draft="".join(f"    {argument},\n" for argument in passed),
        beside="".join(f"{argument}, " for argument in passed),
        scheme=entries["semspec"]["scheme"],
        requirement=REQUIREMENT,
        base_model="" if sidecar.target is None else f"base_model: {json.dumps(sidecar.target)}\n",
        target=json.dumps(sidecar.target or "TARGET"),
        config=_json(entries),
        calibration=section("Calibration", sidecar.calibration),
        results=section("Results", sidecar.results),
    )


def _json(value: Any) -> str:
    # No line of the content can end the block that it stands in: newlines inside strings are escaped.
    return json.dumps(value, indent=2)
