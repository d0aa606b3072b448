"""What ball and interval arithmetic proves: every theorem and relaxation, ordinary inputs and those that cancel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar

pytest.importorskip("flint", reason="python-flint is needed for rigorous proofs")

from proven_bounds import closed_forms, evaluated_once, float_only, relaxed, searched

from otattn import bounds
from otattn.attention import L2Attention, LinearAttention, MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.lipschitz import certificate, relaxations
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.cells import maximise
from otattn.lipschitz.theorem import THEOREMS
from otattn.measures import Ball, Box, DiscreteMeasure, Ellipsoid, PointSet

FORMS, RELAXED, SEARCHED = closed_forms(), relaxed(), searched()
FIRST = {name.split("-")[0]: name for name in reversed(FORMS)}
PROVED = {t.key for t in THEOREMS.values() if t.closed and t.kind == "upper"}
QUICK = {name for i, name in enumerate(FORMS) if i % 12 == 0 and not name.endswith("-200")} | set(FIRST.values())
QUICK |= {name for name in RELAXED if "ball" in name or name.endswith(("box", "plane", "simplex")) or "multi" in name}
BRIEF = ("two_tokens-plain-Ball", "mean_field-plain-Ball-inf")
CASES = [
    pytest.param(name, make, id=name, marks=() if name in QUICK or name in BRIEF else pytest.mark.slow)
    for catalogue in (FORMS, RELAXED, SEARCHED)
    for name, make in catalogue.items()
]


def names(bound: Bound) -> str:
    return getattr(bound, "relaxation", bound.theorem)


def test_every_theorem_and_every_relaxation_is_among_the_cases() -> None:
    tried = {name.split("-")[0] for name in (*FORMS, *float_only())}
    assert tried >= PROVED
    cheap = [name for name in RELAXED if name.startswith(("field", "kappa", "inter", "multi")) or "plain-ball" in name]
    made = {names(RELAXED[name]()) for name in cheap}
    made |= {name.split("-")[0] for name in (*SEARCHED, *float_only())}
    assert made >= set(certificate._DUAL_FUNCTIONS)


def test_quick_cases_hold_every_closed_form_with_an_exact_evaluation() -> None:
    assert set(FIRST) == {key for key in PROVED if THEOREMS[key].rigorous}


@pytest.mark.parametrize(("name", "make"), CASES)
def test_the_value_is_proved_and_a_smaller_one_is_not(name: str, make: object) -> None:
    bound = make()
    with evaluated_once():
        proved = bound.rigorous_value()
        assert proved <= bound.value <= proved * (1 + 1e-9)
        assert bound.verify()
        assert bound.verify(rigorous=True)
        small = replace(bound, value=bound.value * (1 - 1e-6))
        assert not small.verify()
        assert not small.verify(rigorous=True)


@pytest.mark.parametrize("name", float_only())
def test_what_has_no_exact_evaluation_says_so(name: str) -> None:
    bound = float_only()[name]()
    assert bound.verify()
    assert not replace(bound, value=bound.value * (1 - 1e-6)).verify()
    with pytest.raises(ValueError, match="no rigorous evaluation"):
        bound.verify(rigorous=True)
    with pytest.raises(ValueError, match="no rigorous evaluation"):
        bound.rigorous_value()


# --- values of the formulas in 60 digits


@pytest.fixture(autouse=True)
def _sixty_digits() -> Iterator[None]:
    with mp.workdps(60):
        yield


def precise(x: np.ndarray) -> mp.matrix:
    return mp.matrix([[mp.mpf(float(t)) for t in row] for row in np.atleast_2d(x)])


def largest_singular(M: mp.matrix) -> mp.mpf:
    gram = M.T * M if M.rows >= M.cols else M * M.T
    return mp.sqrt(max(mp.eigsy(gram, eigvals_only=True)))


def attained_field(A: np.ndarray, V: np.ndarray) -> mp.mpf:
    """A value of ``|V u| |A^T u|``, u a unit vector of the plane, near the largest."""

    def value(t: float) -> float:
        u = np.array([math.cos(t), math.sin(t)])
        return -float(np.linalg.norm(V @ u) * np.linalg.norm(A.T @ u))

    grid = np.linspace(0.0, math.pi, 2001)
    start = min(grid, key=value)
    t = mp.mpf(
        float(minimize_scalar(value, bounds=(start - 2e-3, start + 2e-3), method="bounded", options={"xatol": 1e-12}).x)
    )
    u = mp.matrix([mp.cos(t), mp.sin(t)])
    return mp.norm(precise(V) * u) * mp.norm(precise(A).T * u)


def attained_exponent(A: np.ndarray) -> mp.mpf:
    """A value of ``<A x, y - x>`` on the unit disc, near the largest."""

    def negative(x: np.ndarray) -> float:
        x = x / max(1.0, float(np.linalg.norm(x)))
        return -float(np.linalg.norm(A @ x) - x @ A @ x)

    starts = np.random.default_rng(0).standard_normal((20, 2))
    found = [minimize(negative, x, method="Nelder-Mead", options={"xatol": 1e-11, "fatol": 1e-15}) for x in starts]
    x = min(found, key=lambda r: r.fun).x
    z = mp.matrix([mp.mpf(float(t)) for t in x])
    z = z / max(mp.mpf(1), mp.norm(z))
    g = precise(A) * z
    return mp.norm(g) - (g.T * z)[0]


@pytest.mark.parametrize("seed", range(6))
def test_formulas_in_sixty_digits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    A, V = rng.standard_normal((2, 2)), rng.standard_normal((rng.integers(1, 4), 2))
    head, n = SoftmaxAttention(A, V), 5
    sigma, kappa = attained_field(A, V), attained_exponent(A)
    v, t = largest_singular(precise(V)), largest_singular(precise(A))
    phi = mp.sqrt((1 + (t + 1 / (4 * t)) ** 2) / 2) if t > 0.5 else mp.mpf(1)
    alpha, beta = n * (v * phi) ** 2 + 2 * mp.sqrt(2) * v * phi * sigma, 2 * v * phi * sigma * mp.sqrt(n - 2)
    for bound, exact, room in (
        (bounds.field_bound(head, radius=1.0), sigma, 1e-10),
        (relaxations.field_certificate(head, domain=Ball(1.0)), sigma, 1e-10),
        (relaxations.column_exponent(head, domain=Ball(1.0)), kappa, 1e-8),
        (bounds.column_sum(head, radius=1.0), mp.exp(kappa), 1e-8),
        (bounds.column_bound(head, radius=1.0), sigma + mp.exp(kappa / 2) * v * mp.sqrt(1 + t**2), 1e-8),
        (bounds.column_bound(head, radius=1.0, p=math.inf), sigma + v * mp.sqrt(1 + t**2), 1e-10),
        (bounds.row_bound(head, radius=1.0, n=n), mp.sqrt(sigma**2 + (alpha + mp.sqrt(alpha**2 + beta**2)) / 2), 1e-10),
    ):
        # the reference attains the suprema inside, so the proved number is never below it
        assert exact <= mp.mpf(bound.rigorous_value()) <= exact * (1 + mp.mpf(room)), bound


# --- inputs whose preliminaries cancel, underflow or overflow


@pytest.mark.parametrize("b", [3e5, 3e11])
def test_a_bias_that_cancels_the_centre(b: float) -> None:
    alpha = 0.1
    bias = -float(alpha * b)
    head, domain = SoftmaxAttention(alpha * np.eye(2), np.eye(2), bias=[0.0, bias]), Ellipsoid(np.eye(2), [0.0, b])
    left = Fraction(alpha) * Fraction(b) + Fraction(bias)
    assert left != 0
    c = mp.mpf(left.numerator) / left.denominator
    G = mp.mpf(alpha) + abs(c)
    exact = mp.mpf(alpha) + mp.sqrt(1 + G**2)
    bound = bounds.column_bound(head, domain=domain, p=math.inf)
    assert exact <= mp.mpf(bound.rigorous_value()) <= exact * (1 + mp.mpf(10) ** -9)
    assert exact <= mp.mpf(bound.value)
    assert bound.verify(rigorous=True)
    # <A x + c, y - x> at x = t c/|c|, y = c/|c|
    s = abs(c) / 2 / mp.mpf(alpha)
    best = max((mp.mpf(alpha) * t + abs(c)) * (1 - t) for t in (mp.mpf("0.5") - s, mp.mpf("0.49")))
    for function in (bounds.column_sum, lambda a, domain: relaxations.column_exponent(a, domain=domain)):
        found = function(head, domain=domain)
        value = (
            mp.log(mp.mpf(found.rigorous_value())) if found.quantity == "column_sum" else mp.mpf(found.rigorous_value())
        )
        assert best <= value * (1 + mp.mpf(10) ** -15)
        assert found.verify(rigorous=True)


def test_a_bias_that_cancels_in_floats_only() -> None:
    """``A b + c`` is 0 in float64 and not in exact arithmetic, so that the pole of the dual is closer than a rounding."""
    A = np.array([[-1.33957479, 1.81307585], [2.11990948, 0.07465251]])
    center = np.array([0.79050652, -0.05196437])
    head, domain = SoftmaxAttention(A, np.eye(2), bias=-(A @ center)), Ellipsoid([[-0.70663485], [0.30264687]], center)
    for bound in (relaxations.column_exponent(head, domain=domain), relaxations.self_entropy(head, domain=domain, n=3)):
        assert bound.verify(rigorous=True)
        assert bound.rigorous_value() <= bound.value <= bound.rigorous_value() * (1 + 1e-9)


def test_values_that_cancel_on_a_line() -> None:
    head = SoftmaxAttention(1e25 * np.ones((3, 3)), [[1.0, 2.0**-54, -1.0]])
    domain = Ellipsoid(np.ones((3, 1)), np.zeros(3))
    exact = 3 * mp.sqrt(3) * mp.mpf(1e25) * mp.mpf(2) ** -54
    assert 2.8e9 < exact < 2.9e9
    for bound in (
        bounds.field_bound(head, domain=domain),
        bounds.column_bound(head, domain=domain, p=math.inf),
        relaxations.field_certificate(head, domain=domain),
    ):
        assert exact <= mp.mpf(bound.value)
        assert exact <= mp.mpf(bound.rigorous_value())
        assert bound.verify(rigorous=True)
        assert not replace(bound, value=2.8e9).verify(rigorous=True)


@pytest.mark.parametrize("domain", [Ball(1e30), Box([-1e30] * 2, [1e30] * 2), PointSet([[1e30, 0.0], [-1e30, 0.0]])])
def test_products_of_tiny_and_huge_numbers(domain: object) -> None:
    head = SoftmaxAttention(1e-150 * np.eye(2), 1e-175 * np.eye(2))
    exact = mp.mpf(1e-150) * mp.mpf(1e-175) * mp.mpf(1e30) ** 2
    for bound in (bounds.field_bound(head, domain=domain), relaxations.field_certificate(head, domain=domain)):
        assert exact <= mp.mpf(bound.rigorous_value()) <= 4 * exact
        assert exact <= mp.mpf(bound.value)
        assert bound.verify(rigorous=True)


@pytest.mark.parametrize("radius", [1e-30, 1e30])
@pytest.mark.parametrize("kind", ["ball", "ellipsoid", "points"])
def test_what_underflows_is_not_zero(radius: float, kind: str) -> None:
    head = SoftmaxAttention(1e-200 * np.eye(2), 1e-200 * np.eye(2))
    domain = {
        "ball": Ball(radius),
        "ellipsoid": Ellipsoid(radius * np.eye(2), [radius, 0.0]),
        "points": PointSet([[radius, 0.0], [0.0, radius]]),
    }[kind]
    for bound in (
        bounds.field_bound(head, domain=domain),
        relaxations.field_certificate(head, domain=domain),
        relaxations.column_exponent(head, domain=domain),
        relaxations.self_entropy(head, domain=domain, n=3),
    ):
        assert bound.value > 0.0
        assert bound.rigorous_value() > 0.0
    simplex = relaxations.interval_simplex([[0.0], [1e-170]], [0.0, 0.0], [1.0, 1.0])
    assert simplex.value > 0.0
    assert simplex.rigorous_value() > 0.0


@pytest.mark.parametrize(
    "domain",
    [
        Ellipsoid([[0.5], [0.01], [50.0]]),
        Box([-0.5, -0.01, -50.0], [0.5, 0.01, 50.0]),
        PointSet([[0.5, 0.0, 50.0], [-0.5, 0.0, -50.0], [0.1, 0.01, 3.0]]),
    ],
    ids=["ellipsoid", "box", "points"],
)
def test_identity_values_see_what_a_low_rank_form_does_not(domain: object) -> None:
    """Half of the mass at either of two tokens far apart outside the span of A: ``V C A`` has norm 25 there."""
    head = SoftmaxAttention.from_qkv([[1.0, 0.0, 0.0]], [[1.0, 0.1, 0.0]], np.eye(3), scale=1.0)
    apart = np.array([[0.5, 0.0, 50.0], [-0.5, 0.0, -50.0]])
    spread = np.cov(apart.T, bias=True)
    attained = float(np.linalg.norm(spread @ head.A, 2))
    assert attained > 24.9
    for bound in (
        bounds.field_bound(head, domain=domain),
        bounds.column_bound(head, domain=domain, p=math.inf),
        bounds.row_bound(head, domain=domain, n=4),
        bounds.multi_head(MultiHeadAttention([head]), domain=domain, n=4),
        relaxations.field_certificate(head, domain=domain),
        relaxations.mean_field(head, domain=domain, p=math.inf),
    ):
        assert bound.value >= attained
        assert bound.rigorous_value() >= attained
        assert bound.verify(rigorous=True)


def test_outputs_see_what_a_low_rank_form_does_not() -> None:
    head = SoftmaxAttention.from_qkv([[1.0, 0.0, 0.0, 0.0]], [[1.0, 0.1, 0.0, 0.0]], np.eye(4), scale=1.0)
    W = np.diag([0.0, 0.0, 0.0, 5.0])
    bound = bounds.multi_head(MultiHeadAttention([head], outputs=[W]), radius=1.0, n=3)
    # all tokens moved alike by the last direction move the image by 5
    assert bound.value >= 5.0
    assert bound.verify(rigorous=True)
    assert bound.value <= bound.rigorous_value() * (1 + 1e-9)


def test_a_cover_that_misses_nothing() -> None:
    """The maximum of a spike that floats can miss, of width 1e-13, is found as long as its box is bounded rightly."""
    at = 0.3

    def bound(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
        return np.where((lo[0] <= at) & (at <= hi[0]), 1.0 + hi[0] - lo[0], 0.0)

    edges = np.linspace(0.0, 1.0, 8)
    found = maximise(bound, edges[None, :-1], edges[None, 1:], tol=0.0, max_cells=10_000, floor=1.0)
    assert 1.0 <= found.value < 1.0 + 1e-9


@pytest.mark.parametrize("domain", [Ball(1.0), Box([-1.0] * 4, [0.5] * 4), Ellipsoid(np.eye(4), np.ones(4))])
def test_zero_values_have_the_constant_zero(domain: object) -> None:
    dense, factored = (
        SoftmaxAttention(np.eye(4), np.zeros((1, 4))),
        SoftmaxAttention.from_qkv([[1.0, 2.0, 0.0, 1.0]], [[0.0, 1.0, 1.0, 3.0]], np.zeros((1, 4))),
    )
    for head in (dense, factored):
        masked = MaskedAttention(head)
        for bound in (
            bounds.field_bound(head, domain=domain),
            bounds.column_bound(head, domain=domain),
            bounds.density_bound(head, domain=domain),
            bounds.row_bound(head, domain=domain, n=3),
            bounds.masked_row_bound(masked, domain=domain, n=3),
            bounds.masked_column_bound(masked, domain=domain, n=3),
            bounds.masked_average_bound(masked, domain=domain),
            bounds.multi_head(MultiHeadAttention([head, head]), domain=domain),
            bounds.geshkovski2024_mean_field(head, radius=1.0),
            bounds.castin2024_discrete(head, radius=1.0, n=3),
            bounds.pointwise_bound(LinearAttention(np.eye(4), np.zeros((1, 4))), domain=domain),
            bounds.l2_column_bound(L2Attention(np.eye(4), np.eye(4), np.zeros((1, 4))), domain=domain),
        ):
            assert bound.rigorous_value() == 0.0
            # a product that was rounded on the way is not known to be zero
            assert 0.0 <= bound.value < 1e-300
            assert bound.verify(rigorous=True)


def test_local_measures_are_not_domains() -> None:
    bound = bounds.column_bound(SoftmaxAttention([[1.0]], [[1.0]]), radius=1.0)
    assert not replace(bound, domain=DiscreteMeasure([[0.0], [1.0]])).verify()
    assert not replace(bound, domain=DiscreteMeasure([[0.0], [1.0]])).verify(rigorous=True)
