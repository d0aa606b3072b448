"""Lower bounds of rotary heads: the products behind the search, witnesses that anyone can evaluate, and more tokens never worse."""

from itertools import pairwise

import numpy as np
import pytest

import otattn as oa
from otattn.lipschitz.lower.explicit import Layout, search_explicit
from otattn.lipschitz.lower.problem import problem_of
from otattn.lipschitz.lower.rotary import Sequences, reduced


def drawn(seed=0, **options):
    rng = np.random.default_rng(seed)
    Q, K = rng.standard_normal((2, 4, 7))
    return oa.RotaryAttention(Q, K, rng.standard_normal((3, 7)), base=20.0, **options)


SHAPE = np.diag([3.0, 2.0, 1.0, 1.0, 0.7, 0.5, 0.2])


def evaluated(head, X):
    """The norm of the Jacobian of definitions written out: weights by hand, differences in 12 digits of the image."""
    n, s = len(X), 1.0 if head.length is None else head.length / len(X)

    def image(Y):
        out = []
        for i in range(n):
            seen = range(i + 1) if head.masked else range(n)
            logits = np.array([Y[j] @ head.form((i - j) * s) @ Y[i] for j in seen])
            weights = np.exp(logits - logits.max())
            out.append(weights / weights.sum() @ Y[list(seen)] @ head.V.T)
        return np.concatenate(out)

    step = 1e-5
    moves = step * np.eye(X.size).reshape(-1, *X.shape)
    J = np.array([(image(X + e) - image(X - e)) / (2 * step) for e in moves]).T
    return np.linalg.norm(J, 2)


@pytest.mark.parametrize("options", [{}, {"length": 2.0, "query_bias": [0.5, 0, 1, -1]}, {"masked": False}])
def test_products_are_those_of_the_map(options):
    """In reduced coordinates: the Jacobian, its adjoint, and the slope of the bilinear form in the tokens."""
    rng = np.random.default_rng(1)
    head = drawn(key_bias=[0.1, 0.2, -0.3, 0.4], **options)
    problem = reduced(problem_of(head, domain=oa.Ellipsoid(SHAPE, 0.2 * rng.standard_normal(7)), n=5))
    at, chart = Sequences(problem), problem.chart
    z, v, u = (rng.standard_normal((5, m)) for m in (chart.latent_dim, chart.basis.shape[1], 3))
    z *= 0.5 / np.linalg.norm(z, axis=1, keepdims=True)
    J, state = head.jacobian(chart.lift(z)), at.state(z)
    assert at.jvp(state, v) == pytest.approx(J.jvp(v @ chart.basis.T), rel=1e-9, abs=1e-12)
    assert at.vjp(state, u) == pytest.approx(J.vjp(u) @ chart.basis, rel=1e-9, abs=1e-12)
    d, step = rng.standard_normal(z.shape), 1e-6
    slope = sum(sign * np.sum(u * at.jvp(at.state(z + sign * step * d), v)) for sign in (1.0, -1.0)) / (2.0 * step)
    assert np.sum(at.slope(state, u, v) * d) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"length": 9.0}, {"masked": False}])
def test_witness_is_honest(options):
    """It lies in the domain, and the constant there is the value by a Jacobian of differences."""
    head, domain = drawn(**options), oa.Ellipsoid(SHAPE)
    bound = oa.lipschitz_lower_bound(head, domain=domain, n=6)
    X = bound.witness.points
    assert X.shape == (6, 7)
    assert domain.contains(X, tol=1e-12)
    assert evaluated(head, X) == pytest.approx(bound.value, rel=1e-6)


@pytest.mark.parametrize("domain", [oa.LayerNormDomain(np.linspace(0.4, 1.2, 7)), oa.Box(-np.ones(7), np.ones(7))])
def test_spheres_and_boxes(domain):
    """Witnesses stay in them, and what they attain stays below the bound of the ellipsoid around."""
    head = drawn()
    bound = oa.lipschitz_lower_bound(head, domain=domain, n=6)
    assert domain.contains(bound.witness.points, tol=1e-9)
    assert evaluated(head, bound.witness.points) >= bound.value * (1.0 - 1e-6)
    assert 1.0 < bound.value <= oa.lipschitz_upper_bound(head, domain=domain, n=6).value


@pytest.mark.slow
def test_more_tokens_are_never_worse():
    """At powers of two and between them."""
    head, domain = drawn(), oa.Ellipsoid(SHAPE)
    values = [oa.lipschitz_lower_bound(head, domain=domain, n=n).value for n in (1, 2, 3, 5)]
    assert all(b >= a * (1.0 - 1e-7) for a, b in pairwise(values)), values
    assert values[-1] > 1.05 * values[2]


def test_appended_tokens_keep_the_value():
    """The Jacobian of a sequence is the leading block of that of a longer one."""
    head, domain = drawn(), oa.Ellipsoid(SHAPE)
    X = oa.lipschitz_lower_bound(head, domain=domain, n=4).witness.points
    short, long = (head.jacobian(Y).to_dense() for Y in (X, np.concatenate([X, X[-1:], X[:1]])))
    assert long[: len(short), : short.shape[1]] == pytest.approx(short, abs=1e-12)


@pytest.mark.slow
def test_it_beats_the_search_on_blocks_of_equal_tokens():
    """What is found by moving blocks of equal tokens alone is less, on the same domain."""
    layout = Layout(problem_of(drawn(), domain=oa.Ellipsoid(SHAPE), n=8), "sequence")
    blocks = layout.witness(*search_explicit(layout, np.random.default_rng(0)))[1]
    assert oa.lipschitz_lower_bound(drawn(), domain=oa.Ellipsoid(SHAPE), n=8).value > 1.05 * blocks
