"""The bound of Sinkhorn attention: its formula, where it is sharp, what it does not see, and pairs that climb against it."""

import mpmath as mp
import numpy as np
import pytest

import otattn as oa
from otattn import bounds


def on_ball(a: float, p: float) -> mp.mpf:
    """The formulas of the unit ball for V = I."""
    with mp.workdps(40):
        a = mp.mpf(a)
        plain = a + mp.sqrt(1 + a * a)
        return plain if p == 2 else plain + 2 * a * mp.exp(2 * a * abs(1 - 2 / mp.mpf(p) if p < np.inf else mp.mpf(1)))


@pytest.mark.parametrize("p", [1.0, 1.25, 2.0, 3.0, np.inf])
@pytest.mark.parametrize("a", [1e-9, 0.5, 3.0, 40.0, 1e5])
def test_formula_on_a_ball(a, p):
    """A and V orthogonal up to a factor, radius 2, values 3: the formula times 3."""
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    bound = bounds.sinkhorn_bound(oa.SinkhornAttention(0.25 * a * turn, 3.0 * turn), radius=2.0, p=p)
    exact = mp.log(3 * on_ball(a, p))
    assert 0.0 <= bound.log_value - exact <= 1e-9 * max(1.0, abs(exact))
    assert bound.verify()


def test_two_atoms_nearly_attain_it():
    """``A = a [[0, 1], [1, 0]]``, atoms ``+-e_1`` of mass 1/2: the local constant is ``2 a``."""
    for a in (2.0, 5.0, 10.0):
        attention = oa.SinkhornAttention(a * np.array([[0.0, 1.0], [1.0, 0.0]]), np.eye(2), tol=1e-12)
        local = oa.local_lipschitz(attention, np.array([[1.0, 0.0], [-1.0, 0.0]])).value
        bound = bounds.sinkhorn_bound(attention, radius=1.0).value
        assert local == pytest.approx(2.0 * a, rel=1e-8)
        assert 1.0 < bound / local < (a + np.hypot(1.0, a)) / (2.0 * a) * (1.0 + 1e-9)


def test_a_shift_of_the_domain_changes_nothing():
    """The potentials absorb it, so the bound must not grow with the distance from the origin."""
    rng = np.random.default_rng(3)
    A, V = rng.standard_normal((2, 3, 3))
    attention, E = oa.SinkhornAttention(A, V), np.diag([1.0, 0.5, 0.1])
    for p in (1.0, 2.0, np.inf):
        here, there = (
            bounds.sinkhorn_bound(attention, domain=oa.Ellipsoid(E, centre), p=p).value
            for centre in (np.zeros(3), [1e3, -50.0, 7.0])
        )
        assert there == pytest.approx(here, rel=1e-9)


def test_no_exponential_where_softmax_has_one():
    """Over any measure, ``A = I``, R = 6: softmax attention exceeds what Sinkhorn attention can never do."""
    softmax = oa.lipschitz_lower_bound(oa.SoftmaxAttention(np.eye(2), np.eye(2)), radius=6.0, rng=0).value
    assert bounds.sinkhorn_bound(oa.SinkhornAttention(np.eye(2), np.eye(2)), radius=6.0).value < 0.2 * softmax


def test_one_token_is_linear_and_zero_values_stay_zero():
    attention = oa.SinkhornAttention(np.eye(2), [[3.0, 0.0]])
    assert bounds.sinkhorn_bound(attention, radius=1.0, n=1, p=1.0).value == pytest.approx(3.0, rel=1e-9)
    assert bounds.sinkhorn_bound(oa.SinkhornAttention(np.eye(2), np.zeros((1, 2))), radius=1.0).value == 0.0
    point = oa.PointSet([[1.0, 2.0]])
    assert bounds.sinkhorn_bound(attention, domain=point).value == pytest.approx(3.0, rel=1e-9)


def test_what_it_does_not_cover_is_refused():
    with pytest.raises(ValueError, match="attention must be SinkhornAttention without a mask"):
        bounds.sinkhorn_bound(oa.SoftmaxAttention(np.eye(2), np.eye(2)), radius=1.0)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0, np.inf])
def test_rigorous_on_every_domain(p):
    pytest.importorskip("flint")
    rng = np.random.default_rng(5)
    A, V = rng.standard_normal((3, 3)), rng.standard_normal((2, 3))
    attention = oa.SinkhornAttention(A, V)
    domains = (
        oa.Ball(1.5),
        oa.Ellipsoid(rng.standard_normal((3, 3)), rng.standard_normal(3)),
        oa.Box([-1.0, 0.0, 2.0], [0.5, 0.0, 3.0]),
        oa.PointSet(rng.standard_normal((5, 3))),
    )
    for domain in domains:
        bound = bounds.sinkhorn_bound(attention, domain=domain, p=p)
        proved = bound.rigorous_value()
        assert bound.verify(rigorous=True)
        assert bound.value * (1.0 - 1e-9) <= proved <= bound.value


@pytest.mark.slow
@pytest.mark.parametrize("a", [4.0, 16.0])
def test_rare_far_tokens_are_tried(a: float) -> None:
    """A = I over all measures: atoms at ``+-R e_1`` whose plan has the share p have ``p + 8 a p (1-p) / (1+p)``."""
    p = np.linspace(0.0, 1.0, 10_001)
    known = float((p + 8.0 * a * p * (1.0 - p) / (1.0 + p)).max())
    attention = oa.SinkhornAttention(np.eye(2), np.eye(2))
    found = oa.lipschitz_lower_bound(attention, radius=a**0.5, rng=0, effort="fast").value
    assert 0.98 * known < found <= oa.bounds.sinkhorn_bound(attention, radius=a**0.5).value
