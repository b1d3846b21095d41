"""README and docs: their Python runs as it stands (any name loads a tiny model), their links lead somewhere."""

import dataclasses
import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    dynamic_module_utils,
)

import hf_semspec
from examples.benchmarks import page as benchmarks
from examples.benchmarks.marks import marks
from examples.real_pair import page as real_pair
from hf_semspec.cli import command as cli
from hf_semspec.drafts import vocabulary
from hf_semspec.integration import options as compatibility
from tests.encoder_models import encoder_decoder
from tests.models import draft_of, prompts, tiny, tokenizer
from tests.test_layers import LAYERS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
PAGES += sorted(EXAMPLES.rglob("README.md"))
HERE = Path(__file__).parent
TESTS = {path.relative_to(HERE).as_posix(): path.read_text(encoding="utf-8") for path in HERE.rglob("test_*.py")}


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _with_marks(page):
    # The bench runs transformers' assisted generation, whose own calls transformers reports as deprecated.
    return pytest.param(page, marks=[pytest.mark.deprecated] if page.name == "benchmarks.md" else [], id=page.name)


@pytest.mark.quantized
@pytest.mark.parametrize("page", [_with_marks(page) for page in PAGES if blocks(page)])
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
    monkeypatch.setattr(AutoModelForSeq2SeqLM, "from_pretrained", lambda *args, **kwargs: encoder_decoder("t5"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: tokenizer(chat=True))
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), names)


def commands(page: Path, program: str) -> list[str]:
    """The lines of a page's console blocks that start `program`, continuation lines joined."""
    found = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(found).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.split()[:1] == [program]]


def test_commands_of_the_pages_are_understood():
    """Every option of every `hf-semspec` line exists, and every target of `make`."""
    lines = [line for page in PAGES for line in commands(page, "hf-semspec")]
    assert len(lines) > 3
    for line in lines:
        whole = line.replace("eval ...", "eval --model TARGET --task gsm8k --path FILE")
        cli._parser().parse_args(shlex.split(whole)[1:])
    targets = {
        word for page in PAGES for line in commands(page, "make") for word in line.split()[1:] if "=" not in word
    }
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "demo" in targets
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_benchmark_page_is_what_its_results_say():
    """`python -m examples.benchmarks page docs/benchmarks.md --out docs/bench` would change nothing."""
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    begin, end = marks("measured")
    shown = text[text.index(begin) + len(begin) : text.index(end)]
    assert shown.strip() == benchmarks.markdown(DOCS / "bench")


def test_the_real_pairs_pages_are_what_the_results_say():
    """`python -m examples.real_pair.page` would change nothing."""
    shown = {ROOT / "README.md": {"gains": real_pair.gains(DOCS / "results")}}
    shown[DOCS / "real_pair.md"] = real_pair.sections(DOCS / "results", DOCS / "bench")
    for page, sections in shown.items():
        text = page.read_text(encoding="utf-8")
        for name, found in sections.items():
            begin, end = marks(name)
            assert text[text.index(begin) + len(begin) : text.index(end)].strip() == found, (page.name, name)


def test_the_architecture_page_has_the_marks_of_the_imports():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    begin, end = marks("imports")
    assert page.index(begin) < page.index(end)


def test_every_page_is_in_the_menu():
    menu = re.findall(r"^ *- ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if "results/" not in page.as_posix()}
    assert pages <= set(menu)
    assert all((DOCS / page).exists() or (ROOT / page).exists() for page in menu)
    assert len(menu) == len(set(menu))


def test_the_api_page_shows_every_public_name():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: hf_semspec\.(\w+)$", text, flags=re.MULTILINE))
    assert shown == set(hf_semspec.__all__) - {"__version__"}
    assert shown <= set(re.findall(r"`(\w+)`", text))


def test_the_index_of_papers_marks_every_value():
    """Each table of it says of each value where it is from."""
    text = (DOCS / "paper_index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!value|---)(.*) \| (.*) \|$", text, flags=re.MULTILINE)
    assert rows
    known = r"^(paper|code|reviews|ours|not here)\b"
    assert not [row for row in rows if not re.match(known, row[1])]
    schemes = set(re.findall(r"^\[?`(\w+)`", text, flags=re.MULTILINE))  # a section begins with its scheme's name
    assert schemes == set(hf_semspec.schemes.SCHEMES)


def test_the_drafts_page_states_the_limit_of_padding():
    assert f"{vocabulary.MAX_VOCABULARY_PADDING:,} apart" in (ROOT / "docs" / "drafts.md").read_text(encoding="utf-8")


def test_the_readme_names_every_scheme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in hf_semspec.schemes.SCHEMES)


def in_first_cells(page: str) -> set[str]:
    """The names in backticks in the first column of the tables of a page, and in its prose on bookkeeping."""
    text = (DOCS / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \|", text, flags=re.MULTILINE)
    rows += re.findall(r"^### Bookkeeping\n\n(.*?)\n\n", text, flags=re.MULTILINE | re.DOTALL)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_compatibility_page_lists_every_argument_and_field_of_generate():
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    fields = set(vars(GenerationConfig())) - {"semspec"}
    assert arguments | fields <= in_first_cells("generate_compatibility.md")


def test_the_compatibility_page_calls_refused_what_is_refused():
    text = (DOCS / "generate_compatibility.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `") and "refused" in line]
    assert compatibility._REFUSED.keys() <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_compatibility_page_lists_every_users_report_and_where_its_tests_are():
    text = (DOCS / "generate_compatibility.md").read_text(encoding="utf-8")
    listed = {
        number: set(re.findall(r"[\w/]*test_\w+\.py", line))
        for number, line in re.findall(r"^\| UI-(\d\d) \|(.*)$", text, flags=re.MULTILINE)
    }
    tested: dict[str, set[str]] = {}
    for name, source in TESTS.items():
        for number in re.findall(r"def test_ui_?(\d\d)_", source):
            tested.setdefault(number, set()).add(name)
    assert listed == tested


@pytest.mark.parametrize("page", [DOCS / "testing.md", DOCS / "generate_compatibility.md"], ids=lambda page: page.name)
def test_pages_name_test_files_that_exist(page):
    named = set(re.findall(r"[\w/]*\btest_\w+\.py\b", page.read_text(encoding="utf-8")))
    assert named <= TESTS.keys()


@pytest.mark.parametrize("name", hf_semspec.schemes.SCHEMES)
def test_a_schemes_page_lists_its_fields_with_their_defaults(name):
    text = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, flags=re.MULTILINE))
    fields = dataclasses.fields(hf_semspec.schemes.SCHEMES[name].config)
    assert list(rows) == [field.name for field in fields]
    for field in fields:
        default = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        default = default.replace("\n", "\\n")
        if field.default_factory is not dataclasses.MISSING:
            default = f'"{field.default_factory().name}"'
        said = rows[field.name].strip("`").replace("'", '"')
        assert said.startswith(default.replace("'", '"')), field.name


def rooms(text: str) -> set[str]:
    """The words in backticks, or in the nodes of a picture, that could be rooms: `engine/`, `cli`, `__init__.py`."""
    return set(re.findall(r"`(\w+)(?:/|\.py)?`", text)) | set(re.findall(r'\["?(\w+)[":]', text))


ROOMS = {room or "__init__" for layer in LAYERS for room in layer}


def test_the_architecture_page_names_every_room_and_scheme_and_is_short():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert rooms(re.findall(r"^```mermaid\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)[0]) >= ROOMS
    assert all(f"`schemes/{name}/`" in text for name in hf_semspec.schemes.SCHEMES)
    assert len(text.splitlines()) <= 150


def test_contributing_says_what_belongs_to_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("| a change to |") :].split("\n\n")[0]
    assert {name for row in table.splitlines() for name in rooms(row.split("|")[2])} == ROOMS
