"""The goals as tables, from the JSON of a run."""

from __future__ import annotations

from typing import Any

from hf_semspec.evaluation.report import markdown_table

from .marks import origin


def markdown(result: dict[str, Any]) -> str:
    """The tables of one result of [`run_goals`], ready for the page."""
    return "\n\n".join(
        (
            origin(result["meta"]),
            "### Goals\n\n" + _goals(result["goals"]),
            "### Loop overhead\n\n" + _overhead(result["overhead"]),
            "### Batch 1\n\n" + _single(result["batch1"], result["pair"]),
            f"### Batch {result['batch']['batch']}\n\n" + _batch(result["batch"]),
            "### easd over lossless\n\n" + _easd(result["easd"]),
            # Results stored before the scheme existed have no such part.
            *(["### smc\n\n" + _smc(result["smc"])] if "smc" in result else []),
        )
    )


def _goals(goals: list[dict[str, Any]]) -> str:
    rows = [[g["what"], f"{g['value']:.2f}", g["goal"], "yes" if g["met"] else "**no**"] for g in goals]
    return markdown_table(["what", "measured", "goal", "met"], rows)


def _overhead(section: dict[str, Any]) -> str:
    rows = [
        [r["name"], f"{r['cpu_over_plain']:.2f}", _optional(r, "acceptance_rate", ".2f"), f"{r['same_tokens']:.2f}"]
        for r in section["rows"]
    ]
    return markdown_table(["", "CPU time a token, over plain", "acceptance", "share of plain's tokens"], rows)


def _single(section: dict[str, Any], pair: dict[str, Any]) -> str:
    measured, costs = pair["measured"], section["costs"]
    best = section["best"]
    curve = ", ".join(f"c({n}) = {value:.2f}" for n, value in costs["c"].items() if n != "1")
    lines = (
        f"{pair['parameters']['target'] / 1e6:.1f}M against {pair['parameters']['draft'] / 1e6:.1f}M parameters; "
        f"agreement of the argmaxes {measured['greedy']:.2f}, Σ min(p, q) {measured['overlap']:.2f}, "
        f"H(p) {measured['target_entropy']:.2f} nats.",
        f"One target pass over one token: {costs['seconds'] * 1e3:.1f} ms; {curve}; ρ = {costs['rho']:.3f}.",
        f"Fastest: HF assisted at γ={best['stock']}, lossless at γ={best['ours']}; lossless there is "
        f"{section['over_tuned']:.2f}x the tuned and {section['over_default']:.2f}x the default HF assisted; "
        f'`"auto"` is {section["auto_over_tuned"]:.2f}x the tuned. Decoding alone reaches {section["of_bound"]:.2f} '
        f"of the bound {section['bounds'][str(best['ours'])]:.2f}x.",
    )
    return "\n".join(lines) + "\n\n" + _speeds(section["rows"])


def _batch(section: dict[str, Any]) -> str:
    lines = (
        f"HF assisted takes one row at a time: {section['batch']} calls. The fastest lossless (γ={section['best']}) "
        f"is {section['over_stock']:.2f}x that."
    )
    return lines + "\n\n" + _speeds(section["rows"])


def _speeds(rows: list[dict[str, Any]]) -> str:
    header = ["", "tokens/s", "over plain", "target forwards", "acceptance", "share of plain's tokens"]
    cells = [
        [
            r["name"],
            f"{r['tokens_per_second']:.1f}",
            f"{r['over_plain']:.2f}",
            _optional(r, "target_forwards", "d"),
            _optional(r, "acceptance_rate", ".2f"),
            f"{r['same_tokens']:.2f}",
        ]
        for r in rows
    ]
    return markdown_table(header, cells)


def _easd(section: dict[str, Any]) -> str:
    lines = (
        f"γ={section['num_draft_tokens']}, penalty 0, τ_p = {section['target_entropy_threshold']:.3f} nats for the "
        f"entropy rule; acceptance of lossless a = {section['acceptance']:.2f}. The law leaves Σ a'^t / Σ a^t with "
        "a' = a(1 − trigger rate)."
    )
    cells = [
        [
            r["name"],
            f"{r['tokens_per_second']:.1f}",
            f"{r['trigger_rate']:.3f}",
            f"{r['over_lossless']:.2f}",
            f"{r['law_leaves']:.2f}",
            _optional(r, "tokens_a_round", ".2f"),
        ]
        for r in section["rows"]
    ]
    header = ["", "tokens/s", "trigger rate", "over lossless", "law leaves", "tokens a round"]
    return lines + "\n\n" + markdown_table(header, cells)


def _smc(section: dict[str, Any]) -> str:
    goal = section["goal"]
    lines = (
        f"Batch 1, sampling from the whole law. {goal['name']} reaches {goal['of_bound']:.2f} of its bound (γ+1) / "
        f"(c(N(γ+1)) + γρ_N) = {goal['bound']:.2f}x, {goal['over_plain']:.2f}x plain sampling and "
        f"{goal['over_tuned']:.2f}x HF assisted (γ={section['tuned']}). ESS is the mean before resampling. The column "
        "on the right is exact: lossless with N chains of γ tokens."
    )
    header = ["N", "γ", "tokens/s", "over plain", "ESS", "resamplings", "lossless tokens/s", "smc over lossless"]
    cells = [
        [
            str(row["particles"]),
            str(row["length"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['over_plain']:.2f}",
            f"{row['ess']:.2f}",
            str(row["resamplings"]),
            f"{row['lossless_tokens_per_second']:.1f}",
            f"{row['over_lossless']:.2f}",
        ]
        for row in section["rows"]
    ]
    memory = markdown_table(
        ["N", "new tokens", "peak MB beside the weights", "keys and values alone, MB"],
        [
            [str(row["particles"]), str(row["new_tokens"]), f"{row['peak'] / 1e6:.1f}", f"{row['states'] / 1e6:.1f}"]
            for row in section["memory"]
        ],
    )
    return "\n".join((lines, "", markdown_table(header, cells), "", "Memory of a call:", "", memory))


def _optional(row: dict[str, Any], name: str, form: str) -> str:
    value = row.get(name)
    return "" if value is None else format(value, form)
