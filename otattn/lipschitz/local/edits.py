r"""Robustness in words: how far an edit of a text moves its token measure, and what comes out of a network.

A synonym, a typo, a permutation, a truncation turn the measure mu of a sentence's embedded tokens into nu. With F the network,
the mean of the output tokens (the pooled output, what sentence embeddings are made of) moves by at most the distance of the
images, since a mean is 1-Lipschitz in W_1:

.. math:: |\mathrm{mean}\, F\mu - \mathrm{mean}\, F\nu| \le W_1(F\mu, F\nu) \le W_2(F\mu, F\nu).

Beside the measured ``W_2(F mu, F nu) / W_2(mu, nu)`` stands the local constant at mu, which holds for small moves only: real
edits are large, and what they do is usually far less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._tabular import Result
from otattn.attention import Compose
from otattn.attention.base import Measure
from otattn.distances import conditional_wasserstein, wasserstein
from otattn.lipschitz.local.networks import network_of
from otattn.operators import measure_jacobian, top_singular

__all__ = ["EditStability", "edit_stability"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class EditStability(Result):
    """What edits of a text do to its tokens and to a network's output.

    Attributes
    ----------
    names : tuple of str
        Of the m edits.
    before, after : ndarray (m,)
        W_2 of the token measures that enter, and that leave (conditional for causal maps).
    pooled : ndarray (m,)
        Distance of the means of the output tokens.
    size : float
        Norm of the pooled output of the text itself.
    local : float
        The local constant at the text (particle part, from below).
    error_bar : float
    """

    names: tuple[str, ...]
    before: Array
    after: Array
    pooled: Array
    size: float
    local: float
    error_bar: float
    network: Compose
    mu: Measure

    @property
    def ratios(self) -> Array:
        """``after / before``, the measured constants; nan where an edit moves no token."""
        moved = self.before > 0.0
        return np.divide(self.after, self.before, out=np.full(len(self.before), np.nan), where=moved)

    def rows(self) -> list[dict[str, Any]]:
        """One record an edit."""
        return [
            {
                "edit": name,
                "W_2 of tokens": float(self.before[i]),
                "W_2 of outputs": float(self.after[i]),
                "measured": float(self.ratios[i]),
                "local": self.local,
                "pooled": float(self.pooled[i]),
                "pooled over size": float(self.pooled[i] / self.size) if self.size > 0.0 else np.nan,
            }
            for i, name in enumerate(self.names)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"n": self.mu.n, "local": self.local, "error_bar": self.error_bar, "edits": self.rows()}

    def __repr__(self) -> str:
        return f"EditStability({len(self.names)} edits, n={self.mu.n}, local={self.local:.4g})"


def edit_stability(
    network: Any,
    tokens: Any,
    edits: Mapping[str, Any],
    *,
    first: int = 0,
    last: int | None = None,
    tol: float = 1e-3,
    rng: np.random.Generator | int = 0,
) -> EditStability:
    """Distances before and after a network between a text and its edits, and the change of the pooled output.

    Parameters
    ----------
    network : model, Compose, or sequence of AttentionMap
        As in :func:`otattn.depth_profile`.
    tokens : array_like of int (n,), array_like of float (n, d), or measure
        The text: token indices of a model, or what enters the first map.
    edits : mapping of str to the like of ``tokens``
        Of any number of tokens; for causal maps of the same number, whose times must match.
    first, last : int
        Layers of a model.
    tol : float
        Relative error of the local constant, by its residual.
    rng : Generator or int
        Starting vector.

    Examples
    --------
    >>> import otattn as oa
    >>> mean = oa.SoftmaxAttention([[0.0]], [[1.0]])
    >>> found = edit_stability([mean], [[0.0], [2.0]], {"swap": [[2.0], [0.0]], "shift": [[1.0], [3.0]]})
    >>> found.before.round(9), found.pooled.round(9), found.ratios.round(9)
    (array([0., 1.]), array([0., 1.]), array([nan,  1.]))
    """
    if not edits:
        raise ValueError("edits must hold at least one text, received none; give a mapping of names to tokens.")
    whole, mu, _ = network_of(network, tokens, first, last)
    distance = conditional_wasserstein if whole.causal else wasserstein
    image = whole.pushforward(mu)
    centre = image.weights @ image.points
    numbers = []
    for name, text in edits.items():
        nu = network_of(network, text, first, last)[1]
        if whole.causal and nu.n != mu.n:
            raise ValueError(
                f"edits of a causal map must have as many tokens as the text, {mu.n}, received {nu.n} for {name!r}; the "
                "conditional distance compares tokens of one time."
            )
        out = whole.pushforward(nu)
        moved = float(np.linalg.norm(out.weights @ out.points - centre))
        numbers.append((distance(mu, nu, p=2), distance(image, out, p=2), moved))
    before, after, pooled = (check.frozen(np.array(column)) for column in zip(*numbers, strict=True))
    top = top_singular(measure_jacobian(whole, mu), tol=tol, rng=rng)
    size = float(np.linalg.norm(centre))
    return EditStability(tuple(edits), before, after, pooled, size, top.value, top.error_bar, whole, mu)
