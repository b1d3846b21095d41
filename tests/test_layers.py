import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_semspec"

# Top to bottom, a row a line: a room imports only from rows below its own, and from itself.
# The rooms of one row do not import each other. "" is hf_semspec/__init__.py.
LAYERS = [
    ["cli"],
    ["bench", "jobs"],
    ["evaluation", "servers"],
    ["tools"],
    [""],
    ["calibration"],
    ["integration", "hub"],
    ["configuration"],
    ["schemes"],
    ["drafts"],
    ["engine"],
    ["trace", "common"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SCHEMES = ("lossless", "easd", "parse", "smc", "semantic")
# Tensors in, tensors out: no model, no cache, no config.
PURE = ["engine.acceptance", "schemes.easd.agreement", "schemes.smc.weights", "schemes.parse.prefixes"]
PURE += ["schemes.semantic.rules", "calibration.meanings", "schemes.lossless.block", "engine.costs", "engine.gamma"]
MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """`hf_semspec/schemes/easd/decode.py` -> "schemes.easd.decode", `hf_semspec/__init__.py` -> ""."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def room(module: str) -> str:
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
        if room(module) != "hf_semspec":
            continue
        inner = module.removeprefix("hf_semspec").removeprefix(".")
        # `from . import cache` imports a module, `from . import __version__` what is in __init__.
        submodule = f"{inner}.{name}".removeprefix(".")
        yield submodule if submodule in known else inner


def scheme_of(module: str) -> str | None:
    """The scheme whose folder holds `module`; `None` for what all share."""
    parts = module.split(".")
    return parts[1] if parts[0] == "schemes" and len(parts) > 1 and parts[1] in SCHEMES else None


def test_every_room_has_a_layer() -> None:
    assert MODULES
    assert {room(dotted(path)) for path in MODULES} == set(RANK)


@pytest.mark.parametrize("path", MODULES, ids=[dotted(path) or "__init__" for path in MODULES])
def test_imports_point_down(path: Path) -> None:
    here = dotted(path)
    for other in internal_imports(path):
        if room(other) != room(here) or not room(here):
            assert RANK[room(other)] > RANK[room(here)], f"{here or '__init__'} imports {other or '__init__'}"


@pytest.mark.parametrize("path", MODULES, ids=[dotted(path) or "__init__" for path in MODULES])
def test_no_schemes_folder_imports_anothers(path: Path) -> None:
    own = scheme_of(dotted(path))
    for other in internal_imports(path):
        if own is not None:
            assert scheme_of(other) in (own, None), f"{dotted(path)} imports {other}"
        elif room(dotted(path)) == "schemes" and dotted(path) != "schemes":
            assert scheme_of(other) is None, f"{dotted(path)}, which all schemes share, imports {other}"


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_see_tensors_only(name: str) -> None:
    inner = set(internal_imports(PACKAGE / f"{name.replace('.', '/')}.py"))
    outer = {room(module) for module, _ in imports(PACKAGE / f"{name.replace('.', '/')}.py")}
    assert inner <= set(PURE), inner
    assert not outer & {"transformers", "accelerate"}, outer


def test_only_two_modules_name_the_caches_of_transformers() -> None:
    users = set()
    for path in MODULES:
        for module, name in imports(path):
            if room(module) == "transformers" and ("cache_utils" in module or "Cache" in (name or "")):
                users.add(dotted(path))
    assert users <= {"engine.cache", "engine.stock_caches"}


PLANTED = {
    "from ...cli import main": "imports cli",
    "import hf_semspec.bench.run": "imports bench.run",
    "def late():\n    from hf_semspec import __version__": "imports __init__",
    "from ..lossless.decode import decode": "imports schemes.lossless.decode",
    "from .. import lossless": "imports schemes.lossless",
}


@pytest.mark.parametrize("line", PLANTED)
def test_a_planted_import_is_seen(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "schemes" / "easd" / "decode.py"
    path.parent.mkdir(parents=True)
    others = ["__init__.py", "cli.py", "bench/run.py", "schemes/lossless/__init__.py", "schemes/lossless/decode.py"]
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    monkeypatch.setitem(globals(), "MODULES", [path, *(tmp_path / name for name in others)])
    path.write_text("from ...engine.acceptance import BONUS\nfrom . import agreement\nfrom .. import table\n")
    test_imports_point_down(path)
    test_no_schemes_folder_imports_anothers(path)
    path.write_text(line + "\n")
    check = test_no_schemes_folder_imports_anothers if "lossless" in line else test_imports_point_down
    with pytest.raises(AssertionError, match=PLANTED[line]):
        check(path)
