r"""Robustness in words: how far an edit of a text moves its token measure, and what comes out of a network.

A synonym, a typo, a permutation, a truncation turn the measure mu of a sentence's embedded tokens into nu. With F the network,
the mean of the output tokens (the pooled output, what sentence embeddings are made of) moves by at most the distance of the
images, since a mean is 1-Lipschitz in W_1:

.. math:: |\mathrm{mean}\, F\mu - \mathrm{mean}\, F\nu| \le W_1(F\mu, F\nu) \le W_2(F\mu, F\nu).

Beside the measured ``W_2(F mu, F nu) / W_2(mu, nu)`` stands the local constant at mu, which holds for small moves only: real
edits are large, and what they do is usually far less. The certified constant (:func:`otattn.certify`, when asked for) holds for
the edit itself, ``W_2(F mu, F nu) <= certified W_2(mu, nu)``, where the certificate reaches as far as W_2(mu, nu); it is inf where
it does not, and nan for edits of another number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._tabular import Result, plain
from otattn.attention import AttentionMap, Compose
from otattn.attention.base import Measure
from otattn.distances import conditional_wasserstein, wasserstein
from otattn.lipschitz.local.networks import Network, network_of
from otattn.lipschitz.upper.second_order import certified_constants
from otattn.measures import SpaceTimeMeasure
from otattn.measures.like import MeasureLike
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
    certified : ndarray (m,)
        A constant that is certified to hold for the edit: inf where the edit is too large for a proof, nan where it was not
        asked for or the numbers of tokens differ.
    local : float
        The local constant at the text (particle part, from below).
    error_bar : float
    """

    names: tuple[str, ...]
    before: Array
    after: Array
    pooled: Array
    certified: Array
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
        """One record an edit, with its certified constant where one was asked for."""
        asked = not np.isnan(self.certified).all()
        return [
            {
                "edit": name,
                "W_2 of tokens": float(self.before[i]),
                "W_2 of outputs": float(self.after[i]),
                "measured": float(self.ratios[i]),
                **({"certified": float(self.certified[i])} if asked else {}),
                "local": self.local,
                "pooled": float(self.pooled[i]),
                "pooled over size": float(self.pooled[i] / self.size) if self.size > 0.0 else np.nan,
            }
            for i, name in enumerate(self.names)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"n": self.mu.n, "local": self.local, "error_bar": self.error_bar, "edits": plain(self.rows())}

    def __repr__(self) -> str:
        return f"EditStability({len(self.names)} edits, n={self.mu.n}, local={self.local:.4g})"


def edit_stability(
    network: Network | AttentionMap | Sequence[AttentionMap],
    tokens: MeasureLike,
    edits: Mapping[str, MeasureLike],
    *,
    first: int = 0,
    last: int | None = None,
    certified: bool = False,
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
    certified : bool
        Also certify a constant for each edit. It takes as long as :func:`otattn.certify`.
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
    if certified and not _is_text(mu):
        raise ValueError(
            "tokens must have equal weights, and be a sequence for causal maps, for certified=True; leave it out, or give an "
            "(n, d) array."
        )
    distance = conditional_wasserstein if whole.causal else wasserstein
    image = whole.pushforward(mu)
    centre = image.weights @ image.points
    numbers, alike = [], []
    for name, text in edits.items():
        nu = network_of(network, text, first, last)[1]
        if whole.causal and nu.n != mu.n:
            raise ValueError(
                f"edits of a causal map must have as many tokens as the text, {mu.n}, received {nu.n} for {name!r}; the "
                "conditional distance compares tokens of one time."
            )
        alike.append(nu.n == mu.n and _is_text(nu))
        out = whole.pushforward(nu)
        moved = float(np.linalg.norm(out.weights @ out.points - centre))
        numbers.append((distance(mu, nu, p=2), distance(image, out, p=2), moved))
    before, after, pooled = (check.frozen(np.array(column)) for column in zip(*numbers, strict=True))
    proved = np.full(len(before), np.nan)
    if certified and any(alike):
        proved[alike] = certified_constants(whole, mu.points, before[alike] * (1.0 + 1e-9))
    top = top_singular(measure_jacobian(whole, mu), tol=tol, rng=rng)
    size = float(np.linalg.norm(centre))
    return EditStability(
        tuple(edits), before, after, pooled, check.frozen(proved), size, top.value, top.error_bar, whole, mu
    )


def _is_text(mu: Measure) -> bool:
    """Whether a measure is that of equal tokens, a sequence where it has times."""
    placed = not isinstance(mu, SpaceTimeMeasure) or np.array_equal(mu.times, np.arange(1, mu.n + 1) / mu.n)
    return placed and float(np.ptp(mu.weights)) == 0.0
