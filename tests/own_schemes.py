"""The schemes of examples/schemes and the test's own, registered for as long as a test runs."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from hf_semspec import unregister_scheme
from hf_semspec.schemes import BUILT_IN
from hf_semspec.schemes.table import SCHEMES

FILES = Path(__file__).parents[1] / "examples" / "schemes"


def loaded(name: str) -> ModuleType:
    """The module of examples/schemes, its scheme taken out again."""
    spec = importlib.util.spec_from_file_location(name, FILES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with left_as_found():
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def registered(module: ModuleType) -> Iterator[None]:
    """The scheme of such a module, while the block is open."""
    with left_as_found():
        config = next(value for name, value in vars(module).items() if name.lower() == f"{module.__name__}config")
        module.register_scheme(module.__name__, config, accept=module.accept)
        yield


@contextlib.contextmanager
def left_as_found() -> Iterator[None]:
    """Take out, at the end, the schemes registered while the block was open."""
    before = set(SCHEMES)
    try:
        yield
    finally:
        for name in set(SCHEMES) - before - set(BUILT_IN):
            unregister_scheme(name)
