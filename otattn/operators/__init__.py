"""The derivative of attention as a linear operator: fused products, its largest singular value, its norm from both sides."""

from otattn.operators.fused import FusedJacobian, measure_jacobian
from otattn.operators.lanczos import SingularValueError, TopSingular, top_singular
from otattn.operators.norm_bounds import NormBounds, spectral_norm_bounds

__all__ = [
    "FusedJacobian",
    "NormBounds",
    "SingularValueError",
    "TopSingular",
    "measure_jacobian",
    "spectral_norm_bounds",
    "top_singular",
]
