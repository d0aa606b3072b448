"""The closed-form bounds, published and ours, one function a theorem; exposed as ``otattn.bounds``."""

from otattn.lipschitz.constants.rows import density_constant, hoelder_constant, row_norm
from otattn.lipschitz.local.at_measure import at_measure_bound
from otattn.lipschitz.lower.published import (
    castin2024_discrete_lower,
    castin2024_large_radius,
    castin2024_mean_field_lower,
    kim2021_dot_product,
)
from otattn.lipschitz.regularity.fields import heads_field_bound
from otattn.lipschitz.regularity.fixed_query import fixed_query_bound
from otattn.lipschitz.regularity.values import value_bound
from otattn.lipschitz.table import BoundTable, Crossover, crossover, table
from otattn.lipschitz.upper.blocks import whole_block
from otattn.lipschitz.upper.gates_and_heads import gated_bound, heads_bound
from otattn.lipschitz.upper.l2 import l2_column_bound, l2_row_bound, l2_tied_bound
from otattn.lipschitz.upper.masked import masked_average_bound, masked_column_bound, masked_row_bound
from otattn.lipschitz.upper.multi_head import multi_head
from otattn.lipschitz.upper.published import (
    castin2024_discrete,
    castin2024_masked,
    castin2024_multi_head,
    geshkovski2024_mean_field,
    kim2021_l2,
)
from otattn.lipschitz.upper.rotary import rotary_gram_bound
from otattn.lipschitz.upper.scores import (
    rotary_row_bound,
    score_average_bound,
    score_column_bound,
    score_row_bound,
)
from otattn.lipschitz.upper.sinkhorn import sinkhorn_bound
from otattn.lipschitz.upper.softmax import column_bound, column_sum, density_bound, field_bound, row_bound
from otattn.lipschitz.upper.unnormalised import pointwise_bound

__all__ = [
    "BoundTable",
    "Crossover",
    "at_measure_bound",
    "castin2024_discrete",
    "castin2024_discrete_lower",
    "castin2024_large_radius",
    "castin2024_masked",
    "castin2024_mean_field_lower",
    "castin2024_multi_head",
    "column_bound",
    "column_sum",
    "crossover",
    "density_bound",
    "density_constant",
    "field_bound",
    "fixed_query_bound",
    "gated_bound",
    "geshkovski2024_mean_field",
    "heads_bound",
    "heads_field_bound",
    "hoelder_constant",
    "kim2021_dot_product",
    "kim2021_l2",
    "l2_column_bound",
    "l2_row_bound",
    "l2_tied_bound",
    "masked_average_bound",
    "masked_column_bound",
    "masked_row_bound",
    "multi_head",
    "pointwise_bound",
    "rotary_gram_bound",
    "rotary_row_bound",
    "row_bound",
    "row_norm",
    "score_average_bound",
    "score_column_bound",
    "score_row_bound",
    "sinkhorn_bound",
    "table",
    "value_bound",
    "whole_block",
]
