"""The derivative of attention as a linear operator: fused products, its largest singular value."""

from otattn.operators.fused import FusedJacobian
from otattn.operators.lanczos import SingularValueError, TopSingular, top_singular
from otattn.operators.network import JacobianProduct, NetworkJacobian, measure_jacobian

__all__ = [
    "FusedJacobian",
    "JacobianProduct",
    "NetworkJacobian",
    "SingularValueError",
    "TopSingular",
    "measure_jacobian",
    "top_singular",
]
