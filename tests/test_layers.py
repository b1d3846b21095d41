import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_semspec"

# Top to bottom. A module imports only from lines below its own; the modules of one line do not import each other,
# except inside a package (schemes, bench, evaluation), which is one entry. "" is hf_semspec/__init__.py.
LAYERS = [
    ["cli"],
    ["bench"],
    ["evaluation"],
    ["demo", "recipe_command"],
    ["comparison", "loading", "machine", "pages", "recipe", "timing"],
    [""],
    ["parse_calibration", "semantic_training"],
    ["integration", "calibration"],
    ["compatibility", "pipelines"],
    ["schemes"],
    ["segment_rounds", "continuations"],
    ["segment_residual"],
    ["segment_scoring"],
    ["population", "verification"],
    ["translation"],
    ["answers", "segment_turns", "segment_records"],
    ["judging"],
    ["blocks"],
    ["speculation", "lineage"],
    ["drafters"],
    ["call_state"],
    ["encoders"],
    ["calls", "ngrams", "foreign", "particle_drafts"],
    ["drafting", "inputs", "results"],
    ["static_draft"],
    ["probe_fitting"],
    ["probe"],
    ["decoder"],
    ["crossed"],
    ["cache", "canvas", "masking", "sampling", "segment_text", "stopping", "drafts", "unsupported"],
    ["configuration", "outputs", "quantizations", "self_drafts", "sidecar", "wrappers"],
    ["smc_config", "parse_config", "semantic_config"],
    ["token_configs"],
    ["stored"],
    ["checks", "notices", "trace"],
    ["acceptance", "uncertainty", "particles", "prefixes", "segments", "meanings"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PURE = LAYERS[-1]
MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """`hf_semspec/schemes/easd/decode.py` -> "schemes.easd", `hf_semspec/__init__.py` -> ""."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def layer(module: str) -> str:
    return module.split(".")[0]


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import, wherever it stands; a relative module is written out from "hf_semspec"."""
    package = ["hf_semspec", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def internal_imports(path: Path) -> Iterator[str]:
    """The modules of this package that `path` imports, as `dotted` writes them."""
    known = {dotted(module) for module in MODULES}
    for module, name in imports(path):
        if layer(module) != "hf_semspec":
            continue
        inner = module.removeprefix("hf_semspec").removeprefix(".")
        # `from . import cache` imports a module, `from . import __version__` what is in __init__.
        submodule = f"{inner}.{name}".removeprefix(".")
        yield submodule if submodule in known else inner


def test_every_module_has_a_layer() -> None:
    assert MODULES
    unlisted = {dotted(path) for path in MODULES if layer(dotted(path)) not in RANK}
    assert not unlisted, f"list {unlisted} in LAYERS"


@pytest.mark.parametrize("path", MODULES, ids=[dotted(path) or "__init__" for path in MODULES])
def test_imports_point_down(path: Path) -> None:
    here = layer(dotted(path))
    for other in internal_imports(path):
        there = layer(other)
        if there == here and "." in dotted(path) + other:
            continue
        assert RANK[there] > RANK[here], f"{dotted(path) or '__init__'} imports {other or '__init__'}"


def test_no_scheme_imports_another() -> None:
    for path in (PACKAGE / "schemes").glob("*.py"):
        if path.name != "__init__.py":
            assert not [other for other in internal_imports(path) if layer(other) == "schemes"], path.name


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_see_tensors_only(name: str) -> None:
    path = PACKAGE / f"{name}.py"
    outside = {layer(module) for module, _ in imports(path)} & {"hf_semspec", "transformers", "accelerate"}
    assert not outside, outside


def test_only_cache_names_the_cache_of_transformers() -> None:
    users = set()
    for path in MODULES:
        for module, name in imports(path):
            if layer(module) == "transformers" and ("cache_utils" in module or "Cache" in (name or "")):
                users.add(dotted(path))
    assert users <= {"cache"}


def test_the_checks_see_every_way_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schemes").mkdir()
    path = tmp_path / "schemes" / "easd.py"
    path.write_text(
        "import hf_semspec.cli\nfrom ..acceptance import BONUS\nfrom .. import cache\nfrom . import lossless\n"
        "from hf_semspec import __version__\ndef late():\n    from hf_semspec.bench import run\n"
    )
    names = ["__init__.py", "cli.py", "acceptance.py", "cache.py", "schemes/lossless.py", "bench/run.py"]
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    monkeypatch.setitem(globals(), "MODULES", [path, *(tmp_path / name for name in names)])
    assert set(internal_imports(path)) == {"cli", "acceptance", "cache", "schemes.lossless", "", "bench.run"}
    with pytest.raises(AssertionError, match="imports cli"):
        test_imports_point_down(path)
