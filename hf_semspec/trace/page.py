"""A trace as one HTML page: the text token by token, its figures, and tables that say the same in words."""

import base64
import hashlib
from html import escape
from importlib.resources import files
from typing import Any

from . import Trace
from .panel import Panel
from .text import Speller


def render(trace: Trace, tokenizer: Any) -> str:
    """The page of `trace`; tokens as text by `tokenizer`, as ids where it is `None`."""
    folder = files(__package__)
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    script = folder.joinpath("page.js").read_text(encoding="utf-8")
    # The page runs this script and nothing else, whatever a token spells, and loads nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; base-uri 'none'"
    )
    speller = Speller(tokenizer)
    title = f"How {escape(trace.scheme)} wrote this text"
    rows = [Panel(trace, number, speller).html() for number in range(len(trace.rows))]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{style}</style></head><body>'
        f'<a class="skip" href="#text-0">Skip to the text</a><header><h1>{title}</h1>'
        f"<p>{_settings(trace)}</p></header><main>{_tabs(len(rows))}{''.join(rows)}{_all_settings(trace)}</main>"
        f"<script>{script}</script></body></html>\n"
    )


def _settings(trace: Trace) -> str:
    sampling = trace.settings.get("do_sample")
    facts = [f"target {trace.shown_name}"] if trace.model_name else []
    facts.append(f"sampled at temperature {trace.settings.get('temperature') or 1:g}" if sampling else "greedy")
    for name in ("num_draft_tokens", "num_chains", "num_particles", "segment_tokens"):
        if trace.settings.get(name) not in (None, 1):
            facts.append(f"{name} {trace.settings[name]}")
    if sampling and trace.settings.get("verification"):
        facts.append(f"{trace.settings['verification']} verification")
    if trace.stats:
        facts.append(f"{trace.stats['target_forwards']} target forwards, {trace.stats['draft_forwards']} of the draft")
    return escape(" · ".join(facts))


def _all_settings(trace: Trace) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(name))}</th><td>{escape(str(value))}</td></tr>" for name, value in trace.settings.items()
    )
    return f"<details><summary>All settings</summary><table><tbody>{rows}</tbody></table></details>"


def _tabs(number: int) -> str:
    if number < 2:
        return ""
    tabs = "".join(
        f'<button role="tab" id="tab-{row}" aria-controls="row-{row}" aria-selected="{str(row == 0).lower()}">'
        f"Row {row + 1}</button>"
        for row in range(number)
    )
    return f'<div class="tabs" role="tablist" aria-label="Rows of the batch">{tabs}</div>'
