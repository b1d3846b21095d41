"""One row of a trace as HTML: its text, marks, figures and tables."""

import math
from html import escape

from . import COMMITTED, DROPPED, Event, Row, Trace, figures
from .figures import figure
from .text import Piece, Speller, shown, spell, spoken, spoken_piece, visible

NAMES = {
    "accepted": "accepted draft",
    "kept": "kept of the draft's answer",
    "bonus": "bonus token of the target",
    "plain": "plain token of the target",
    "residual": "replaces a rejected draft",
    "resampled": "drawn again after a trigger",
    "rejected": "rejected draft",
    "triggered": "draft stopped by a trigger",
    "untested": "draft never tested",
    "unkept": "cut off the draft's answer",
}
SEGMENT_NAMES = {
    "rejected": "first token of a rejected segment",
    "untested": "further token of a rejected segment",
    "residual": "the target's in place of a rejected segment",
}
SMC_NAMES = {"accepted": "drafted by the particle", "bonus": "last of a block, by the target"}
_HEADS = ("Event", "Token", "What happened", "Column", "Id", "Round", "log p", "log q", "H(p)", "H(q)", "Note")


class Panel:
    """One returned row. Ids on the page: e{row}-{i} an event, m{row}-{i} a mark between them, n... a particle; the
    table row of X has the id rX."""

    def __init__(self, trace: Trace, number: int, speller: Speller) -> None:
        self.trace, self.number, self.speller = trace, number, speller
        self.row: Row = trace.rows[number]
        self.names = {**NAMES, **{"smc": SMC_NAMES, "semantic": SEGMENT_NAMES}.get(trace.scheme, {})}
        if trace.settings.get("trigger") == "random":
            self.names = {**self.names, "triggered": "draft stopped by chance"}
        self.pieces = spell(self.row, speller)
        self.marks: dict[int, list[str]] = {}
        self.mark_rows: list[str] = []

    def html(self) -> str:
        """The whole panel."""
        number = self.number
        named = f' role="tabpanel" aria-labelledby="tab-{number}"' if len(self.trace.rows) > 1 else ""
        dropped = any(event.kind in DROPPED for event in self.row.events)
        opens = "; <kbd>Enter</kbd> on a token opens the drafts it replaced" if dropped else ""
        pictures = self._answers() + self._spans() + self._entropies() + self._population()
        return (
            f'<section class="row" id="row-{number}"{named}>{self._cards()}{self._legend()}'
            f'<div class="split"><div>{self._text()}'
            '<p class="hint">Point at a token, or press <kbd>Tab</kbd> and move with the arrow keys, '
            f"<kbd>Home</kbd> and <kbd>End</kbd>{opens}.</p></div>"
            '<aside class="details" aria-label="Details of the token"><h2>Details</h2>'
            '<p class="hint">Nothing chosen yet.</p></aside></div>'
            f"{pictures}{self._marks_table()}{self._table()}{self._prompt()}</section>"
        )

    def _cards(self) -> str:
        counts, trace = self.row.counts(), self.trace
        cards = [("new tokens", str(counts["emitted"]))]
        drafted = min(counts["accepted"] + counts["kept"], counts["emitted"])
        cards.append(("by the draft", f"{drafted / max(counts['emitted'], 1):.0%}"))
        if trace.scheme != "smc" and counts["tested"]:
            name = "accepted in revision" if self.row.answers else "acceptance"
            cards.append((name, f"{counts['accepted'] / counts['tested']:.0%}"))
        if counts["rounds"]:
            cards.append(("rounds", str(counts["rounds"])))
        if counts["triggered"]:
            cards.append(("triggers", str(counts["triggered"])))
        if self.row.answers:
            cards.append(("answers", str(len(self.row.answers))))
            cards.append(("kept of them", f"{counts['kept']} of {counts['written']}"))
        if self.row.population >= 0:
            rounds = trace.populations[self.row.population].rounds
            ess = [entry.ess for entry in rounds if entry.ess is not None]
            cards.append(("resamplings", str(sum(entry.resampled for entry in rounds))))
            cards += [("mean ESS", f"{sum(ess) / len(ess):.1f}")] if ess else []
        items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in cards)
        return f'<dl class="cards">{items}</dl>'

    def _legend(self) -> str:
        counts = self.row.counts()
        counts["unkept"] = counts["written"] - counts["kept"]
        bar = "".join(
            f'<span class="{kind}" style="flex:{counts[kind]}"></span>' for kind in COMMITTED if counts[kind]
        )
        buttons = "".join(
            f'<button type="button" aria-pressed="false" data-kind="{kind}"><span class="t swatch {kind}">a</span> '
            f'{escape(self.names[kind])} <span class="n">{counts[kind]}</span></button>'
            for kind in NAMES
            if counts[kind]
        )
        toggle = ""
        if any(counts[kind] for kind in DROPPED):
            toggle = '<label><input type="checkbox"> show dropped drafts in the text</label>'
        return (
            f'<div class="bar" aria-hidden="true">{bar}</div>'
            '<fieldset class="legend" aria-label="What the marks mean; press one to see only its tokens">'
            f"{buttons}{toggle}</fieldset>"
        )

    def _text(self) -> str:
        parts = []
        for i, (event, piece) in enumerate(zip(self.row.events, self.pieces, strict=True)):
            parts += self.marks.get(i, [])
            classes = f"t {event.kind}{' d' if event.kind in DROPPED else ''}{' cut' if event.cut else ''}"
            label = f"{spoken_piece(piece)}, {self.names[event.kind]}{', behind the end' if event.cut else ''}"
            parts.append(
                f'<span role="option" tabindex="{-1 if i else 0}" id="e{self.number}-{i}" class="{classes}" '
                f'aria-label="{escape(label)}">{shown(piece)}</span>'
            )
        parts += self.marks.get(len(self.row.events), [])
        return (
            f'<div class="text" id="text-{self.number}" role="listbox" aria-label="The text, token by token">'
            f"{''.join(parts)}</div>"
        )

    def _mark(self, at: int, kind: str, text: str, label: str, cells: list[str]) -> None:
        """Put a mark before event `at`, hidden with the dropped tokens around it, and its row into the table."""
        events = self.row.events
        hidden = at > 0 and events[at - 1].kind in DROPPED
        name = f"m{self.number}-{len(self.mark_rows)}"
        self.marks.setdefault(at, []).append(
            f'<span role="option" tabindex="-1" id="{name}" class="m {kind}{" d" if hidden else ""}" '
            f'aria-label="{escape(label)}">{escape(text)}</span>'
        )
        self.mark_rows.append(f'<tr id="r{name}">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>')

    def _answers(self) -> str:
        settings, pictures = self.trace.settings, []
        valid, full = float(settings.get("prefix_threshold", 0)), float(settings.get("accept_threshold", 0))
        for number, answer in enumerate(self.row.answers, 1):
            for index, prefix in enumerate(answer.prefixes):
                whole = index == len(answer.prefixes) - 1
                judged = not math.isnan(prefix.confidence)
                good = judged and prefix.confidence >= (full if whole else valid)
                stands = "kept" if prefix.length <= answer.kept else "cut"
                what = f"{'whole answer' if whole else 'prefix'} of {prefix.length} tokens"
                said = f"confidence {figure(prefix.confidence)}" if judged else "not judged"
                self._mark(
                    answer.first_event + prefix.length,
                    "ok" if good else "no",
                    f"{'✓' if good else '✗' if judged else '–'} {figure(prefix.confidence, 2)}",
                    f"answer {number}, {what}, {said}, {stands}",
                    [f"answer {number}", what, said.removeprefix("confidence "), stands],
                )
            ending = "returned as it was" if answer.accepted else f"{answer.kept} of {answer.written} tokens kept"
            self._mark(
                answer.first_event + answer.kept,
                "note",
                "✓ whole answer kept" if answer.accepted else f"✂ kept {answer.kept} of {answer.written}",
                f"answer {number}: {ending}",
                [f"answer {number}", "boundary", "", ending],
            )
            pictures.append(
                f'<h2>Answer {number}: {ending}</h2><div class="scroll" tabindex="0" role="group" '
                f'aria-label="Confidence over answer {number}">{figures.verdicts(answer, valid, full)}</div>'
            )
        return "".join(pictures)

    def _spans(self) -> str:
        for number, span in enumerate(self.row.spans, 1):
            numbers = ", ".join(
                f"{name.replace('_', ' ')} {figure(value) if isinstance(value, float) else value}"
                for name, value in span.numbers.items()
            )
            label = f"segment {number}: {span.label}"
            what = f"{span.stop - span.start} tokens, {span.label}"
            kind = "ok" if span.stands else "no"
            text = f"{'✓' if span.stands else '✗'} {span.label}"
            stands = "stands" if span.stands else "a draft was rejected before"
            self._mark(
                span.next_event, kind, text, f"{label}, {numbers}", [f"segment {number}", what, numbers, stands]
            )
        return ""

    def _entropies(self) -> str:
        settings = self.trace.settings
        if self.trace.scheme != "easd":
            return ""
        by_rule = settings.get("trigger") == "entropy"
        limits = [float(settings[f"{model}_entropy_threshold"]) if by_rule else None for model in ("target", "draft")]
        drawing = figures.entropies(self.row, *limits)
        if not drawing:
            return ""
        return (
            '<h2>Entropy of both laws where a draft was tested</h2><div class="scroll" tabindex="0" role="group" '
            f'aria-label="Entropies over the text">{drawing}</div>'
        )

    def _population(self) -> str:
        if self.row.population < 0:
            return ""
        population = self.trace.populations[self.row.population]
        threshold = float(self.trace.settings.get("ess_threshold", 0))
        tree = figures.lineage(population, self.speller, self.row.prompt, threshold, f"n{self.number}")
        return (
            '<h2>Particle lineages</h2><p class="hint">Thick: returned (★). Solid: has descendants at the end. '
            "Dotted: died out. R: resampled at the end of the round; C: collapsed. Larger dots carry more weight; the "
            "dashed line over the bars is the threshold below which particles are resampled.</p>"
            f'<div class="split"><div class="scroll">{tree}</div><aside class="details" aria-label="Details of the '
            'particle"><h2>Details</h2><p class="hint">Point at a particle, or press <kbd>Tab</kbd> and move with the '
            f"arrow keys.</p></aside></div>{self._rounds_table()}"
        )

    def _rounds_table(self) -> str:
        rows = []
        population = self.trace.populations[self.row.population]
        for number, entry in enumerate(population.rounds):
            happened = "resampled" if entry.resampled else "collapsed" if entry.collapsed else ""
            weights = "" if entry.log_weights is None else ", ".join(figure(w, 2) for w in entry.log_weights)
            sources = ", ".join(map(str, entry.ancestors)) if entry.resampled else ""
            cells = (number, entry.start, figure(entry.ess, 2), happened, sources, weights)
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        heads = ("Round", "Tokens before", "ESS", "What happened", "Copied from", "Log weights before resampling")
        return _folded("All rounds as a table", "One row a target forward; lists go by particle.", heads, rows)

    def _marks_table(self) -> str:
        if not self.mark_rows:
            return ""
        heads = ("Of", "What", "Numbers", "Outcome")
        return _folded("All decisions on stretches of text as a table", "In order.", heads, self.mark_rows)

    def _table(self) -> str:
        rows = []
        for i, (event, piece) in enumerate(zip(self.row.events, self.pieces, strict=True)):
            cells: list[tuple[str, str]] = [
                (str(i + 1), ""),
                (spoken_piece(piece), ' class="tok"'),
                (self.names[event.kind], ""),
                (str(event.position), ""),
                (str(event.token), ""),
                (str(event.round), ""),
            ]
            values = (event.log_p, event.log_q, event.target_entropy, event.draft_entropy)
            cells += [(figure(value), "") for value in values]
            cells.append((self._note(i, event, piece), ""))
            rows.append(
                f'<tr id="re{self.number}-{i}">'
                + "".join(f"<td{kind}>{escape(text)}</td>" for text, kind in cells)
                + "</tr>"
            )
        caption = (
            "In the order in which it happened. log p and log q: natural log of the token's probability under the "
            "processed laws of target and draft; H(p), H(q): their entropies in nats; empty where not known."
        )
        return _folded("Every token as a table", caption, _HEADS, rows)

    def _note(self, i: int, event: Event, piece: Piece) -> str:
        notes = []
        if event.kind in ("residual", "resampled"):
            j = i - 1
            while j >= 0 and self.row.events[j].kind not in ("rejected", "triggered"):
                j -= 1
            notes.append(f"in place of {spoken_piece(self.pieces[j])}")
        if piece.parts > 1:
            notes.append(f"part {piece.part} of {piece.parts} of one character")
        if event.cut:
            notes.append("behind the end of the text")
        if event.others:
            notes.append("other chains: " + ", ".join(spoken(self.speller.text([one])) for one in event.others))
        return "; ".join(notes)

    def _prompt(self) -> str:
        text = escape(visible(self.speller.text(self.row.prompt)))
        return f"<details><summary>Prompt, {len(self.row.prompt)} tokens</summary><pre>{text}</pre></details>"


def _folded(title: str, caption: str, heads: tuple[str, ...], rows: list[str]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        f'<details><summary>{title}</summary><div class="tall" tabindex="0" role="group" aria-label="{title}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        "</div></details>"
    )
