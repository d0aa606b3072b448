"""POT's network simplex, with the flows of its plan computed again without rounding."""

from __future__ import annotations

import numpy as np

from otattn._linalg import Array
from otattn.distances.flows import Support, forest_flow
from otattn.distances.masses import to_weights
from otattn.errors import ConvergenceError

__all__ = ["Support", "network_simplex"]

MAX_PIVOTS = 2**31 - 1


def network_simplex(R: Array, A: list[int], B: list[int]) -> tuple[Support, Array]:
    """A plan for the cost ``R`` on its support, ``(rows, cols, mass)``, and potentials of the columns.

    Raises
    ------
    ConvergenceError
        POT stopped early, or its plan does not serve every atom.
    """
    import ot  # imported late: POT looks for every array library there is

    scale = float(np.abs(R).max()) or 1.0  # POT compares costs with absolute tolerances
    plan, log = ot.emd(to_weights(A), to_weights(B), R / scale, numItermax=MAX_PIVOTS, log=True, center_dual=False)
    if log["warning"] is not None:
        raise ConvergenceError(
            f"the network simplex must reach an optimal plan between {len(A)} and {len(B)} atoms, but "
            f"stopped with: {log['warning']}; merge near-duplicate atoms or compare smaller samples."
        )
    v = log["v"] * scale
    rows, cols = np.nonzero(plan)
    flow = forest_flow(rows, cols, A, B, lambda k, is_row: R[k] - v if is_row else R[:, k])
    if flow is None:
        raise ConvergenceError(
            f"a transport plan must serve every atom, but the simplex found none between {len(A)} and "
            f"{len(B)} atoms; drop atoms of negligible weight."
        )
    return flow, v
