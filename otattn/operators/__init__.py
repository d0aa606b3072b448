"""The derivative of attention as a linear operator: fused products, its largest singular value."""

from otattn.operators.fused import FusedJacobian, measure_jacobian
from otattn.operators.lanczos import SingularValueError, TopSingular, top_singular

__all__ = ["FusedJacobian", "SingularValueError", "TopSingular", "measure_jacobian", "top_singular"]
