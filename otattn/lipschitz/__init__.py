"""How much attention stretches: local constants, witnesses from below, theorems from above."""

from otattn.lipschitz import bounds, relaxations
from otattn.lipschitz.bound import Bound, Enclosure
from otattn.lipschitz.comparison import RealAgainstAdversarial, real_against_adversarial
from otattn.lipschitz.enclosure import EnclosureTable, enclose_lipschitz, enclosure_table
from otattn.lipschitz.growth import Exponent, LocalGrowth, fit_exponent, local_growth
from otattn.lipschitz.local import LocalLipschitz, local_lipschitz
from otattn.lipschitz.local_upper import local_upper_bound
from otattn.lipschitz.lower import adversarial_tokens, lipschitz_lower_bound
from otattn.lipschitz.upper import lipschitz_upper_bound

__all__ = [
    "Bound",
    "Enclosure",
    "EnclosureTable",
    "Exponent",
    "LocalGrowth",
    "LocalLipschitz",
    "RealAgainstAdversarial",
    "adversarial_tokens",
    "bounds",
    "enclose_lipschitz",
    "enclosure_table",
    "fit_exponent",
    "lipschitz_lower_bound",
    "lipschitz_upper_bound",
    "local_growth",
    "local_lipschitz",
    "local_upper_bound",
    "real_against_adversarial",
    "relaxations",
]
