"""The schemes, a folder each; none imports another. What a rule of one's own needs is here, too (see "Write your own
scheme" in the docs)."""

from ..common.fields import SchemeConfig, positive, within
from ..engine.acceptance import BONUS, RESIDUAL, Acceptance, next_law, residual_law, stop
from ..engine.request import Block
from .easd.config import EASDConfig
from .easd.decode import EASDRounds
from .lossless.config import LosslessConfig
from .lossless.decode import LosslessRounds
from .parse.config import PARSEConfig
from .parse.decode import decode as decode_parse
from .semantic.config import SemanticConfig
from .semantic.decode import decode as decode_semantic
from .smc.config import SMCConfig
from .smc.decode import decode as decode_smc
from .table import SCHEMES, Scheme
from .token_level import TokenLevelConfig, scheme

SCHEMES.update(
    lossless=scheme(LosslessConfig, LosslessRounds),
    easd=scheme(EASDConfig, EASDRounds),
    parse=Scheme(PARSEConfig, decode_parse),
    smc=Scheme(SMCConfig, decode_smc),
    semantic=Scheme(SemanticConfig, decode_semantic),
)
BUILT_IN = tuple(SCHEMES)

__all__ = [
    "BONUS",
    "RESIDUAL",
    "Acceptance",
    "Block",
    "SchemeConfig",
    "TokenLevelConfig",
    "next_law",
    "positive",
    "residual_law",
    "stop",
    "within",
]
