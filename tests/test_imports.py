"""What `import hf_semspec` loads and does: its own modules, the seam, and nothing that a call may never need."""

from examples.benchmarks import imports
from tests.test_layers import RANK, room

# Of the modules below the package's own names, those that only a stored file or a command needs.
LATER = {"hub.sidecar", "hub.recipe", "hub.export"}
# Modules of others, beyond what transformers' `generate` and pipelines load by themselves. Time is not asserted: this
# list is the same on every machine.
OTHERS: set[str] = set()


def test_the_import_loads_a_fixed_list_of_modules() -> None:
    modules = imports.measure()["modules"]
    assert isinstance(modules, list)
    own = {module.removeprefix("hf_semspec").removeprefix(".") for module in modules if room(module) == "hf_semspec"}
    assert {"", "integration.register", "schemes.lossless.decode"} <= own
    assert not [module for module in own if RANK[room(module)] < RANK[""] or module in LATER]
    assert {module for module in modules if room(module) != "hf_semspec"} <= OTHERS
