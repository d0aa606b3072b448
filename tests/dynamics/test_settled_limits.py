"""What "settled" means: limits of Gaussian flows against implicit integrations and the algebra of the limit."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from otattn.attention import L2Attention, SinkhornAttention, SoftmaxAttention
from otattn.dynamics import gaussian_limit, limit_rank_histogram
from otattn.dynamics.gaussian_fields import L2Field, SoftmaxField, SumField
from otattn.dynamics.gaussian_settling import follow, rosenbrock_step
from otattn.dynamics.low_rank_flow import low_rank_flow, ranks_by_algebra
from otattn.measures import GaussianMeasure

SLOW_Q = np.array([1.2763, -1.4820, -0.6965])
SLOW_V = np.array([[7.08, 0.35, -0.53], [0.35, 1.14, 1.46], [-0.53, 1.46, 2.01]])
SLOW_START = np.array([[8.10, 4.13, -0.93], [4.13, 8.38, 1.14], [-0.93, 1.14, 1.29]])


def centred(S):
    return GaussianMeasure(np.zeros(len(S)), S)


def radau(A, V, S, times):
    """Covariances at the times: scipy's Radau on the whole factor in ``log(1 + t)``."""
    d = len(S)

    def rate(x, y):
        L = y.reshape(d, d)
        return np.exp(x) * (V @ L @ (L.T @ (A @ L))).ravel()

    x = np.log1p(np.asarray(times, dtype=float))
    start = np.linalg.cholesky(S).ravel()
    out = solve_ivp(rate, (0.0, x[-1]), start, method="Radau", t_eval=x, rtol=1e-8, atol=1e-10)
    assert out.success
    return [L.reshape(d, d) @ L.reshape(d, d).T for L in out.y.T]


def test_slow_decay_is_followed_to_the_end():
    """One eigenvalue of V is 1e-3: the least eigenvalue of the covariance stands still for three decades, then dies."""
    A = -np.outer(SLOW_Q, SLOW_Q)
    early, late = radau(A, SLOW_V, SLOW_START, [1e2, 1e4])
    least = [np.linalg.eigvalsh(S)[0] for S in (early, late)]
    assert least[0] == pytest.approx(0.0783, abs=2e-4)
    assert least[1] == pytest.approx(0.0098, abs=2e-4)
    out = gaussian_limit(SoftmaxAttention(A, SLOW_V), centred(SLOW_START))
    assert (out.kind, out.rank, out.status, out.settled) == ("finite", 2, "followed", True)
    # the one moving column dies, and the constant ones are left: the covariance given q^T x
    across = SLOW_START @ SLOW_Q
    assert np.abs(out.covariance - (SLOW_START - np.outer(across, across) / (SLOW_Q @ across))).max() < 1e-5
    assert np.abs(out.covariance @ SLOW_Q).max() < 1e-5  # the stationary equation: Sigma Q^T = 0
    assert out.trends[0] == pytest.approx(-1.0, abs=0.01)
    assert np.abs(out.trends[1:]).max() < 1e-5


@pytest.mark.parametrize("draws", [12, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("d", [3, 4, 5])
def test_published_law(d, draws):
    """A = -Q^T Q / sqrt(d), V = F^T F: limits are finite of rank ceil(d/2) exactly."""
    study = limit_rank_histogram(dim=d, draws=draws, value="gram", semidefinite=True, rng=d)
    assert (study.symmetric, study.semidefinite) == (True, True)
    assert study.kinds["finite"] == draws
    assert (study.ranks == (d + 1) // 2).all()
    assert study.settled.mean() >= 0.9
    for limit in study.limits:
        if limit.settled:
            w = np.linalg.eigvalsh(limit.covariance)
            assert (w > 1e-9 * w[-1]).sum() == (d + 1) // 2


@pytest.mark.parametrize("d", [3, 4])
def test_published_law_by_its_name(d):
    study = limit_rank_histogram(dim=d, draws=3, law="published", rng=d)
    long = limit_rank_histogram(dim=d, draws=3, value="gram", semidefinite=True, rng=d)
    assert [l.time for l in study.limits] == [l.time for l in long.limits]
    for found in (study, limit_rank_histogram("l2", dim=d, draws=3, law="published", rng=d)):
        assert found.proved == (d + 1) // 2
        assert (found.ranks == found.proved).all()
        assert (found.bounds == found.proved).all()
    assert limit_rank_histogram(dim=d, draws=2, symmetric=True, rng=d).proved is None
    for more in ({"value": "gram"}, {"semidefinite": True}, {"symmetric": True}):
        with pytest.raises(ValueError, match='law must be "published", which says what value'):
            limit_rank_histogram(dim=d, law="published", rng=0, **more)
    with pytest.raises(ValueError, match="law must be"):
        limit_rank_histogram(dim=d, law="gram", rng=0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["softmax", "l2"])
def test_published_law_with_two_heads(variant):
    """Ranks ``d - 2 r``; where a flow was followed to its end, it agrees."""
    study = limit_rank_histogram(variant, dim=3, draws=2, law="published", heads=2, rng=1)
    assert (study.heads, study.proved) == (2, 1)
    assert (study.ranks == 1).all()
    assert all(limit.status in ("followed", "rank_only") for limit in study.limits)
    for limit in study.limits:
        assert limit.eigenvalues[1] < 1e-2 * limit.eigenvalues[2]
    assert "2 heads" in repr(study)


@pytest.mark.slow
@pytest.mark.parametrize("end", [1e3, 1e4])
def test_rank_three_with_indefinite_logits(end):
    """d = 4, indefinite A of rank 2, random V: settled limits of any rank are those of an implicit integration."""
    rng = np.random.default_rng(11)
    seen = []
    while len(seen) < 4:
        K, V, F = rng.standard_normal((2, 4)), rng.standard_normal((4, 4)), rng.standard_normal((4, 4))
        A, S = np.outer(K[0], K[0]) - np.outer(K[1], K[1]), F @ F.T
        out = gaussian_limit(SoftmaxAttention(A, V), centred(S))
        if out.kind != "finite" or not out.settled:
            continue
        before, after = radau(A, V, S, [0.1 * end, end])
        scale = np.abs(after).max()
        assert np.abs(after - before).max() < 1e-6 * scale
        assert np.abs(out.covariance - after).max() < 1e-5 * scale
        left = np.linalg.eigvalsh(after)[: 4 - out.rank]
        assert (left < 1e-9 * scale).all()
        seen.append(out.rank)
    assert 3 in seen


def test_theorem_needs_its_hypotheses():
    A, L = -np.diag([1.0, 1.0, 0.0, 0.0]), np.eye(4)
    turned = np.diag([1.0, 1.0, 1.0, 1.0]) + np.triu(
        np.full((4, 4), 3.0), 1
    )  # V + V^T is indefinite, the spectrum is 1
    assert ranks_by_algebra(SoftmaxField(A, turned), L[None]) == [2]
    assert ranks_by_algebra(SoftmaxField(-A, -turned), L[None]) == [2]
    assert ranks_by_algebra(SoftmaxField(-A, turned), L[None]) == [None]
    assert ranks_by_algebra(SoftmaxField(A, np.diag([1.0, 1.0, 1.0, -1.0])), L[None]) == [None]
    assert ranks_by_algebra(SoftmaxField(A, turned), np.diag([1.0, 1.0, 1.0, 0.0])[None]) == [None]
    assert ranks_by_algebra(SoftmaxField(np.diag([1.0, -1.0, 0.0, 0.0]), turned), L[None]) == [None]
    lines = np.eye(2, 4)
    assert ranks_by_algebra(L2Field(lines, -lines, turned), L[None]) == [2]
    assert ranks_by_algebra(L2Field(lines, lines, -turned), L[None]) == [2]
    assert ranks_by_algebra(L2Field(lines, lines, turned), L[None]) == [None]
    assert ranks_by_algebra(L2Field(lines, -lines[::-1], turned), L[None]) == [None]
    limit = gaussian_limit(L2Attention(lines, -lines, turned), centred(np.eye(4)))
    assert (limit.kind, limit.rank) == ("finite", 2)
    # several heads: the rank of all Q together, and V + V^T must be positive
    other = L2Field(np.eye(1, 4, 2), -np.eye(1, 4, 2), np.eye(4))
    assert ranks_by_algebra(SumField([SoftmaxField(A, np.eye(4)), other], None, None), L[None]) == [1]
    assert ranks_by_algebra(SumField([SoftmaxField(A, np.eye(4))] * 2, None, None), L[None]) == [2]
    assert ranks_by_algebra(SumField([SoftmaxField(A, turned), other], None, None), L[None]) == [None]
    assert ranks_by_algebra(SumField([SoftmaxField(A, np.eye(4)), other], [np.eye(4), -np.eye(4)], None), L[None]) == [
        None
    ]
    out = gaussian_limit(SoftmaxAttention(A, turned), centred(np.eye(4)))
    assert (out.rank, out.status) == (2, "followed")


@pytest.mark.slow
def test_flows_that_turn_do_not_settle():
    """A = I, V skew: ``Sigma' = V Sigma^2 - Sigma^2 V`` turns for ever, with constant eigenvalues."""
    V = np.array([[0.0, -1.0], [1.0, 0.0]])
    out = gaussian_limit(SoftmaxAttention(np.eye(2), V), centred(np.diag([2.0, 1.0])))
    assert not out.settled
    assert out.status == "unsettled"
    assert "unsettled" in repr(out)


def test_too_few_steps_do_not_settle():
    L = np.linalg.cholesky(SLOW_START)[None]
    flow = low_rank_flow(SoftmaxField(-np.outer(SLOW_Q, SLOW_Q), SLOW_V), L)
    assert not follow(flow, max_steps=60).settled.any()
    assert follow(flow).settled.all()


def test_exponential_decay_settles():
    shrinking = gaussian_limit(SinkhornAttention(np.eye(2), -np.eye(2)), centred(np.diag([2.0, 1.0])))
    assert (shrinking.kind, shrinking.status) == ("zero", "followed")
    growing = gaussian_limit(L2Attention(np.diag([2.0, 1.0]), np.eye(2), np.eye(2)), centred(np.eye(2)))
    assert (growing.kind, growing.rank, growing.status) == ("divergent", 1, "followed")
    # c' = -c b, b constant: the off-diagonal entry dies exponentially
    A, V = np.diag([0.0, -1.0]), np.diag([1.0, 0.0])
    plane = gaussian_limit(SoftmaxAttention(A, V), centred(np.array([[1.0, 0.4], [0.4, 0.8]])))
    assert (plane.rank, plane.status) == (2, "followed")
    assert np.allclose(plane.covariance, np.diag([0.8, 0.8]), atol=1e-5)
    # at rest from the start
    still = gaussian_limit(SoftmaxAttention(np.diag([0.0, -1.0]), V), centred(np.diag([1.0, 0.5])))
    assert (still.kind, still.rank, still.settled) == ("finite", 2, True)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_reduced_flow_is_the_flow(normalised, signed):
    """Rates and Jacobians of the columns that move, against the whole field and central differences."""
    rng = np.random.default_rng(5)
    B, d, r, h = 3, 4, 2, 1e-6
    Q, V, L = rng.standard_normal((B, r, d)), rng.standard_normal((B, d, d)), rng.standard_normal((B, d, d))
    K = -Q if signed else rng.standard_normal((B, r, d))
    field = L2Field(Q, K, V) if normalised else SoftmaxField(np.swapaxes(K, 1, 2) @ Q, V)
    flow = low_rank_flow(field, L)
    assert (flow.signs is not None) == signed
    moved = np.concatenate([np.zeros_like(flow.C), flow.rate(flow.N, flow.Y)], axis=2)
    factor = flow.factor(flow.N)
    whole = field.rates(L, np.zeros(B), np.zeros((B, d)), np.zeros(B))[0]
    # dSigma / 2 up to symmetry, which no rotation of the columns changes
    assert np.allclose(moved @ np.swapaxes(factor, 1, 2), whole @ np.swapaxes(L, 1, 2), rtol=1e-7, atol=1e-9)
    J = flow.jacobian(flow.N, flow.Y)
    for j in range(d * r + r * r):
        u = np.zeros(d * r + r * r)
        u[j] = h
        dN, dY = u[: d * r].reshape(d, r), u[d * r :].reshape(r, r)
        slope = (flow.rate(flow.N + dN, flow.Y + dY) - flow.rate(flow.N - dN, flow.Y - dY)) / (2.0 * h)
        assert np.abs(slope.reshape(B, -1) - J[:, :, j]).max() < 1e-7 * np.abs(J).max()


def test_order_and_damping_of_the_implicit_step():
    """``x' = y, y' = -x - x^3``: error of a step ``h^5``, of its estimate ``h^4``; stiff decay is damped to nothing."""
    start = np.array([0.7, -0.4])

    def field(x):
        return np.stack([x[..., 1], -x[..., 0] - x[..., 0] ** 3], axis=-1)

    steps = np.array([0.2, 0.1, 0.05])
    J = np.broadcast_to([[0.0, 1.0], [-1.0 - 3.0 * 0.7**2, 0.0]], (3, 2, 2))
    moved, error = rosenbrock_step(lambda u: field(start + u), J, steps)
    truth = [
        solve_ivp(lambda _, y: field(y), (0.0, h), start, method="DOP853", rtol=1e-13, atol=1e-15).y[:, -1]
        for h in steps
    ]
    gaps = np.linalg.norm(start + moved - truth, axis=1)
    orders = (
        np.log2(gaps[:-1] / gaps[1:]),
        np.log2(np.linalg.norm(error, axis=1)[:-1] / np.linalg.norm(error, axis=1)[1:]),
    )
    assert (orders[0] > 4.4).all()
    assert (orders[1] > 3.6).all()
    assert (orders[1] < 4.6).all()
    decay, _ = rosenbrock_step(lambda u: -1e12 * (1.0 + u), np.full((1, 1, 1), -1e12), np.ones(1))
    assert abs(1.0 + decay[0, 0]) < 1e-9
