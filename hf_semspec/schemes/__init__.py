"""The schemes: one file each, its `decode` reads like its algorithm box; none imports another."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ..engine.outputs import DecodingStats
from ..engine.request import Request
from ..revising import MakeReviser
from . import easd, lossless, parse, semantic, smc

TOKEN_LEVEL: dict[str, MakeReviser] = {"lossless": lossless.Rounds, "easd": easd.Rounds}
SCHEMES: dict[str, Callable[[Request], tuple[Any, DecodingStats]]] = {
    "lossless": lossless.decode,
    "easd": easd.decode,
    "parse": partial(parse.decode, revisers=TOKEN_LEVEL),
    "smc": smc.decode,
    "semantic": partial(semantic.decode, revisers=TOKEN_LEVEL),
}
