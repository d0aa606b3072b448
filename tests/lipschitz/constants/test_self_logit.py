"""The regions that rows live in, against dense sampling; the branch and bound that uses them."""

import itertools

import numpy as np
import pytest
from relaxation_attacks import FORMS
from scipy.special import lambertw

from otattn.attention import L2Attention, MaskedAttention, SoftmaxAttention
from otattn.errors import CertificateError
from otattn.lipschitz.constants.cells import HOPELESS, boxes, maximise, proved_below
from otattn.lipschitz.constants.heads import unit_numbers
from otattn.lipschitz.constants.self_logit import SelfLogit, entropy_gap, spread_region
from otattn.measures import Ball, Box, Ellipsoid, PointSet


def sampled(head, count, rng):
    z = rng.standard_normal((count, len(head.A)))
    z *= rng.random((count, 1)) ** (1 / z.shape[1]) / np.linalg.norm(z, axis=1, keepdims=True)
    g = z @ head.A.T + head.c
    return z, np.linalg.norm(z, axis=1), np.linalg.norm(g, axis=1), (g * z).sum(axis=1)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("bias", [0.0, 0.7])
def test_self_logits_are_bounded_from_below_everywhere(name, bias):
    A, V = FORMS[name]
    rng = np.random.default_rng(0)
    head = unit_numbers(SoftmaxAttention(6.0 * A, V, bias=bias * 3.0 * rng.standard_normal(len(A))), 1.0)
    family = SelfLogit.default(head)
    _, r, g, self_logit = sampled(head, 4000, rng)
    assert (g <= head.top).all()
    for nu, lam, const in family.members():
        assert (nu * g**2 - lam * r**2 - const <= self_logit + 1e-12 * (1 + abs(nu)) * head.top**2).all()
    # a cell of (|g|, |z|) around each point
    for width in (0.0, 0.3):
        lower = family.lower(
            np.maximum(g - width, 0), g + width, np.maximum(r - width / 3, 0), np.minimum(r + width / 3, 1)
        )
        assert (lower <= self_logit + 1e-10).all()
        assert (family.lower(g, g) <= self_logit + 1e-10).all()


def test_the_lower_bound_is_sharp_where_it_is_known():
    g = np.linspace(0, 5, 11)
    for sign in (1.0, -1.0):
        head = unit_numbers(SoftmaxAttention(sign * 5.0 * np.eye(3), np.eye(3)), 1.0)
        np.testing.assert_allclose(SelfLogit.default(head).lower(g, g, g / 5, g / 5), sign * g**2 / 5, atol=1e-3)
    # generic 2 x 2: the exact minimum over a fine polar grid (S2 is an exact dual; the family's nu are 4 percent apart)
    A = np.array([[1.0, 0.6], [-0.4, 0.3]])
    head = unit_numbers(SoftmaxAttention(A, np.eye(2)), 1.0)
    angle, radius = np.meshgrid(np.linspace(0, np.pi, 2001), np.linspace(0, 1, 401))
    z = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1, 2)
    size, value = np.linalg.norm(z @ A.T, axis=1), np.einsum("ki,ij,kj->k", z, A.T, z)
    for level in (0.2, 0.5, 0.8):
        near = np.abs(size - level) < 2e-3
        found = SelfLogit.default(head).lower(np.array([level]), np.array([level]))[0]
        assert found == pytest.approx(value[near].min(), abs=0.01)


@pytest.mark.parametrize("n", [2, 3, 8, 100, 10**6])
def test_entropy_gap_is_the_maximum_it_stands_for(n):
    tau = entropy_gap(n)
    assert tau == pytest.approx(float(lambertw((n - 1) / np.e).real), rel=1e-12)
    s = np.linspace(-60, 60, 200001)
    brute = (s + np.log(n - 1)) / (1 + np.exp(s))
    assert brute.max() <= tau
    assert brute.max() == pytest.approx(tau, rel=1e-6)
    assert entropy_gap(1) == 0.0


@pytest.mark.parametrize("name", FORMS)
def test_every_row_lies_in_the_region(name):
    A, V = FORMS[name]
    rng = np.random.default_rng(1)
    for n, a, bias in ((1, 3.0, 0.0), (2, 8.0, 0.0), (5, 20.0, 1.0), (30, 60.0, 0.0)):
        attention = SoftmaxAttention(a * A, V, bias=bias * rng.standard_normal(len(A)))
        head = unit_numbers(attention, 1.0)
        gamma, spread = spread_region(head, n, SelfLogit.default(head), np.linspace(0, 1, 101))
        for _ in range(15):
            X = sampled(head, n, rng)[0]
            if rng.random() < 0.5:  # tokens on the sphere
                X /= np.linalg.norm(X, axis=1, keepdims=True)
            G = X @ head.A.T + head.c
            L = G @ X.T
            P = np.exp(L - L.max(axis=1, keepdims=True))
            P /= P.sum(axis=1, keepdims=True)
            trace = P @ (X**2).sum(axis=1) - ((P @ X) ** 2).sum(axis=1)
            allowed = (np.linalg.norm(G, axis=1)[:, None] <= gamma) & (trace[:, None] <= spread + 1e-13)
            assert allowed.any(axis=1).all()


def test_the_region_of_the_identity_closes_and_that_of_its_negative_does_not():
    edges = np.linspace(0, 1, 201)
    head = unit_numbers(SoftmaxAttention(100 * np.eye(2), np.eye(2)), 1.0)
    gamma, spread = spread_region(head, 8, SelfLogit.default(head), edges)
    # |g|^2 lam = a^2 (r^2 - (r^2 - tau/a)^2), at most a^2 / 4 + a tau; the cells cost a few percent
    assert (gamma**2 * spread).max() == pytest.approx(100**2 / 4 + 100 * entropy_gap(8), rel=0.05)
    head = unit_numbers(SoftmaxAttention(-100 * np.eye(2), np.eye(2)), 1.0)
    gamma, spread = spread_region(head, 8, SelfLogit.default(head), edges)
    assert gamma.size == 1
    assert spread[0] == 1.0


def test_finer_edges_never_loosen_the_region():
    head = unit_numbers(SoftmaxAttention(30 * FORMS["generic"][0], np.eye(3)), 1.0)
    family = SelfLogit.default(head)
    g = np.linspace(0, head.top, 300)

    def frontier(cells):
        gamma, spread = spread_region(head, 8, family, np.linspace(0, 1, cells + 1))
        return np.array([spread[gamma >= x].max() for x in g])

    coarse, middle, fine = (frontier(k) for k in (10, 20, 40))
    assert (fine <= middle + 1e-12).all()
    assert (middle <= coarse + 1e-12).all()


def test_units_are_those_of_the_ball():
    A, V = FORMS["generic"]
    one = unit_numbers(SoftmaxAttention(3 * A, V), 2.0)
    other = unit_numbers(SoftmaxAttention(3e6 * A, V * 1e-6), 2e-3)
    assert one.a == pytest.approx(12.0)
    np.testing.assert_allclose(one.A, other.A, rtol=1e-12)
    assert other.sigma == pytest.approx(one.sigma * 1e-6, rel=1e-9)
    assert one.trace_sigma <= one.v * one.a


@pytest.mark.parametrize("kind", ["ellipsoid", "box", "points"])
def test_other_domains_are_centred(kind):
    rng = np.random.default_rng(2)
    A, _ = FORMS["generic"]
    attention = SoftmaxAttention(A, np.eye(3), bias=[0.1, 0.0, -0.2])
    domain = {
        "ellipsoid": Ellipsoid(rng.standard_normal((3, 2)), [1.0, 2.0, 0.0]),
        "box": Box([0.0, 1.0, 2.0], [1.0, 3.0, 2.5]),
        "points": PointSet(rng.standard_normal((6, 3)) + 4.0),
    }[kind]
    head = unit_numbers(attention, domain)
    X = domain.sample(50, rng)
    assert np.linalg.norm((X @ A.T + attention.bias), axis=1).max() > 0
    # softmax rows seen from the unit ball: the same attention matrix
    center = {"ellipsoid": lambda: domain.center, "box": lambda: domain.center}.get(kind)
    if center is not None:
        b = center()
        R = np.sqrt(head.a / np.linalg.norm(A, 2))
        z = (X - b) / R
        assert np.linalg.norm(z, axis=1).max() <= 1 + 1e-12
        ours, true = (z @ head.A.T + head.c) @ z.T, (X @ A.T + attention.bias) @ X.T
        softmax = [np.exp(L - L.max(axis=1, keepdims=True)) for L in (ours, true)]
        P, Q = (M / M.sum(axis=1, keepdims=True) for M in softmax)
        np.testing.assert_allclose(P, Q, atol=1e-12)
        assert np.linalg.norm(z @ head.A.T + head.c, axis=1).max() <= head.top


@pytest.mark.parametrize(
    ("attention", "domain"),
    [
        (MaskedAttention(SoftmaxAttention(np.eye(2), np.eye(2))), Ball(1.0)),
        (L2Attention(np.eye(2), np.eye(2), np.eye(2)), Ball(1.0)),
        (SoftmaxAttention(np.eye(2), np.eye(2)), Ball(1.0, 3)),
        (SoftmaxAttention(np.eye(2), np.eye(2)), -1.0),
    ],
)
def test_what_has_no_region_is_refused(attention, domain):
    with pytest.raises(ValueError, match="must"):
        unit_numbers(attention, domain)


def test_tampered_multipliers_are_refused():
    head = unit_numbers(SoftmaxAttention(np.eye(2), np.eye(2), bias=[1.0, 0.0]), 1.0)
    with pytest.raises(CertificateError, match="gap"):
        SelfLogit.of(head, {"nu": np.ones(2), "gap": np.array([0.1, -0.1])})
    with pytest.raises(CertificateError, match="nu"):
        SelfLogit.of(head, {"nu": np.array([np.nan]), "gap": np.zeros(1)})
    with pytest.raises(ValueError, match="edges"):
        spread_region(head, 3, SelfLogit.default(head), np.array([0.0, 0.5]))


def test_branch_and_bound_finds_a_known_maximum():
    def bound(lo, hi):  # -(x - 0.3)^2 - (y + 0.2)^2 by corners
        gap = np.maximum(0, np.maximum(lo - [[0.3], [-0.2]], [[0.3], [-0.2]] - hi))
        return -(gap**2).sum(axis=0)

    start = boxes(np.linspace(-1, 1, 4), np.linspace(-1, 1, 4))
    found = maximise(bound, *start, tol=1e-6, max_cells=10_000)
    assert 0.0 <= found.value <= 1e-6
    assert found.seen <= found.value

    def loose(lo, hi):
        return bound(lo, hi) + (hi - lo).sum(axis=0)

    values = [maximise(loose, *start, tol=0.0, max_cells=k).value for k in (20, 100, 500, 2500)]
    assert all(a >= b for a, b in itertools.pairwise(values))
    assert values[-1] >= 0.0


def test_rechecks_prove_their_target_or_give_up_early_at_a_bound_that_holds():
    count = []

    def parabola(lo, hi):  # 1 - x^2 within a box, plus its width: at least the maximum 1 in the box that holds 0
        count.append(lo.shape[1])
        return 1.0 - np.maximum(0.0, np.maximum(lo[0], -hi[0])) ** 2 + (hi[0] - lo[0])

    start = boxes(np.linspace(-1.0, 1.0, 4))
    for target in (1.001, 1.3, 1.65):
        # provable: a box of width w around 0 is bounded by 1 + w
        assert target <= proved_below(parabola, *start, target=target, max_cells=10**6) <= target + 1e-11
    for target in (0.99, 0.96):
        # false by less than what is given up: every box is tried, the bound ends near the maximum
        assert 1.0 <= proved_below(parabola, *start, target=target, max_cells=300) <= 1.0 + 0.2
    count.clear()
    for target in (1.0 - 2 * HOPELESS, 0.0, -50.0):
        assert 1.0 <= proved_below(parabola, *start, target=target, max_cells=10**9) <= 5 / 3 + 1e-12
    assert sum(count) < 50


def test_rechecks_of_false_targets_end_near_the_maximum_although_boxes_round():
    """Each box stays 1e-13 above its points: halving it never brings it to the largest one."""
    count = []

    def smooth(lo, hi):
        count.append(lo.shape[1])
        least = np.maximum(0.0, np.maximum(lo[0], -hi[0]))
        return 1.0 - least**2 + (hi[0] - lo[0]) ** 2 + 1e-13 * (hi[0] > lo[0])

    found = proved_below(smooth, *boxes(np.linspace(-1.0, 1.0, 4)), target=0.99, max_cells=50_000)
    assert 1.0 <= found <= 1.0 + 2e-11
    assert sum(count) < 2_000


def test_branch_and_bound_stops_at_the_floor_and_refuses_nan():
    start = boxes(np.linspace(0, 1, 3))
    found = maximise(lambda lo, hi: hi[0] - lo[0] - 5.0, *start, tol=0.0, max_cells=10**6, floor=-4.0)
    assert found.cells == 2
    assert found.value == -4.5
    with pytest.raises(ValueError, match="nan"):
        maximise(lambda lo, hi: np.full(lo.shape[1], np.nan), *start, tol=0.0, max_cells=10)
