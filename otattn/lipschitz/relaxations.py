"""Relaxations: upper bounds found by convex programs, certified in numpy whatever the solver said."""

from otattn.lipschitz.certificate import Certificate
from otattn.lipschitz.constants.column_exponent import column_exponent
from otattn.lipschitz.constants.field import field_certificate
from otattn.lipschitz.constants.self_entropy import row_certificate, self_entropy
from otattn.lipschitz.constants.simplex import interval_simplex
from otattn.lipschitz.forms.frontier_rows import frontier_rows
from otattn.lipschitz.forms.logit_gap import logit_gap
from otattn.lipschitz.forms.negative_identity import negative_identity
from otattn.lipschitz.forms.psd_mean_field import psd_mean_field
from otattn.lipschitz.forms.sinkhorn_symmetric import sinkhorn_symmetric
from otattn.lipschitz.forms.two_tokens import two_tokens
from otattn.lipschitz.upper.mean_field import mean_field
from otattn.lipschitz.upper.near_tokens import near_tokens
from otattn.lipschitz.upper.psd import psd
from otattn.lipschitz.upper.rows_and_columns import rows_and_columns

__all__ = [
    "Certificate",
    "column_exponent",
    "field_certificate",
    "frontier_rows",
    "interval_simplex",
    "logit_gap",
    "mean_field",
    "near_tokens",
    "negative_identity",
    "psd",
    "psd_mean_field",
    "row_certificate",
    "rows_and_columns",
    "self_entropy",
    "sinkhorn_symmetric",
    "two_tokens",
]
