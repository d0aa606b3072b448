"""Tied L2 attention on all of R^d: the three constants of its proof against configurations, and the bound against climbs."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

import otattn as oa
from otattn.lipschitz import bounds
from otattn.lipschitz.arithmetic.intervals import Interval, lower, upper

COUNTS = (2, 3, 4, 5, 8, 17, 64, 10**3, 10**6, 10**12)


def tied(n: int, p: float = 2.0) -> oa.Bound:
    return bounds.l2_tied_bound(oa.L2Attention(np.eye(2), np.eye(2), np.eye(2)), n=n, p=p)


def constants(X: np.ndarray) -> tuple[float, float, float]:
    """Largest row ``sum_j P_ij b_j b_j^T``, column sum, and eigenvalue of a row's covariance."""
    D = X[None] - X[:, None]
    k = np.exp(-np.square(D).sum(axis=2))
    P = k / k.sum(axis=1, keepdims=True)
    Y = X[None] - (P @ X)[:, None]
    B = np.eye(X.shape[1]) - 2.0 * np.einsum("ija,ijb->ijab", Y, D)
    rows = np.einsum("ij,ijab,ijcb->iac", P, B, B)
    C = np.einsum("ij,ija,ijb->iab", P, Y, Y)
    return (
        float(np.linalg.eigvalsh(rows)[:, -1].max()) ** 0.5,
        float(P.sum(axis=0).max()),
        float(np.linalg.eigvalsh(C)[:, -1].max()),
    )


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_the_constants_of_the_proof_survive_climbs(n: int) -> None:
    rng = np.random.default_rng(n)
    allowed = tuple(tied(n).details[key] for key in ("row", "column_sum", "variance"))
    best = np.zeros(3)
    for trial in range(12):
        d = int(rng.integers(1, 4))
        start = (rng.uniform(0.3, 2.5) * rng.standard_normal((n, d))).ravel()
        part = trial % 3
        found = minimize(
            lambda x, part=part, d=d: -constants(x.reshape(n, d))[part],
            start,
            method="Nelder-Mead",
            options={"maxiter": 150},
        )
        best = np.maximum(best, constants(found.x.reshape(n, d)))
    assert (best <= np.array(allowed) * (1.0 + 1e-12)).all()
    assert best[1] > 0.7 * allowed[1]


@pytest.mark.parametrize("others", [2, 8, 40])
def test_the_row_is_attained_by_two_heaps(others: int) -> None:
    """Half of the others at ``+-r u``: the row constant and the variance, each at its own r."""
    n = others + 1
    allowed = tied(n).details
    found = np.array(
        [
            constants(np.r_[0.0, np.full(others // 2, r), np.full(others // 2, -r)][:, None])
            for r in np.sqrt(np.linspace(1.0, 5.0, 1001))
        ]
    ).max(axis=0)
    assert allowed["row"] * (1.0 - 1e-4) < found[0] <= allowed["row"]
    assert allowed["variance"] * (1.0 - 1e-4) < found[2] <= allowed["variance"]


@pytest.mark.parametrize("n", [3, 5, 9])
def test_the_constant_of_one_row_is_exact(n: int) -> None:
    """p = inf: the derivative of the middle token, summed over directions that all align, at two heaps."""
    bound, best = tied(n, math.inf), 0.0
    for r in np.sqrt(np.linspace(1.0, 4.0, 601)):
        X = np.r_[0.0, np.full(n // 2, r), np.full(n // 2, -r)][:, None]
        J = oa.L2Attention([[1.0]], [[1.0]], [[1.0]]).jacobian(X).to_dense()
        best = max(best, float(np.abs(J).sum(axis=1).max()))
    assert bound.value * (1.0 - 1e-5) < best <= bound.value
    masked = oa.MaskedAttention(oa.L2Attention(np.eye(2), np.eye(2), np.eye(2)))
    assert bounds.l2_tied_bound(masked, n=n, p=math.inf).value == bound.value


def test_the_inequality_of_one_row() -> None:
    """``kappa (h - R) <= R - 1 + 4 m^2`` at random r, s, m."""
    rng = np.random.default_rng(0)
    for n in COUNTS:
        R = tied(n, math.inf).value
        r = rng.uniform(0.0, 6.0, 20_000) * rng.choice([0.3, 1.0], 20_000)
        s = r * np.clip(rng.uniform(-1.2, 1.2, 20_000), -1.0, 1.0)
        m = rng.uniform(0.0, 4.0, 20_000) * rng.choice([0.1, 1.0], 20_000)
        sigma = s - m
        b = np.sqrt(np.maximum(1.0 - 4.0 * m * sigma + 4.0 * np.square(sigma) * (np.square(r) - 1.0), 0.0))
        h = b + 2.0 * np.abs(sigma) * r + 4.0 * m * s - 4.0 * np.square(m)
        assert ((n - 1) * np.exp(-np.square(r)) * (h - R) <= R - 1.0 + 4.0 * np.square(m)).all(), n


def test_the_inequality_of_the_rows() -> None:
    """The last display of the proof, in intervals over cells of ``x = r^2``, for many n."""
    for n in COUNTS:
        w = tied(n).details["row"] ** 2 - 1.0
        t = (12.0 + math.sqrt(144.0 - 16.0 * (4.0 - w))) / 8.0
        edges = np.linspace(0.0, t + 60.0, 60_001)
        edges = edges[np.abs(edges - t) > 0.2]  # around t both sides meet to second order
        keep = np.diff(edges) < 0.01
        x = Interval.between(edges[:-1][keep], edges[1:][keep])
        kappa = np.exp(np.log(float(n - 1)) - x)
        E = (2.0 * t - 1.0) * (1.0 + kappa) - kappa * x
        assert (lower(E) > 0.0).all()
        gap = w * (1.0 + kappa) - 4.0 * kappa * x * np.maximum(x - 1.0, 0.0)
        bent = 4.0 * (kappa / E) * kappa * x * np.square(t - x)
        assert (upper(bent) <= lower(gap)).all(), n
        y = np.linspace(-0.2, 0.2, 401)
        y = y[np.abs(y) > 1e-3]
        kappa = (n - 1) * np.exp(-(t + y))
        left = (2.0 * t - 1.0) * (np.expm1(y) - y) - y**2
        assert (left > y**2 * kappa * (t + y) / ((2.0 * t - 1.0) * (1.0 + kappa) - kappa * (t + y))).all(), n


def hubs(N: int) -> tuple[float, int, int]:
    """A lower bound of the constant for W_2: hubs at 0, N satellites at ``v_0 + rho v_i``; the number of tokens, and of hubs."""
    rho = math.sqrt(0.5 * math.log(5 * N))
    m = max(1, round(0.5 * math.exp(1.0 + rho * rho)))
    hub, other = m * math.exp(-1.0 - rho * rho), math.exp(-2.0 * rho * rho)
    Z = 1.0 + (N - 1) * other + hub
    along, across = (
        (1.0 + (N - 1) * other) / Z,
        rho * math.sqrt(1.0 + (N - 1) * other**2) / Z,
    )  # of the satellite's mean
    moved = (hub / Z) * math.hypot(1.0 - 2.0 * along, 2.0 * across)
    return math.sqrt(N / m) * moved, N + m, m


def test_the_order_is_that_of_the_constant() -> None:
    N = 20
    value, n, m = hubs(N)
    X = np.zeros((n, N + 1))
    X[m:, 0], X[m:, 1:] = 1.0, math.sqrt(0.5 * math.log(5 * N)) * np.eye(N)
    e = np.zeros((n, N + 1))
    e[:m, 0] = 1.0 / math.sqrt(m)
    J = oa.L2Attention(np.eye(N + 1), np.eye(N + 1), np.eye(N + 1)).jacobian(X)
    assert np.linalg.norm((J @ e.ravel()).reshape(n, -1)[m:]) == pytest.approx(value, rel=1e-10)
    for exponent in (3, 6, 12, 24, 60):
        value, n, _ = hubs(10**exponent)
        assert value <= tied(n).value <= 16.0 * value


@pytest.mark.parametrize("causal", [False, True])
def test_columns_survive_climbs(causal: bool) -> None:
    """Column sums, and their share beyond a distance along a direction, ``T_n e^{-b^2}``."""
    rng = np.random.default_rng(5)
    head = oa.L2Attention(np.eye(2), np.eye(2), np.eye(2))
    for n in (2, 4, 9):
        whole = oa.MaskedAttention(head) if causal else head
        allowed, best = bounds.l2_tied_bound(whole, n=n).details["column_sum"], 0.0

        def weights(x: np.ndarray, n: int = n) -> np.ndarray:
            D = x.reshape(n, -1)[None] - x.reshape(n, -1)[:, None]
            k = np.exp(-np.square(D).sum(axis=2)) * (np.tri(n) if causal else 1.0)
            return k / k.sum(axis=1, keepdims=True)

        for _ in range(8):
            start = rng.uniform(0.2, 2.0) * rng.standard_normal(n * int(rng.integers(1, 3)))
            x = minimize(
                lambda x: -weights(x).sum(axis=0).max(), start, method="Nelder-Mead", options={"maxiter": 150}
            ).x
            P, s = weights(x), x.reshape(n, -1)[:, 0]
            best = max(best, float(P.sum(axis=0).max()))
            for b in (0.1, 0.5, 1.0, 2.0):
                for sign in (1.0, -1.0):
                    beyond = sign * (s[None] - s[:, None]) >= b
                    assert (P * beyond).sum(axis=0).max() <= allowed * math.exp(-b * b)
        assert 0.6 * allowed < best <= allowed


def test_it_is_far_below_the_published_bound_and_grows_like_the_fourth_root() -> None:
    head = oa.L2Attention(np.eye(2), np.eye(2), np.eye(2))
    for n in COUNTS:
        for p in (2.0, math.inf):
            assert tied(n, p).value < bounds.kim2021_l2(head, n=n, p=p).value
    growth = math.log(tied(10**12).value / tied(10**6).value) / math.log(10**6)
    assert 0.25 < growth < 0.29
    assert tied(1).value == pytest.approx(1.0, rel=1e-10)


def test_the_best_upper_bound_on_a_large_ball_knows_it() -> None:
    head = oa.L2Attention(np.eye(3), np.eye(3), np.eye(3))
    best = oa.lipschitz_upper_bound(head, radius=10.0, n=8)
    assert best.theorem == "l2_tied_bound"
    assert best.value < 2.2 * oa.lipschitz_lower_bound(head, radius=10.0, n=8, rng=0, effort="fast").value


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (3, 3)])
def test_proof_in_balls(shape: tuple[int, int]) -> None:
    pytest.importorskip("flint")
    rng = np.random.default_rng(shape)
    Q = np.round(8.0 * rng.standard_normal(shape)) / 8.0
    M = np.round(8.0 * rng.standard_normal((3, shape[0]))) / 8.0
    bound = bounds.l2_tied_bound(oa.L2Attention(Q, Q, M @ Q), n=6)
    assert bound.verify()
    assert bound.verify(rigorous=True)
    assert bound.value * (1.0 - 1e-9) < bound.rigorous_value() <= bound.value
    false = replace(bound, value=0.99 * bound.value, log_value=bound.log_value - 0.01)
    assert not false.verify()
    assert not false.verify(rigorous=True)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (oa.L2Attention([[1.0]], [[2.0]], [[1.0]]), "tied keys"),
        (oa.L2Attention([[1.0, 0.0]], [[1.0, 0.0]], np.eye(2)), "factor through the queries"),
        (oa.SoftmaxAttention([[1.0]], [[1.0]]), "L2Attention"),
    ],
)
def test_other_maps_are_refused(attention: oa.AttentionMap, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bounds.l2_tied_bound(attention, n=3)


@pytest.mark.parametrize("options", [{"n": None}, {"n": 3, "p": 1.5}, {"n": 3, "radius": 1.0}])
def test_other_statements_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="l2_tied_bound does not apply"):
        bounds.l2_tied_bound(oa.L2Attention([[1.0]], [[1.0]], [[1.0]]), **options)


@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e-30, 1e150])
def test_tiny_and_huge_values_keep_their_digits(size: float) -> None:
    """The square of a tiny norm vanishes: the bound of values of 1e-170 was zero."""
    one, scaled = (oa.L2Attention(np.eye(2), np.eye(2), s * np.eye(2)) for s in (1.0, size))
    for bound in (bounds.l2_tied_bound, bounds.kim2021_l2):
        assert bound(scaled, n=6).value / size == pytest.approx(bound(one, n=6).value, rel=1e-9)


@pytest.mark.parametrize("p", [2.0, 2.5, 7.0, 1e3, math.inf])
def test_every_constant_is_proved(p: float) -> None:
    pytest.importorskip("flint")
    head = oa.L2Attention(np.eye(2), np.eye(2), np.eye(2))
    for n in (1, 2, 64, 10**9):
        for attention in (head, oa.MaskedAttention(head)):
            bound = bounds.l2_tied_bound(attention, n=n, p=p)
            assert bound.value * (1.0 - 1e-9) <= bound.rigorous_value() <= bound.value
