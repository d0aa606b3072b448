r"""How fast attention of n tokens drawn from a law tends to attention of the law itself.

Two errors are measured, for :math:`\mu_n` the empirical measure of n independent tokens of :math:`\mu`:
:math:`\sup_{|x| \le R} |\Gamma_{\mu_n}(x) - \Gamma_\mu(x)|`, and those of the mean and covariance of :math:`F(\mu_n)`.

**What to expect of softmax and** :math:`\mu = N(\alpha, \Sigma)`. With :math:`g = A x + c` the logits of the tokens have
variance :math:`s = g^\top \Sigma g` and

.. math:: \Gamma_{\mu_n}(x) - \Gamma_\mu(x) = \frac{\sum_j e^{\langle g, y_j \rangle} V (y_j - m)}{\sum_j e^{\langle g, y_j
          \rangle}}, \qquad m = \alpha + \Sigma g.

Tilting twice, :math:`E\, e^{2 \langle g, y \rangle} f(y) / (E\, e^{\langle g, y \rangle})^2 = e^{s} E f(y + 2 \Sigma g)`, so the
central limit theorem gives :math:`\sqrt n` times the root mean square of the error the limit

.. math:: C(x) = e^{s / 2} \sqrt{tr(V \Sigma V^\top) + |V \Sigma g|^2},

exponential in :math:`R^2`. The sum is that of the random energy model of log n and inverse temperature :math:`\sqrt s`
(Bovier, Kurkova, Löwe, 2002): the law of :math:`1 / \sqrt n` holds for :math:`n > e^{2 s}`; between :math:`e^{s / 2}` and
:math:`e^{2 s}` the mean is right but the fluctuations are those of a few tokens, and slower; below :math:`e^{s / 2}` the
largest logit, :math:`\sqrt{2 s \log n}`, holds all the weight. There softmax is hardmax, :math:`\Gamma_{\mu_n}(x)` stays at a
token while :math:`\Gamma_\mu(x)` is far outside of them, and the error

.. math:: |V \Sigma g| \, (1 - \sqrt{2 \log n / s})

(of the component along :math:`\Sigma g`, to first order in :math:`\log n`) falls only with the logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array, psd_sqrt, row_norms
from otattn._tabular import Result
from otattn.attention import SoftmaxAttention
from otattn.attention.base import AttentionMap, as_attention
from otattn.errors import NotGaussianPreservingError
from otattn.lipschitz.local.growth import Exponent, fit_exponent
from otattn.measures import DiscreteMeasure, GaussianMeasure, as_discrete

__all__ = ["SampleComplexity", "sample_complexity"]

Law = GaussianMeasure | DiscreteMeasure | Callable[[int, np.random.Generator], ArrayLike]

POINTS, STARTS, STEPS = 256, 6, 15
"""Of the search for the largest error on a ball: points drawn, the best of them that climb, and how often."""
REFERENCE = 16
"""Tokens of a reference sample, for each of the largest size."""
CLIMBS = 50
"""Steps to the largest variance of the logits, each an increase."""


@dataclass(frozen=True, eq=False)
class SampleComplexity(Result):
    r"""Errors of attention of n tokens against attention of their law.

    Attributes
    ----------
    sizes : ndarray (m,)
        Numbers of tokens n.
    radii : ndarray (r,)
    errors : ndarray (r, m, s)
        ``sup_{|x| <= R} |Gamma_{mu_n}(x) - Gamma_mu(x)|`` for s independent samples: the largest value that a search found,
        so from below.
    mean_errors, covariance_errors : ndarray (m, s)
        ``|mean of F(mu_n) - mean of F(mu)|`` and the Frobenius norm for covariances.
    reference : str
        "exact": Gamma_mu is a closed form (Gaussian law), or the law is discrete. "sample": it is attention of
        ``reference_size`` more tokens, whose own error is in all others.
    reference_size : int or None
    spreads, constants : ndarray (r,) or None
        For one head of softmax attention and a Gaussian law: the largest variance s of the logits on the ball, and the
        largest C(x) found, with which ``C / sqrt(n)`` is the error of large n at the worst point
        (:mod:`otattn.stability.sample_complexity`). None otherwise.
    """

    sizes: Array
    radii: Array
    errors: Array
    mean_errors: Array
    covariance_errors: Array
    reference: str
    reference_size: int | None
    spreads: Array | None
    constants: Array | None

    def fit(self, radius: int = 0) -> Exponent:
        """Power law in n of the errors on the ball number ``radius``: exponent with its interval."""
        return fit_exponent(self.sizes, self.errors[radius].T)

    def mean_fit(self) -> Exponent:
        """The same for the mean of the image."""
        return fit_exponent(self.sizes, self.mean_errors.T)

    def covariance_fit(self) -> Exponent:
        """The same for the covariance of the image."""
        return fit_exponent(self.sizes, self.covariance_errors.T)

    @property
    def regimes(self) -> list[list[str]] | None:
        """For each radius and size, at the worst point: "hardmax" below ``e^{s/2}`` tokens, "few tokens" below
        ``e^{2 s}``, "root n" from there; None where s is not known."""
        if self.spreads is None:
            return None
        scale = np.log(self.sizes)
        names = ("hardmax", "few tokens", "root n")
        return [[names[int(2.0 * l >= s) + int(l >= 2.0 * s)] for l in scale] for s in self.spreads]

    def rows(self) -> list[dict[str, Any]]:
        """One record a radius and size: mean and standard error of the supremum, ``C / sqrt(n)``, and the regime."""
        regimes, count = self.regimes, self.errors.shape[2]
        out = []
        for i, radius in enumerate(self.radii):
            for j, n in enumerate(self.sizes):
                found = self.errors[i, j]
                out.append(
                    {
                        "radius": float(radius),
                        "n": int(n),
                        "error": float(found.mean()),
                        "standard error": float(found.std(ddof=1) / np.sqrt(count)) if count > 1 else None,
                        "C / sqrt(n)": None if self.constants is None else float(self.constants[i] / np.sqrt(n)),
                        "regime": None if regimes is None else regimes[i][j],
                        "mean": float(self.mean_errors[j].mean()),
                        "covariance": float(self.covariance_errors[j].mean()),
                    }
                )
        return out

    def __repr__(self) -> str:
        count = "exact" if self.reference_size is None else f"{self.reference_size} tokens"
        rates = ", ".join(f"{self.fit(i).exponent:.2f}" for i in range(min(4, len(self.radii))))
        return (
            f"SampleComplexity(n={int(self.sizes[0])} to {int(self.sizes[-1])}, reference {count}, "
            f"exponents {rates}{' ...' if len(self.radii) > 4 else ''} at {len(self.radii)} radii)"
        )


def sample_complexity(
    attention: AttentionMap,
    law: Law,
    sizes: Sequence[int],
    *,
    radius: float | Sequence[float],
    samples: int = 8,
    reference_size: int | None = None,
    rng: np.random.Generator | int,
) -> SampleComplexity:
    r"""How fast attention of n tokens tends to attention of the law that they are drawn from.

    Measures :math:`\sup_{|x| \le R} |\Gamma_{\mu_n}(x) - \Gamma_\mu(x)|` and the errors of mean and covariance of
    :math:`F(\mu_n)`, and fits powers of n. For small R the exponent is -1/2; :math:`C(R) / \sqrt n` has a constant that is
    exponential in :math:`R^2` for Gaussians, and below that many tokens the decay is that of the largest token, a power of
    the logarithm, which a fit shows as a small exponent.

    Parameters
    ----------
    attention : AttentionMap
        Not a causal one: tokens of a law have no order.
    law : GaussianMeasure, DiscreteMeasure or callable (n, rng) -> (n, d)
        For Gaussians that the map keeps Gaussian, and for discrete laws (tokens of a text, drawn with replacement),
        ``Gamma_mu`` is exact; otherwise a large sample stands for it.
    sizes : sequence of int
        Numbers of tokens, at least two.
    radius : float or sequence of float
        Radii of the balls, around 0.
    samples : int
        Independent samples of each size; their scatter gives the intervals.
    reference_size : int, optional
        Tokens of the reference sample, where one is needed: 16 times the largest size by default.
    rng : Generator or int

    Raises
    ------
    TypeError
        The map is causal, or the law no law.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> head = SoftmaxAttention([[1.0]], [[1.0]])
    >>> law = GaussianMeasure([0.0], [[1.0]])
    >>> found = sample_complexity(head, law, [64, 512], radius=[0.5, 8.0], samples=24, rng=0)
    >>> [round(found.fit(i).exponent, 1) for i in range(2)]
    [-0.5, -0.1]
    >>> found.regimes[1]
    ['hardmax', 'hardmax']

    References
    ----------
    Bohbot, Letrouit, Peyré, Vialard, "Token sample complexity of attention", 2025.

    Bovier, Kurkova, Löwe, "Fluctuations of the free energy in the REM and the p-spin SK models", Ann. Probab., 2002.
    """
    as_attention(attention)
    if attention.causal:
        raise TypeError(
            f"attention must be a map of measures without times, received {attention.kind}; give its map without the mask."
        )
    if not (isinstance(law, (GaussianMeasure, DiscreteMeasure)) or callable(law)):
        raise TypeError(
            f"law must be a GaussianMeasure, a DiscreteMeasure or a callable (n, rng) -> (n, d), received {type(law).__name__}; "
            "for tokens (n, d) write DiscreteMeasure(tokens)."
        )
    gen, counts = check.rng_from(rng), [check.count(n, "sizes", least=2) for n in sizes]
    if len(set(counts)) < 2:
        raise ValueError(f"sizes must hold at least two different numbers of tokens, received {list(sizes)}.")
    radii = np.array([check.positive(R, "radius") for R in np.atleast_1d(np.asarray(radius, dtype=np.float64))])
    repeats, order = check.count(samples, "samples"), np.argsort(radii, kind="stable")
    size = REFERENCE * max(counts) if reference_size is None else check.count(reference_size, "reference_size", least=2)
    truth, moments, kept = _truth(attention, law, size, gen)
    errors = np.empty((len(radii), len(counts), repeats))
    of_moments = np.empty((2, len(counts), repeats))
    for j, n in enumerate(counts):
        for k in range(repeats):
            mu = _draw(law, n, gen)
            errors[order, j, k] = _suprema(attention, mu, truth, radii[order], gen)
            image = _moments(attention.pushforward(mu))
            of_moments[:, j, k] = [np.linalg.norm(a - b) for a, b in zip(image, moments, strict=True)]
    spreads, constants = _expected(attention, law, radii, gen)
    return SampleComplexity(
        sizes=np.array(counts, dtype=np.float64),
        radii=radii,
        errors=errors,
        mean_errors=of_moments[0],
        covariance_errors=of_moments[1],
        reference="exact" if kept else "sample",
        reference_size=None if kept else size,
        spreads=spreads,
        constants=constants,
    )


Field = Callable[[Array], tuple[Array, Array]]
"""Points ``(m, d)`` to ``Gamma_mu`` there ``(m, e)`` and its derivative ``(m, e, d)``."""


def _draw(law: Law, n: int, rng: np.random.Generator) -> DiscreteMeasure:
    if isinstance(law, GaussianMeasure):
        return law.sample(n, rng)
    if isinstance(law, DiscreteMeasure):
        return DiscreteMeasure(law.points[rng.choice(law.n, size=n, p=law.weights / law.weights.sum())])
    return as_discrete(law(n, rng), "law(n, rng)")


def _moments(image: Any) -> tuple[Array, Array]:
    return (image.mean, image.cov) if isinstance(image, GaussianMeasure) else (image.mean(), image.covariance())


def _truth(
    attention: AttentionMap, law: Law, size: int, rng: np.random.Generator
) -> tuple[Field, tuple[Array, Array], bool]:
    """The field of the law, the moments of its image, and whether they are exact."""
    if isinstance(law, GaussianMeasure):
        try:
            G, b = attention.gaussian_affine(law)
        except NotGaussianPreservingError:
            pass
        else:
            return (
                lambda x: (x @ G.T + b, np.broadcast_to(G, (len(x), *G.shape))),
                _moments(attention.pushforward(law)),
                True,
            )
    mu = law if isinstance(law, DiscreteMeasure) else _draw(law, size, rng)
    return _field(attention, mu), _moments(attention.pushforward(mu)), isinstance(law, DiscreteMeasure)


def _field(attention: AttentionMap, mu: DiscreteMeasure) -> Field:
    return lambda x: (attention(x, mu), attention.field_jacobian(x, mu))


def _suprema(
    attention: AttentionMap, mu: DiscreteMeasure, truth: Field, radii: Array, rng: np.random.Generator
) -> Array:
    """The largest errors found on balls of growing radii, each also on those inside it."""
    field = _field(attention, mu)
    out, d = np.zeros(len(radii)), mu.dim
    best = np.zeros((0, d))
    for i, R in enumerate(radii):
        u = rng.standard_normal((POINTS, d))
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        u[::4] *= rng.random((len(u[::4]), 1)) ** (1.0 / d)  # most of a convex error is at the sphere
        x = np.concatenate([R * u, best])
        size = row_norms(attention(x, mu) - truth(x)[0])
        best = x[np.argsort(-size)[:STARTS]]
        best, found = _climbed(field, truth, best, float(R))
        out[i] = max(float(found.max()), float(size.max()), out[i - 1] if i else 0.0)
    return out


def _climbed(field: Field, truth: Field, x: Array, R: float) -> tuple[Array, Array]:
    """Projected ascent of ``|Gamma_{mu_n} - Gamma_mu|`` in the ball, each point with its own step; never down."""
    step = np.full((len(x), 1), 0.25 * R)
    value, gradient = _error(field, truth, x)
    for _ in range(STEPS):
        length = np.maximum(np.linalg.norm(gradient, axis=1, keepdims=True), 1e-300)
        y = x + step * gradient / length
        y *= np.minimum(1.0, R / np.maximum(np.linalg.norm(y, axis=1, keepdims=True), 1e-300))
        new, slope = _error(field, truth, y)
        up = (new > value)[:, None]
        x, gradient, value = np.where(up, y, x), np.where(up, slope, gradient), np.maximum(new, value)
        step = np.where(up, 1.5, 0.4) * step
    return x, value


def _error(field: Field, truth: Field, x: Array) -> tuple[Array, Array]:
    (a, Ja), (b, Jb) = field(x), truth(x)
    return row_norms(a - b), np.einsum("me,med->md", a - b, Ja - Jb)


def _expected(
    attention: AttentionMap, law: Law, radii: Array, rng: np.random.Generator
) -> tuple[Array | None, Array | None]:
    """The largest variance of the logits on each ball, and the largest constant of the central limit theorem found."""
    if not (isinstance(attention, SoftmaxAttention) and isinstance(law, GaussianMeasure)):
        return None, None
    root, d = psd_sqrt(law.cov), law.dim
    M = root @ attention.A
    c = np.zeros(d) if attention.bias is None else root @ attention.bias
    V = attention.V @ root
    fixed, turned = float(np.sum(V**2)), V.T
    spreads, constants = np.empty(len(radii)), np.empty(len(radii))
    starts = np.concatenate([np.linalg.svd(M)[2], rng.standard_normal((POINTS, d))])
    starts = np.concatenate([starts, -starts])
    for i, R in enumerate(radii):
        x = R * starts / np.linalg.norm(starts, axis=1, keepdims=True)
        for _ in range(CLIMBS):  # of a convex function: the far end of the slope is no lower
            slope = (x @ M.T + c) @ M
            size = np.linalg.norm(slope, axis=1, keepdims=True)
            x = np.where(size > 0.0, R * slope / np.where(size > 0.0, size, 1.0), x)
        h = x @ M.T + c  # root Sigma times g
        s = np.sum(h**2, axis=1)
        spreads[i] = s.max()
        with np.errstate(over="ignore"):
            constants[i] = np.exp(0.5 * s + 0.5 * np.log(fixed + np.sum((h @ turned) ** 2, axis=1) + 1e-300)).max()
    return spreads, constants
