r"""What a stack of layers does to its tokens, in depth: norms of all partial products, against products of norms.

For stages ``f_1, ..., f_S`` with derivatives ``J_s`` at the tokens that reach them, the derivative of the stages a to b is
``J_{a:b} = J_b ... J_a`` and its norm in ``L^2(mu)`` is the local constant in W_2 of that part of the network for tokens that
move as wholes. ``||J_{a:b}|| <= ||J_b|| ... ||J_a||``, with equality only if the output direction that each stage stretches
most is the input direction that the next one stretches most; the product of the layers' own constants is what is usually
quoted, and it is far from what the network does.

Norms come from Lanczos, hence from below: with each goes the error bar of its residual (:class:`otattn.operators.TopSingular`),
which is proved for *some* singular value; that it is the largest is the usual assumption on a random start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from otattn import _validate as check
from otattn._tabular import Result
from otattn.attention import AttentionMap, Compose
from otattn.attention.base import Measure
from otattn.distances import conditional_wasserstein, wasserstein
from otattn.lipschitz.local.far_mass import largest_field_norm
from otattn.lipschitz.local.networks import Network, network_of
from otattn.lipschitz.local.partial_norms import PartialNorms
from otattn.lipschitz.local.splitting import FIELD_BYTES
from otattn.measures import SpaceTimeMeasure
from otattn.measures.like import MeasureLike
from otattn.operators import JacobianProduct, measure_jacobian, top_singular

__all__ = ["DepthProfile", "depth_profile"]

Array = NDArray[np.float64]
Bounds = Callable[[Any], tuple[float, float, str]]


@dataclass(frozen=True, eq=False)
class DepthProfile(Result):
    """Norms of all partial products of a network's derivative at its tokens.

    Attributes
    ----------
    names : tuple of str
        Of the S stages.
    norms : ndarray (S, S)
        ``norms[a, b] = ||J_{a:b}||``, stages a to b inclusive; nan below the diagonal.
    error_bars : ndarray (S, S)
        Absolute, by the residual.
    residuals : ndarray (S, S)
        ``|J^T J v - sigma^2 v| / sigma^2``.
    alignment : ndarray (S - 1,)
        ``|<u, v>|`` of what stage s stretches most, as it comes out, and what stage s + 1 stretches most: 1 if the product
        of their norms is attained.
    splitting : ndarray (S,) or None
        ``max_i ||D_x Gamma_mu(x_i)||`` of the first s stages: parts of one atom that move apart. The local constant for all
        measures nearby is ``max(composed, splitting)``.
    stability : ndarray (S,) or None
        ``W_2(F mu, F nu) / W_2(mu, nu)`` of the first s stages for two texts (conditional for causal maps).
    growth : ndarray (m, S) or None
        ``composed`` at the first ``n_values`` tokens, ``(m,)``.
    upper : ndarray (S,) or None
        Values from above of ``composed``, where ``bounds`` were asked for.
    how : tuple of str
        Of which kind each of them is.
    products : int
        Products with ``J^T J`` in all.
    tol : float
        Relative error asked for.
    """

    names: tuple[str, ...]
    norms: Array
    error_bars: Array
    residuals: Array
    alignment: Array
    splitting: Array | None
    stability: Array | None
    n_values: NDArray[np.int64] | None
    growth: Array | None
    upper: Array | None
    how: tuple[str, ...]
    products: int
    tol: float
    network: Compose
    mu: Measure

    @property
    def composed(self) -> Array:
        """Norms of the first 1, 2, ..., S stages together, ``(S,)``."""
        return self.norms[0].copy()

    @property
    def blocks(self) -> Array:
        """Norm of each stage, ``(S,)``."""
        return np.array(np.diag(self.norms), dtype=np.float64)

    @property
    def product(self) -> Array:
        """Products of the stages' own norms, ``(S,)``."""
        return np.asarray(np.cumprod(self.blocks), dtype=np.float64)

    def rows(self) -> list[dict[str, Any]]:
        """One record a depth."""
        records = []
        for s, name in enumerate(self.names):
            row: dict[str, Any] = {
                "depth": s + 1,
                "stage": name,
                "block": float(self.norms[s, s]),
                "composed": float(self.norms[0, s]),
                "error_bar": float(self.error_bars[0, s]),
                **({} if self.upper is None else {"upper": float(self.upper[s])}),
                "product": float(self.product[s]),
                "product_over_composed": float(self.product[s] / self.norms[0, s]) if self.norms[0, s] > 0 else np.nan,
                "alignment": float(self.alignment[s - 1]) if s else np.nan,
            }
            if self.splitting is not None:
                row["splitting"] = float(self.splitting[s])
            if self.stability is not None:
                row["stability"] = float(self.stability[s])
            records.append(row)
        return records

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, ready for JSON; None below the diagonal."""

        def triangle(values: Array) -> list[list[float | None]]:
            return [[float(v) if b >= a else None for b, v in enumerate(row)] for a, row in enumerate(values)]

        out: dict[str, Any] = {
            "n": self.mu.n,
            "stages": list(self.names),
            "composed": self.composed.tolist(),
            "product": self.product.tolist(),
            "blocks": self.blocks.tolist(),
            "norms": triangle(self.norms),
            "error_bars": triangle(self.error_bars),
            "alignment": self.alignment.tolist(),
            "tol": self.tol,
        }
        for name in ("splitting", "stability", "n_values", "growth", "upper"):
            value = getattr(self, name)
            if value is not None:
                out[name] = value.tolist()
        return out

    def verify(self, *, rng: np.random.Generator | int = 1) -> bool:
        """The norm of all stages together once more, by another start and the maps' own Jacobians: within both bars."""
        support = self.mu.support()
        J = self.network.jacobian(support).reweighted(support.weights)
        again = top_singular(J, tol=self.tol, rng=rng)
        return bool(abs(again.value - self.norms[0, -1]) <= again.error_bar + self.error_bars[0, -1])

    def __str__(self) -> str:
        rows = self.rows()
        names = [name for name in rows[0] if name not in ("depth", "stage")]
        wide = max(len("stage"), *(len(r["stage"]) for r in rows))
        lines = ["depth  " + f"{'stage':<{wide}}" + "".join(f"  {name:>{max(10, len(name))}}" for name in names)]
        for row in rows:
            cells = "".join(f"  {row[name]:>{max(10, len(name))}.4g}" for name in names)
            lines.append(f"{row['depth']:>5}  {row['stage']:<{wide}}{cells}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"DepthProfile({len(self.names)} stages, n={self.mu.n}, composed={self.norms[0, -1]:.4g}, "
            f"product={self.product[-1]:.4g})"
        )


def depth_profile(
    network: Network | AttentionMap | Sequence[AttentionMap],
    tokens: MeasureLike,
    *,
    first: int = 0,
    last: int | None = None,
    partial: bool = True,
    other: MeasureLike | None = None,
    n_values: Sequence[int] | None = None,
    splitting: bool = False,
    bounds: Bounds | None = None,
    tol: float = 1e-3,
    max_iter: int = 300,
    rng: np.random.Generator | int = 0,
    progress: bool = False,
) -> DepthProfile:
    """Norms of the partial products ``J_{a:b}`` of a network's derivative at its tokens.

    Parameters
    ----------
    network : model, Compose, or sequence of AttentionMap
        A model of :mod:`otattn.models` (its stages are its layers, and the last normalisation), or maps one after another.
    tokens : array_like of int (n,), array_like of float (n, d), or measure
        Token indices of a model; or what enters the first stage.
    first, last : int
        Layers of a model, as in its ``map``; stages otherwise. Tokens given as floats enter stage ``first``.
    partial : bool
        All partial products; otherwise those of the first stages and each stage alone.
    other : like ``tokens``, optional
        Another text, for ``stability``.
    n_values : sequence of int, optional
        Numbers of tokens, for ``growth``: the first n tokens on their own.
    splitting : bool
        Also the splitting part (``(n, d, d)`` arrays in chunks: seconds to minutes).
    bounds : callable, optional
        Of a linear operator: ``(lower, upper, how)`` of its norm. Fills ``upper`` for the first 1, 2, ... stages; Lanczos alone
        gives values from below.
    tol : float
        Largest relative error of each norm, by its residual.
    max_iter : int
        Largest number of products a norm.
    rng : Generator or int
        Starting vectors.
    progress : bool
        Show a bar on stderr.

    Raises
    ------
    SingularValueError
        A norm did not reach ``tol`` in ``max_iter`` products.

    Notes
    -----
    The iteration for ``J_{a:b+1}`` starts from the top vector of ``J_{a:b}`` with a random vector of a tenth of its size, in
    float32 as far as that carries; value and residual come from float64.

    Examples
    --------
    >>> import otattn as oa
    >>> turn = oa.SoftmaxAttention([[0.0, 0.0], [0.0, 0.0]], [[0.0, 2.0], [0.5, 0.0]])
    >>> profile = depth_profile([turn, turn], [[1.0, 0.0], [1.0, 0.0]])
    >>> profile.blocks.round(6), profile.composed.round(6), profile.alignment.round(6)
    (array([2., 2.]), array([2., 1.]), array([0.]))
    """
    whole, mu, names = network_of(network, tokens, first, last)
    check.positive(tol, "tol")
    generator = check.rng_from(rng)
    stages = whole.stages(mu.support())
    search = PartialNorms([measure_jacobian(m, nu) for m, nu in stages], tol, max_iter, generator)
    S = len(stages)
    pairs = [(a, b) for a in range(S) for b in range(a, S) if partial or a == 0 or a == b]
    with tqdm(total=len(pairs), desc="partial products", disable=not progress, leave=False) as bar:
        for a, b in pairs:
            search.norm(a, b)
            bar.update()
    n_list, growth = _growth(network, tokens, n_values, first, last, tol, max_iter, generator)
    return DepthProfile(
        names,
        search.table(lambda top: top.value),
        search.table(lambda top: top.error_bar),
        search.table(lambda top: top.residual),
        search.alignment(),
        _splitting(whole, mu.support()) if splitting else None,
        None if other is None else _stability(whole, mu, network_of(network, other, first, last)[1]),
        n_list,
        growth,
        *_from_above(search.stages, bounds),
        search.products,
        float(tol),
        whole,
        mu,
    )


def _from_above(stages: Sequence[Any], bounds: Bounds | None) -> tuple[Array | None, tuple[str, ...]]:
    """What ``bounds`` says of the first 1, 2, ... stages, and how."""
    if bounds is None:
        return None, ()
    found = [bounds(stages[0] if s == 1 else JacobianProduct(stages[:s])) for s in range(1, len(stages) + 1)]
    return check.frozen(np.array([float(upper) for _, upper, _ in found])), tuple(str(how) for *_, how in found)


def _splitting(whole: Compose, mu: Measure) -> Array:
    """Largest norm of the field of the first s stages, ``(S,)``: products of the stages' fields, token by token."""
    stages, d = whole.stages(mu), mu.dim
    out = np.zeros(len(stages))
    step = max(1, FIELD_BYTES // (8 * d * d))
    for start in range(0, mu.n, step):
        rows, total = slice(start, start + step), None
        for s, (m, nu) in enumerate(stages):
            times = nu.times[rows] if m.causal and isinstance(nu, SpaceTimeMeasure) else None
            D = m.field_jacobian(nu.points[rows], nu, times=times)
            total = D if total is None else D @ total
            out[s] = largest_field_norm(total, out[s])
    return check.frozen(out)


def _stability(whole: Compose, mu: Measure, nu: Measure) -> Array:
    """Distances of the images of two measures over that of the measures, stage by stage."""
    distance = conditional_wasserstein if whole.causal else wasserstein
    before = distance(mu, nu, p=2)
    if before == 0.0:
        raise ValueError("other must differ from tokens, received the same measure; the ratio would be 0 / 0.")
    out = []
    for part in whole.maps:
        mu, nu = part.pushforward(mu), part.pushforward(nu)
        out.append(distance(mu, nu, p=2) / before)
    return check.frozen(np.array(out))


def _growth(
    network: Any,
    tokens: Any,
    n_values: Sequence[int] | None,
    first: int,
    last: int | None,
    tol: float,
    max_iter: int,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64] | None, Array | None]:
    """``composed`` at the first n tokens, each n on its own."""
    if n_values is None:
        return None, None
    if hasattr(tokens, "points"):
        raise ValueError("n_values must come with an array of tokens, received a measure; give its points in order.")
    array, sizes = np.asarray(tokens), [check.count(n, "n_values") for n in n_values]
    if not sizes or max(sizes) > len(array):
        raise ValueError(f"n_values must be at most the number of tokens {len(array)}, received {sizes}.")
    out = []
    for n in sizes:
        whole, mu, _ = network_of(network, array[:n], first, last)
        search = PartialNorms([measure_jacobian(m, nu) for m, nu in whole.stages(mu)], tol, max_iter, rng)
        out.append([search.norm(0, s).value for s in range(len(whole.maps))])
    return np.array(sizes, dtype=np.int64), check.frozen(np.array(out))
