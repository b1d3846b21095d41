"""The page of a trace: what it holds and how large it is, and in a browser that it works, is readable and quiet."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from hf_semspec.trace import page
from hf_semspec.trace.text import Speller, spoken, visible
from tests.trace.pages import HOSTILE, Words, bytes_tokenizer, judged, speculated, weighted

TRACES = {
    "easd": lambda length: speculated(length),
    "parse": lambda length: judged(length),
    "smc": lambda length: weighted(length),
    "many particles": lambda length: weighted(length, particles=256),
}
VOID = {"meta", "link", "img", "input", "br"}


class Elements(HTMLParser):
    """Every element with its attributes and text; what is closed must be what is open."""

    def __init__(self, html):
        super().__init__()
        self.open, self.found, self.text = [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append((self.open[-1] if self.open else "", data))

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


@pytest.mark.parametrize("name", TRACES)
def test_a_thousand_tokens_are_below_two_megabytes(name):
    trace = TRACES[name](1000)
    html = page.render(trace, Words())
    assert trace.rows[0].length >= 1000
    assert len(html.encode()) < 2_000_000


@pytest.mark.parametrize("name", TRACES)
def test_the_page_is_well_formed_and_loads_nothing(name):
    elements = Elements(page.render(TRACES[name](80), Words()))
    assert [tag for tag, _ in elements.found].count("script") == 1
    links = [value for _, attributes in elements.found for key, value in attributes.items() if key in ("src", "href")]
    assert all(link.startswith("#") or link == "data:," for link in links)
    assert not [key for _, attributes in elements.found for key in attributes if key.startswith("on")]
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    css = "".join(text for tag, text in elements.text if tag == "style")
    assert "url(" not in css
    assert "@import" not in css


def test_the_policy_allows_the_page_its_own_script_and_nothing_else():
    elements = Elements(page.render(speculated(20), Words()))
    (script,) = [text for tag, text in elements.text if tag == "script"]
    (policy,) = [a["content"] for a in elements.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_hostile_tokens_stay_text():
    trace = speculated(len(HOSTILE), seed=1)
    trace.rows[0].prompt = list(range(len(HOSTILE)))
    trace.settings["</script><b>"] = "<i onclick=1>"
    for place, event in enumerate(trace.rows[0].events):
        object.__setattr__(event, "token", place % len(HOSTILE))
    html = page.render(trace, Words())
    elements = Elements(html)
    assert not elements.all("img")
    assert len(elements.all("script")) == 1
    shown = "".join(text for _, text in elements.text)
    assert HOSTILE[0] in shown
    assert HOSTILE[1] in shown
    assert "⟨U+202E⟩evil" in shown
    assert not re.search("[\x00\x1b\u202e\ud800]", html)


@pytest.mark.parametrize("name", TRACES)
def test_every_token_is_an_option_with_a_name_and_a_row_of_the_table(name):
    trace = TRACES[name](60)
    elements = Elements(page.render(trace, Words()))
    options = [a for _, a in elements.found if a.get("role") == "option"]
    tokens = [a for a in options if a["id"].startswith("e")]
    assert len(tokens) == len(trace.rows[0].events)
    rows = {a["id"] for a in elements.all("tr") if "id" in a}
    assert all("r" + a["id"] in rows for a in options)
    assert all(a["aria-label"].strip() for a in options)
    assert [a["tabindex"] for a in options].count("0") == 1
    assert all(a.get("scope") == "col" for a in elements.all("th") if "scope" in a)


def test_kinds_differ_by_more_than_colour():
    """Each mark of the text has a line, a glyph or a style that no other has."""
    css = page.files("hf_semspec.trace").joinpath("page.css").read_text()
    looks = []
    for kind in ("accepted", "kept", "bonus", "residual", "resampled", "rejected", "triggered", "untested", "cut"):
        rules = re.findall(rf"(?:^|, )\.{kind}(?:, [^{{]*)? {{ ([^}}]*) }}", css, flags=re.MULTILINE)
        drawn = re.findall(r"(?:border(?:-bottom)?|text-decoration|font-style|content): ([^;]*)", " ".join(rules))
        looks.append(" ".join(re.sub(r"var\([^)]*\)", "", one) for one in drawn))
    assert len(set(looks)) == len(looks)


def test_without_a_tokenizer_tokens_are_ids():
    trace = speculated(10)
    html = page.render(trace, None)
    assert f"⟨{trace.rows[0].tokens[0]}⟩" in html


def test_a_page_is_saved_with_the_tokenizer_of_the_call(tmp_path):
    trace = speculated(10)
    trace.tokenizer = Words()
    trace.save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.render(trace, Words())


def test_paths_of_this_machine_stay_here():
    trace = speculated(10)
    trace.model_name = "/home/somebody/models/tiny"
    assert "somebody" not in page.render(trace, None) + json.dumps(trace.to_dict())
    assert "target tiny" in page.render(trace, None)


def test_spans_are_marked_with_their_numbers():
    elements = Elements(page.render(speculated(40, spans=True), Words()))
    marks = [a for _, a in elements.found if a.get("id", "").startswith("m0-")]
    assert marks
    assert "by the draft" in marks[0]["aria-label"]
    assert "p hat 0.700, rule <ratio>" in marks[0]["aria-label"]


class TestPieces:
    TEXT = "ab é🙂 ✓x\n🤷🏽‍♀️"

    def test_characters_of_several_tokens_are_spelled_at_the_last(self):
        words = bytes_tokenizer()
        ids = words(self.TEXT)["input_ids"]
        pieces = Speller(words).pieces([], ids)
        assert len(pieces) == len(ids) == len(self.TEXT.encode())
        assert "".join(piece.text for piece in pieces if piece.part == piece.parts) == self.TEXT
        smile = [piece for piece in pieces if piece.text == "🙂"]
        assert [(piece.part, piece.parts) for piece in smile] == [(1, 4), (2, 4), (3, 4), (4, 4)]

    def test_bytes_that_never_become_a_character(self):
        words = bytes_tokenizer()
        smile = words("🙂")["input_ids"]
        pieces = Speller(words).pieces([], [*smile[:2], *smile[:1] * 6, *words("ab")["input_ids"]])
        assert len(pieces) == 10
        assert [piece.text for piece in pieces[-2:]][-1] == "b"

    def test_what_comes_before_counts(self):
        words = bytes_tokenizer()
        ids = words("🙂")["input_ids"]
        (last,) = Speller(words).pieces(ids[:3], ids[3:])
        assert last.text == "🙂"

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (" ", "space"),
            ("\n\n", "2 × line break"),
            (" \n", "space and line break"),
            ("a\n", "“a↵”"),
            ("\x07", "“⟨U+0007⟩”"),
        ],
    )
    def test_blanks_are_named(self, text, said):
        assert spoken(text) == said

    def test_joined_emoji_stay_whole(self):
        assert visible("🤷🏽‍♀️") == "🤷🏽‍♀️"
