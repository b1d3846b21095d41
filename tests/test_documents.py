"""README and docs: their Python runs as it stands (any name loads a tiny model), their links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_semspec
from hf_semspec import drafts
from hf_semspec.bench import report

from .models import draft_of, prompts, tiny, tokenizer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.quantized
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_python_blocks_run(page, monkeypatch, tmp_path):
    """The blocks of a page run in order, in one namespace that starts with a pair and its inputs."""
    model = tiny(hidden=64, dtype=torch.float32)
    draft = draft_of(model, "near")
    names: dict[str, object] = {
        "__name__": "page",
        "model": model,
        "draft": draft,
        "tokenizer": tokenizer(chat=True),
        "inputs": prompts((6, 6)),
        "prompts": ["One and one is", "Two and two is"],
    }
    loads = AutoModelForCausalLM.from_pretrained

    def load(name, *args, **kwargs):
        if Path(name).exists():
            return loads(name, *args, **kwargs)
        return tiny(hidden=64, dtype=torch.float32)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: tokenizer(chat=True))
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_benchmark_page_has_its_marks():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page.index(report.BEGIN) < page.index(report.END)


def test_the_drafts_page_states_the_limit_of_padding():
    assert f"{drafts.MAX_VOCABULARY_PADDING:,} apart" in (ROOT / "docs" / "drafts.md").read_text(encoding="utf-8")


def test_the_readme_names_every_scheme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in hf_semspec.configuration.SCHEME_CONFIGS)
