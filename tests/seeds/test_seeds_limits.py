"""Where covariances end: at zero, on lines and planes, at infinity; and how degenerate."""

import numpy as np
from seed import CACP25, TALKS, seed

import otattn as oa

RNG = np.random.default_rng
START = np.array([[1.0, 0.3], [0.3, 0.6]])
a, b, c = 1.0, 0.6, 0.3


def limit(form: list, values: list, start: np.ndarray = START) -> oa.GaussianLimit:
    found = oa.gaussian_limit(oa.SoftmaxAttention(form, values), oa.GaussianMeasure(np.zeros(len(start)), start))
    assert found.settled
    return found


@seed(f"{CACP25}, patterns of covariances", "agrees", "otattn.gaussian_limit", story="plot_covariance_patterns.py")
def test_pattern_zero() -> None:
    """First of four patterns in the cone of 2 x 2 covariances: convergence to 0.

    ``V = I``, ``A = -I``; parameters are ours, here and below.
    """
    assert limit(-np.eye(2), np.eye(2)).kind == "zero"


@seed(
    f"{CACP25}, patterns of covariances",
    "agrees",
    "otattn.gaussian_limit",
    story="plot_covariance_patterns.py",
    value="diag(0, 0.51)",
)
def test_pattern_line() -> tuple[float, float]:
    """Convergence to a line: the limits are the multiples of one covariance of rank 1.

    ``V = I``, ``A = diag(-1, 0)``: ``diag(0, b - c^2 / a)`` from rows (a, c), (c, b). Value: from a = 1, b = 0.6, c =
    0.3.
    """
    found = limit(np.diag([-1.0, 0.0]), np.eye(2)).covariance
    np.testing.assert_allclose(found, np.diag([0.0, b - c * c / a]), atol=1e-8)
    return found[0, 0], found[1, 1]


@seed(
    f"{CACP25}, patterns of covariances",
    "agrees",
    "otattn.gaussian_limit",
    story="plot_covariance_patterns.py",
    value="diag(1.00, 0.51)",
)
def test_pattern_plane() -> tuple[float, float]:
    """Convergence to a plane: two parameters are left, and the rank may be full.

    ``V = diag(0, 1)``, ``A = diag(-1, 0)``: ``diag(a, b - c^2 / a)``.
    """
    found = limit(np.diag([-1.0, 0.0]), np.diag([0.0, 1.0])).covariance
    np.testing.assert_allclose(found, np.diag([a, b - c * c / a]), atol=1e-6)
    return found[0, 0], found[1, 1]


@seed(
    f"{CACP25}, patterns of covariances",
    "agrees",
    "otattn.gaussian_limit",
    story="plot_covariance_patterns.py",
    value="diag(0.40, 0)",
)
def test_pattern_two_lines() -> tuple[float, float]:
    """Convergence to two lines: which one depends on the start.

    ``V = -A``, ``A = [[0, 1], [1, 0]]``: ``diag(a - b, 0)`` if a > b, else ``diag(0, b - a)``.
    """
    form = np.array([[0.0, 1.0], [1.0, 0.0]])
    found = limit(form, -form).covariance
    np.testing.assert_allclose(found, np.diag([a - b, 0.0]), atol=1e-6)
    np.testing.assert_allclose(limit(form, -form, START[::-1, ::-1]).covariance, np.diag([0.0, a - b]), atol=1e-6)
    return found[0, 0], abs(found[1, 1])


@seed(
    CACP25,
    "agrees",
    "otattn.gaussian_limit",
    story="plot_patterns_of_variants.py",
    value="diag(0.00, 0.51), diag(0.00, 0.51), diag(0.00, 0.51)",
)
def test_patterns_of_variants() -> list[float]:
    """The patterns of covariances occur under L2, Sinkhorn and multi-head attention, too.

    Value: the line of ``V = I, A = diag(-1, 0)`` from the same start, L2, Sinkhorn and two heads of A and A/2.
    """
    A, V = np.diag([-1.0, 0.0]), np.eye(2)
    variants = (
        oa.L2Attention(0.5 * np.eye(2), A.T, V),
        oa.SinkhornAttention(A, V),
        oa.MultiHeadAttention([oa.SoftmaxAttention(A, 0.5 * V), oa.SoftmaxAttention(0.5 * A, 0.5 * V)]),
    )
    start = oa.GaussianMeasure(np.zeros(2), np.array([[a, c], [c, b]]))
    return [float(x) for map in variants for x in np.diag(oa.gaussian_limit(map, start).covariance)]


@seed(
    f"{CACP25}, trace-normalised covariances",
    "agrees",
    "otattn.gaussian_flow_batch",
    story="plot_patterns_of_variants.py",
    value="38 converge, 6 blow up",
    slow=True,
)
def test_mixed_disc() -> tuple[int, int]:
    """The same parameters let most starts converge and some blow up in finite time (published: 83 and 5).

    Value: of 44 random starts, ``V = diag(1, 0)``, ``A = [[0.2, 1], [-1, -1]]`` (parameters and starts are ours).
    """
    roots = RNG(0).standard_normal((44, 2, 2))
    starts = roots @ roots.transpose(0, 2, 1)
    attention = oa.SoftmaxAttention([[0.2, 1.0], [-1.0, -1.0]], np.diag([1.0, 0.0]))
    ends = [run.status for run in oa.gaussian_flow_batch(attention, starts, t_span=(0.0, 50.0), rtol=1e-6)]
    return ends.count("success"), ends.count("blow_up")


@seed(
    f"{CACP25}, trace-normalised covariances",
    "agrees",
    "otattn.gaussian_flow",
    story="plot_blow_up.py",
)
def test_blow_up_degenerates() -> None:
    """At the blow-up ``Sigma / tr Sigma`` tends to rank 1 for generic parameters."""
    F = RNG(0).standard_normal((3, 3))
    path = oa.gaussian_flow(
        oa.SoftmaxAttention(F @ F.T, np.eye(3)), oa.GaussianMeasure(np.zeros(3), np.eye(3)), t_span=(0.0, 9.0)
    )
    assert path.status == "blow_up"
    assert np.linalg.eigvalsh(path.shapes[-1])[1] < 1e-7


@seed(
    f"{CACP25}, trace-normalised covariances",
    "agrees",
    "otattn.gaussian_flow",
    story="plot_blow_up.py",
    value="1.00 of the trace",
)
def test_l2_divergence_degenerates() -> float:
    """Under L2 attention covariances diverge without blow-up, and their shapes tend to rank 1 as well.

    Value: share of the largest eigenvalue at t = 20, ``Q = diag(1, 1/2)``, ``V = K = I``.
    """
    attention = oa.L2Attention(np.diag([1.0, 0.5]), np.eye(2), np.eye(2))
    path = oa.gaussian_flow(attention, oa.GaussianMeasure([0.0, 0.0], START), t_span=(0.0, 20.0))
    return float(np.linalg.eigvalsh(path.shapes[-1])[-1])


@seed(
    CACP25,
    "agrees",
    "otattn.isotropic_dimension",
    "otattn.gaussian_limit",
    story="plot_rank_histograms.py",
    value="rank 2 of at most 2",
)
def test_limits_have_low_rank() -> tuple[int, int]:
    """``V = I``, A symmetric: a finite limit has ``Sigma A Sigma = 0``, so its rank is at most ``dim ker A +
    min(#positive, #negative)``, d/2 for invertible A.

    Value: the rank and that bound for ``A = diag(0, 0, -1, -2)``.
    """
    F = RNG(0).standard_normal((4, 4))
    form = np.diag([0.0, 0.0, -1.0, -2.0])
    found = limit(form, np.eye(4), F @ F.T)
    np.testing.assert_allclose(found.covariance @ form @ found.covariance, 0.0, atol=1e-6)
    return found.rank, oa.isotropic_dimension(form)


@seed(
    f"{CACP25}, histograms",
    "agrees",
    "otattn.limit_rank_histogram",
    story="plot_rank_histograms.py",
    value="ranks 1, 2, 2, 3",
    slow=True,
)
def test_ranks_of_limits() -> tuple[int, ...]:
    """``A = -Q^T Q / sqrt(d)``, Q of rank ``floor(d/2)``, ``V = F^T F``: for random Q, F the limits have rank
    ``ceil(d/2)``.

    It is a theorem: the trace of the stationary equation gives one half, the kernel of ``Q L_0`` the other. Value: the
    only ranks that occur for d = 2, 3, 4, 5, eight draws each.
    """
    ranks = []
    for dim in (2, 3, 4, 5):
        found = oa.limit_rank_histogram(law="published", dim=dim, draws=8, rng=0)
        assert found.settled.all()
        assert found.kinds["finite"] == 8
        (rank,) = set(found.ranks)
        ranks.append(int(rank))
    return tuple(ranks)


@seed(f"{CACP25}, histograms", "agrees", "otattn.limit_rank_histogram", value="rank 2", slow=True)
def test_ranks_of_l2_limits() -> int:
    """L2 attention with the same law has limits of low rank too.

    Value: the only rank that occurs for d = 4, five draws.
    """
    (rank,) = set(oa.limit_rank_histogram("l2", law="published", dim=4, draws=5, rng=0).ranks)
    return int(rank)


@seed(CACP25, "agrees", "otattn.limit_rank_histogram", value="rank 1", slow=True)
def test_ranks_of_multi_head_limits() -> int:
    """Several heads leave less: rank ``max(d - H floor(d/2), 0)`` for H heads of that law.

    Value: the only rank for d = 3 and two heads, three draws.
    """
    (rank,) = set(oa.limit_rank_histogram(law="published", dim=3, draws=3, heads=2, rng=0).ranks)
    return int(rank)


@seed(
    f"{CACP25}; {TALKS}",
    "differs",
    "otattn.limit_rank_histogram",
    story="plot_rank_histograms.py",
    value="rank 3 for d = 4",
    slow=True,
)
def test_ranks_for_random_values() -> tuple[int, int]:
    """For random V the limits have rank at most d/2 as well, numerically.

    Not for an indefinite A: with the signs of a symmetric A of rank 2 random, finite limits of rank 3 occur in
    dimension 4; the bound there is ``dim ker A + min(#positive, #negative)``. Value: the largest rank of a finite
    limit.
    """
    found = oa.limit_rank_histogram(dim=4, draws=12, value="random", symmetric=True, rng=0)
    finite = [
        (r, bound)
        for r, bound, l in zip(found.ranks, found.bounds, found.limits, strict=True)
        if l.kind == "finite" and l.settled
    ]
    assert all(rank <= bound for rank, bound in finite)
    return int(max(rank for rank, _ in finite)), 4


@seed(TALKS, "open", "otattn.gaussian_limit", value="rank 2")
def test_designed_limits() -> int:
    """Can parameters be chosen for a wanted limit?

    Any subspace can be the support: for ``V = I`` and ``A = -P``, P the projection along it, the limit is ``U (U^T
    Sigma_0^{-1} U)^{-1} U^T``, U a basis of it. Value: the rank in R^4 for a random plane.
    """
    U = np.linalg.qr(RNG(1).standard_normal((4, 2)))[0]
    F = RNG(0).standard_normal((4, 4))
    found = limit(U @ U.T - np.eye(4), np.eye(4), F @ F.T)
    np.testing.assert_allclose(found.covariance, U @ np.linalg.inv(U.T @ np.linalg.inv(F @ F.T) @ U) @ U.T, atol=1e-6)
    return found.rank
