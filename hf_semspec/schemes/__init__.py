"""The schemes: one file each, its `decode` reads like its algorithm box; none imports another."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ..engine.outputs import DecodingStats
from ..engine.request import Request
from .easd import decode as easd
from .lossless import decode as lossless
from .parse import decode as parse
from .revising import MakeReviser
from .semantic import decode as semantic
from .smc import decode as smc

TOKEN_LEVEL: dict[str, MakeReviser] = {"lossless": lossless.Rounds, "easd": easd.Rounds}
SCHEMES: dict[str, Callable[[Request], tuple[Any, DecodingStats]]] = {
    "lossless": lossless.decode,
    "easd": easd.decode,
    "parse": partial(parse.decode, revisers=TOKEN_LEVEL),
    "smc": smc.decode,
    "semantic": partial(semantic.decode, revisers=TOKEN_LEVEL),
}
