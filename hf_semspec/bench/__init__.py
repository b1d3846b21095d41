"""The measuring side: what a pair of models gains from each scheme, measured and forecast.

[`bench`] measures, [`check`] forecasts, [`controlled_pair`] makes a pair with a chosen agreement.
"""

from .advice import Advice, check
from .function import bench
from .pairs import ControlledPair, controlled_pair
from .request import PairRequest
from .results import Measured
from .sizes import SIZES, Size

__all__ = ["SIZES", "Advice", "ControlledPair", "Measured", "PairRequest", "Size", "bench", "check", "controlled_pair"]
