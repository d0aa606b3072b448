"""How much attention stretches: local constants, witnesses from below, theorems from above."""

from otattn.lipschitz import bounds
from otattn.lipschitz.bound import Bound, Enclosure
from otattn.lipschitz.growth import LocalGrowth, fit_exponent, local_growth
from otattn.lipschitz.local import LocalLipschitz, local_lipschitz

__all__ = [
    "Bound",
    "Enclosure",
    "LocalGrowth",
    "LocalLipschitz",
    "bounds",
    "fit_exponent",
    "local_growth",
    "local_lipschitz",
]
