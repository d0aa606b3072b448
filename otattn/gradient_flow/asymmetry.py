"""How far a square operator is from being symmetric."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from otattn._linalg import Array
from otattn._tabular import Result
from otattn.attention.jacobian import JacobianOperator

__all__ = ["Asymmetry", "dense_asymmetry", "operator_asymmetry", "probed_asymmetry"]


@dataclass(frozen=True)
class Asymmetry(Result):
    """``|J - J^T|_F / |J + J^T|_F``: 0 for a symmetric J, inf for a skew one.

    Attributes
    ----------
    value : float
    error : float
        Standard error of an estimate by random probes, 0 when the value is exact.
    probes : int
        Number of probes, 0 when exact.
    """

    value: float
    error: float = 0.0
    probes: int = 0


def dense_asymmetry(matrices: Array) -> float:
    """The defect of one matrix ``(d, d)``, or of a stack ``(m, d, d)`` taken together; 0 when all are 0.

    Examples
    --------
    >>> dense_asymmetry(np.array([[1.0, 0.0], [0.0, 1.0]])), dense_asymmetry(np.array([[0.0, 1.0], [-1.0, 0.0]]))
    (0.0, inf)
    """
    top = float(np.abs(matrices).max(initial=0.0))
    if top == 0.0:
        return 0.0
    M = matrices / top  # squares of entries of any size stay representable
    other = np.swapaxes(M, -1, -2)
    return _ratio(float(np.sum((M - other) ** 2)), float(np.sum((M + other) ** 2)))


def operator_asymmetry(
    J: JacobianOperator, *, rng: np.random.Generator, probes: int = 16, dense_size: int = 1024
) -> Asymmetry:
    """The defect of a square operator: exact up to ``dense_size`` rows, else by Hutchinson's probes.

    With v of independent random signs, ``E |(J - J^T) v|^2 = |J - J^T|_F^2``, and likewise for the sum: one product
    with J and one with its transpose a probe. The defect is the square root of the ratio of the two means; its
    standard error comes from the spread of the probes (delta method).

    References
    ----------
    Hutchinson (1990), A stochastic estimator of the trace of the influence matrix.
    """
    size = J.shape[0]
    if size <= dense_size:
        return Asymmetry(dense_asymmetry(J.to_dense()))
    skew, even, logs = np.empty(probes), np.empty(probes), np.full(probes, -np.inf)
    for k in range(probes):
        v = 2.0 * rng.integers(0, 2, size=size) - 1.0
        forward, backward = J.matvec(v), J.rmatvec(v)
        top = max(float(np.abs(forward).max()), float(np.abs(backward).max()))
        if top > 0.0:
            forward, backward, logs[k] = forward / top, backward / top, np.log(top)
        skew[k], even[k] = np.sum((forward - backward) ** 2), np.sum((forward + backward) ** 2)
    if np.isneginf(logs).all():
        return Asymmetry(0.0, 0.0, probes)
    scale = np.exp(2.0 * (logs - logs.max()))
    return probed_asymmetry(skew * scale, even * scale)


def probed_asymmetry(skew: Array, even: Array) -> Asymmetry:
    """The defect from independent estimates of the two squared norms, with its standard error (delta method)."""
    value = _ratio(float(skew.mean()), float(even.mean()))
    if not 0.0 < value < np.inf:
        return Asymmetry(value, 0.0, len(skew))
    spread = float(np.std(skew - value**2 * even, ddof=1)) / np.sqrt(len(skew))
    return Asymmetry(value, float(spread / even.mean() / (2.0 * value)), len(skew))


def _ratio(skew: float, even: float) -> float:
    if skew == 0.0:
        return 0.0
    return float(np.sqrt(skew / even)) if even > 0.0 else float("inf")
