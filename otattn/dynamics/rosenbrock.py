r"""One step of a linearly implicit method, for many small stiff systems at once.

The method is RODAS (Hairer and Wanner, *Solving Ordinary Differential Equations II*, section VI.4): six stages, order 4
with an embedded method of order 3, L-stable and stiffly accurate. Each stage solves with the one matrix
``1/(h gamma) - J``, so a stack of systems costs one batched inverse and six batched products.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from otattn._linalg import Array

__all__ = ["ERROR_ORDER", "rosenbrock_step"]

GAMMA = 0.25
ERROR_ORDER = 4
"""The error estimate is of the order ``h^4``."""
# rows of the arguments (stages 2 to 5; stage 6 and the new state add the stage before) and of the right-hand sides
ARGUMENTS = (
    (),
    (1.544,),
    (0.9466785280815826, 0.2557011698983284),
    (3.314825187068521, 2.896124015972201, 0.9986419139977817),
    (1.221224509226641, 6.019134481288629, 12.53708332932087, -0.6878860361058950),
)
SIDES = (
    (),
    (-5.6688,),
    (-2.430093356833875, -0.2063599157091915),
    (-0.1073529058151375, -9.594562251023355, -20.47028614809616),
    (7.496443313967647, -10.24680431464352, -33.99990352819905, 11.70890893206160),
    (8.083246795921522, -7.981132988064893, -31.52159432874371, 16.31930543123136, -6.058818238834054),
)


def rosenbrock_step(rate: Callable[[Array], Array], jacobian: Array, h: Array) -> tuple[Array, Array]:
    """The increments of one step from 0, and estimates of their errors.

    Parameters
    ----------
    rate : callable (B, m) -> (B, m)
        Right-hand sides of B autonomous systems, as functions of the increments of their states.
    jacobian : ndarray (B, m, m)
        Their Jacobians at the start of the step.
    h : ndarray (B,)
        A step for each.
    """
    B, m = jacobian.shape[:2]
    inverse = np.linalg.inv(np.eye(m) / (GAMMA * h)[:, None, None] - jacobian)
    stages: list[Array] = []
    point = np.zeros((B, m))
    for i, side in enumerate(SIDES):
        if i < len(ARGUMENTS):
            point = sum((a * u for a, u in zip(ARGUMENTS[i], stages, strict=True)), start=np.zeros((B, m)))
        else:
            point = point + stages[-1]
        memory = sum((c * u for c, u in zip(side, stages, strict=True)), start=np.zeros((B, m)))
        stages.append(np.asarray((inverse @ (rate(point) + memory / h[:, None])[:, :, None])[:, :, 0]))
    return point + stages[-1], stages[-1]
