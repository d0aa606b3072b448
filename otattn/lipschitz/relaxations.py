"""Relaxations: upper bounds found by convex programs, certified in numpy whatever the solver said."""

from otattn.lipschitz.certificate import Certificate
from otattn.lipschitz.constants.column_exponent import kappa
from otattn.lipschitz.constants.field import field_jacobian
from otattn.lipschitz.constants.self_entropy import row_constant, self_entropy
from otattn.lipschitz.constants.simplex import interval_simplex
from otattn.lipschitz.upper.mean_field import mean_field
from otattn.lipschitz.upper.multi_head import multi_head
from otattn.lipschitz.upper.near_tokens import local_ball
from otattn.lipschitz.upper.psd import psd
from otattn.lipschitz.upper.rows_and_columns import joint
from otattn.lipschitz.upper.two_tokens import pair

__all__ = [
    "Certificate",
    "field_jacobian",
    "interval_simplex",
    "joint",
    "kappa",
    "local_ball",
    "mean_field",
    "multi_head",
    "pair",
    "psd",
    "row_constant",
    "self_entropy",
]
