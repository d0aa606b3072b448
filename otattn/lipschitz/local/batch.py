"""Local constants of one map at many windows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn.attention import AttentionMap
from otattn.attention.base import Measure, as_attention
from otattn.lipschitz.local.value import LocalLipschitz, local_lipschitz
from otattn.measures import Domain
from otattn.measures.like import MeasureLike

__all__ = ["local_lipschitz_batch"]


def local_lipschitz_batch(
    attention: AttentionMap,
    windows: Sequence[MeasureLike] | ArrayLike,
    *,
    p: float = 2,
    tol: float = 1e-8,
    domain: Domain | None = None,
    failure: float = 1e-9,
    rng: np.random.Generator | int = 0,
    device: Any = None,
    n_jobs: int | None = 1,
) -> tuple[LocalLipschitz, ...]:
    """:func:`local_lipschitz` at each of many windows.

    Parameters
    ----------
    attention : AttentionMap
    windows : array_like (windows, n, d), or list of measures or array_like (n, d)
        Those of a list may differ in n.
    p, tol, domain, failure, device
        As for :func:`local_lipschitz`.
    rng : Generator or int
        A number is the seed of every window: then the results are those of the calls one by one. A Generator spawns one
        for each.
    n_jobs : int or None
        Processes, as for ``joblib.Parallel``; the results do not depend on it.

    Returns
    -------
    tuple of LocalLipschitz
        In the order of the windows.

    Raises
    ------
    ValueError
        One window alone, no window, or windows of other shapes.
    ConvergenceError
        As for :func:`local_lipschitz`, at any of them.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> head = SoftmaxAttention([[0.0]], [[2.0]])
    >>> [round(local.value, 9) for local in local_lipschitz_batch(head, [[[1.0], [3.0]], [[0.0]]])]
    [2.0, 2.0]
    """
    measures = [as_attention(attention).as_measure(window) for window in _windows(windows)]
    seeds: Sequence[Any] = [rng] * len(measures)
    if isinstance(rng, np.random.Generator):
        seeds = rng.spawn(len(measures))
    options: dict[str, Any] = {"p": p, "tol": tol, "domain": domain, "failure": failure, "device": device}
    found = Parallel(n_jobs=n_jobs)(
        delayed(local_lipschitz)(attention, mu, rng=seed, **options) for mu, seed in zip(measures, seeds, strict=True)
    )
    # processes send copies of the map back
    return tuple(replace(local, attention=attention, mu=mu) for local, mu in zip(found, measures, strict=True))


def _windows(given: Any) -> list[Any]:
    """The windows one by one: measures as they are, arrays ``(n, d)``."""
    if isinstance(given, Measure) or not isinstance(given, (list, tuple)):
        shape = getattr(getattr(given, "points", given), "shape", None)
        if isinstance(given, Measure) or shape is None or len(shape) != 3:
            what = type(given).__name__ if shape is None else f"{type(given).__name__} of shape {tuple(shape)}"
            raise ValueError(
                f"windows must have shape (windows, n, d) or be a list of measures or arrays (n, d), received {what}; "
                "local_lipschitz takes one window."
            )
        given = list(check.as_float_array(given, "windows", ndim=3))
    if not given:
        raise ValueError("windows must hold at least one window, received none.")
    return [
        w if isinstance(w, Measure) else check.as_float_array(w, f"windows[{i}]", ndim=2) for i, w in enumerate(given)
    ]
