"""Relaxations: upper bounds found by convex programs, certified in numpy whatever the solver said."""

from otattn.lipschitz.relaxations.certificate import Certificate
from otattn.lipschitz.relaxations.column_sums import kappa
from otattn.lipschitz.relaxations.field import field_jacobian
from otattn.lipschitz.relaxations.heads import multihead
from otattn.lipschitz.relaxations.interval_simplex import interval_simplex
from otattn.lipschitz.relaxations.joint import joint
from otattn.lipschitz.relaxations.local_ball import local_ball
from otattn.lipschitz.relaxations.mean_field import mean_field
from otattn.lipschitz.relaxations.pair import pair
from otattn.lipschitz.relaxations.psd import psd
from otattn.lipschitz.relaxations.self_entropy import row_constant, self_entropy

__all__ = [
    "Certificate",
    "field_jacobian",
    "interval_simplex",
    "joint",
    "kappa",
    "local_ball",
    "mean_field",
    "multihead",
    "pair",
    "psd",
    "row_constant",
    "self_entropy",
]
