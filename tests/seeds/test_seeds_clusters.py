"""Where tokens go: corners, hyperplanes, leaders, one point of the sphere."""

import numpy as np
from scipy.integrate import solve_ivp
from scipy.spatial import ConvexHull
from seed import BKKRW25, GLPR23, GLPR24, TALKS, seed

import otattn as oa

RNG = np.random.default_rng


def on_sphere(n: int, dim: int, rng: int) -> np.ndarray:
    tokens = RNG(rng).standard_normal((n, dim))
    return tokens / np.linalg.norm(tokens, axis=1, keepdims=True)


def cosines(points: np.ndarray) -> np.ndarray:
    """All pairs of distinct tokens."""
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    return (unit @ unit.T)[np.triu_indices(len(points), 1)]


@seed(
    GLPR23, "agrees", "otattn.limit_polytope", "otattn.flow", story="plot_clustering.py", value="3 corners, 0 elsewhere"
)
def test_polytope() -> tuple[int, int]:
    """``V = I``, A positive definite: the rescaled tokens ``e^{-t} x_i(t)`` tend to the boundary of a convex polytope or
    to 0, most of them to its corners.

    Value: 20 tokens of the plane.
    """
    tokens = RNG(0).standard_normal((20, 2))
    path = oa.flow(
        oa.SoftmaxAttention(10.0 * np.eye(2), np.eye(2)), tokens, t_span=(0.0, 8.0), normalization="rescaled", rtol=1e-6
    )
    found = oa.limit_polytope(path, tol=0.02)
    end = path.points[-1]
    inside = [z for z in end if np.linalg.norm(found.vertices - z, axis=1).min() > 0.05 and np.linalg.norm(z) > 0.05]
    on_boundary = found.boundary_distance.max() < 0.05
    assert on_boundary
    return found.n_vertices, len(inside)


@seed(GLPR23, "agrees", "otattn.flow", "otattn.token_leaders", value="0 of 10 rows, 1 allowed")
def test_boolean_attention_on_the_line() -> tuple[int, ...]:
    """d = 1, V > 0, A > 0: the attention matrix tends to one of low rank, whose rows are unit vectors of the first or last
    token, but for one row at most.

    Value: how many rows of ten tokens are not, at t = 5.
    """
    tokens = np.sort(RNG(0).standard_normal(10))[:, None]
    end = oa.flow(oa.SoftmaxAttention([[1.0]], [[1.0]]), tokens, t_span=(0.0, 5.0), rtol=1e-8).points[-1]
    logits = end @ end.T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    ends = {0, 9}
    others = [row for row in weights if row.max() < 0.999 or int(row.argmax()) not in ends]
    assert len(others) <= 1
    return len(others), len(weights), 1


@seed(GLPR23, "agrees", "otattn.flow", value="3 values at most, 2 here")
def test_hyperplanes() -> tuple[int, int]:
    """V with a simple largest eigenvalue > 0 and ``<A v, v> > 0`` along its eigenvector v: the rescaled tokens tend to at
    most three parallel hyperplanes.

    Value: how many different coordinates 16 tokens of R^3 have in the end.
    """
    form, values = np.diag([1.0, 0.5, 0.5]), np.diag([1.0, -0.5, -0.25])
    tokens = RNG(1).standard_normal((16, 3))
    path = oa.flow(oa.SoftmaxAttention(form, values), tokens, t_span=(0.0, 8.0), normalization="rescaled", rtol=1e-6)
    along = np.sort(path.points[-1][:, 0])
    count = 1 + int((np.diff(along) > 0.02).sum())
    assert count <= 3
    return 3, count


@seed(GLPR23, "agrees", "otattn.flow", value="3 places")
def test_polytope_and_subspace() -> int:
    """V with an eigenvalue > 0 on a subspace F, all others smaller: in F the rescaled tokens tend to the boundary of a
    convex polytope or to 0, whatever they do across it.

    Value: places of 16 tokens in the plane F of R^3, ``V = diag(1, 1, -0.5)``, ``A = 5 I``; each is on the boundary of
    their hull, or 0.
    """
    tokens = RNG(2).standard_normal((16, 3))
    attention = oa.SoftmaxAttention(5.0 * np.eye(3), np.diag([1.0, 1.0, -0.5]))
    end = oa.flow(attention, tokens, t_span=(0.0, 8.0), normalization="rescaled", rtol=1e-6).points[-1][:, :2]
    hull = ConvexHull(end)
    to_boundary = -(end @ hull.equations[:, :2].T + hull.equations[:, 2]).max(axis=1)
    assert np.minimum(to_boundary, np.linalg.norm(end, axis=1)).max() < 0.02
    return len({tuple(z) for z in (end / 0.05).round()})


@seed(GLPR23, "agrees", "otattn.flow", value="t^-0.50")
def test_collapse_for_v_minus_identity() -> float:
    """``V = -I``, ``A = I``: the tokens, not rescaled, tend to 0.

    Slowly, as the covariance does. Value: the exponent of their largest norm between t = 100 and 400, ten tokens of the
    plane.
    """
    path = oa.flow(
        oa.SoftmaxAttention(np.eye(2), -np.eye(2)),
        RNG(0).standard_normal((10, 2)),
        t_span=(0.0, 400.0),
        t_eval=[100.0, 400.0],
        rtol=1e-6,
    )
    first, last = path.radii()
    return float(np.log(last / first) / np.log(4.0))


@seed(f"{GLPR23}; {TALKS}", "agrees", "otattn.token_leaders")
def test_leaders() -> None:
    """Leaders emerge: tokens that attend most to themselves, whom the others follow; here the corners of the polytope."""
    tokens = RNG(0).standard_normal((12, 2))
    path = oa.flow(
        oa.SoftmaxAttention(3.0 * np.eye(2), np.eye(2)), tokens, t_span=(0.0, 6.0), normalization="rescaled", rtol=1e-6
    )
    leaders = oa.token_leaders(path)
    corners = oa.limit_polytope(path, tol=0.02)
    led = set(np.flatnonzero(leaders.leader[-1]))
    assert led
    assert all(any(k in members for members in corners.members) for k in led)
    assert leaders.received[-1][list(led)].sum() > 0.9


@seed(f"{GLPR24}; {TALKS}", "agrees", "otattn.flow", value="1.0000")
def test_one_cluster_on_the_sphere() -> float:
    """On the sphere, ``A = beta I, V = I``, d >= 3: almost all tokens tend to one point.

    Value: the least cosine of 12 tokens in R^3 at t = 60, beta = 1.
    """
    attention = oa.SoftmaxAttention(np.eye(3), np.eye(3))
    end = oa.flow(attention, on_sphere(12, 3, 0), t_span=(0.0, 60.0), normalization="sphere", rtol=1e-6).points[-1]
    return float(cosines(end).min())


@seed(GLPR24, "agrees", "otattn.flow", value="rate 1.00")
def test_hemisphere() -> float:
    """Tokens of one open hemisphere (n <= d almost surely) gather exponentially fast.

    Value: the rate of their largest distance, ``A = I, V = I``.
    """
    tokens = on_sphere(8, 3, 1)
    tokens[:, 0] = np.abs(tokens[:, 0]) + 0.1
    tokens /= np.linalg.norm(tokens, axis=1, keepdims=True)
    path = oa.flow(
        oa.SoftmaxAttention(np.eye(3), np.eye(3)),
        tokens,
        t_span=(0.0, 10.0),
        t_eval=[6.0, 10.0],
        normalization="sphere",
        rtol=1e-10,
        atol=1e-13,
    )
    first, last = path.diameters()
    return float(np.log(first / last) / 4.0)


@seed(GLPR24, "agrees", "otattn.flow", story="plot_phase_diagram.py", value="apart by 0.000")
def test_equiangular_tokens() -> float:
    """n = d orthogonal tokens stay equiangular: their cosine obeys ``c' = 2 e^{beta c} (1 - c) ((n-1) c + 1) / (e^beta +
    (n-1) e^{beta c})``.

    Value: the largest gap to that curve up to t = 6, beta = 2, n = 5.
    """
    n, beta, times = 5, 2.0, np.linspace(0.0, 6.0, 7)
    path = oa.flow(
        oa.SoftmaxAttention(beta * np.eye(n), np.eye(n)),
        np.eye(n),
        t_span=(0.0, 6.0),
        t_eval=times,
        normalization="sphere",
        rtol=1e-10,
    )

    def curve(t, c):
        return 2 * np.exp(beta * c) * (1 - c) * ((n - 1) * c + 1) / (np.exp(beta) + (n - 1) * np.exp(beta * c))

    exact = solve_ivp(curve, (0.0, 6.0), [0.0], t_eval=times, rtol=1e-10, atol=1e-12).y[0]
    found = np.array([cosines(points) for points in path.points])
    assert np.ptp(found, axis=1).max() < 1e-8
    return float(np.abs(found.mean(axis=1) - exact).max())


@seed(f"{GLPR24}; {TALKS}", "agrees", "otattn.token_clusters", "otattn.flow", value="from 3 clusters to 1")
def test_metastability() -> tuple[int, int]:
    """For large beta tokens of the circle form several clusters first, which last long before they merge.

    Value: 24 tokens near three directions, beta = 9: clusters from t = 5 to 50, and for beta = 1 at t = 50.
    """
    angles = np.concatenate([c + 0.3 * RNG(k).standard_normal(8) for k, c in enumerate((0.0, 1.9, 3.9))])
    tokens = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    counts = []
    for beta in (9.0, 1.0):
        attention = oa.SoftmaxAttention(beta * np.eye(2), np.eye(2))
        path = oa.flow(
            attention, tokens, t_span=(0.0, 50.0), t_eval=[0.0, 5.0, 50.0], normalization="sphere", rtol=1e-6
        )
        counts.append(oa.token_clusters(path, tol=0.05).counts)
    assert counts[0][1] == counts[0][2]
    return int(counts[0][2]), int(counts[1][2])


@seed(GLPR24, "agrees", "otattn.flow", story="plot_phase_diagram.py", value="1.00, 0.34")
def test_phase_diagram_of_close_pairs() -> tuple[float, float]:
    """Phase diagram over (t, beta), tokens uniform on the circle: the share of close pairs is 1 for small beta and large
    t, and stays below for large beta.

    Value: the share of pairs with cosine above 0.999 at t = 30, n = 32, beta = 0.5 and 9.
    """
    shares = []
    for beta in (0.5, 9.0):
        attention = oa.SoftmaxAttention(beta * np.eye(2), np.eye(2))
        end = oa.flow(attention, on_sphere(32, 2, 5), t_span=(0.0, 30.0), normalization="sphere", rtol=1e-5).points[-1]
        shares.append(float((cosines(end) > 0.999).mean()))
    return shares[0], shares[1]


@seed(f"{GLPR24}; {BKKRW25}", "agrees", "otattn.gradient_flow.energies.ExponentialEnergy", "otattn.flow")
def test_energy_increases_on_the_sphere() -> None:
    """On the sphere the energy ``(1/2) int int e^{<Ax, y>} dmu dmu`` increases along the flow for ``V = A`` symmetric and
    decreases for ``V = -A``.
    """
    form = np.diag([1.5, -0.5, 1.0])
    energy = oa.energies.ExponentialEnergy(form)
    for sign in (1.0, -1.0):
        path = oa.flow(
            oa.SoftmaxAttention(form, sign * form),
            on_sphere(10, 3, 2),
            t_span=(0.0, 5.0),
            t_eval=np.linspace(0.0, 5.0, 11),
            normalization="sphere",
        )
        assert (sign * np.diff([energy(points) for points in path.points]) > 0).all()


@seed(BKKRW25, "agrees", "otattn.gradient_flow.energies.ExponentialEnergy", "otattn.flow", value="1.000")
def test_maximisers_of_the_energy() -> float:
    """If the largest eigenvalue of A is positive and the largest in size, Dirac masses at its unit eigenvectors maximise
    the energy over measures of the sphere; flows climb to them.

    Value: the energy at the end of a flow over ``e^{lambda} / 2``, ``A = V = diag(2, 1, -0.5)``.
    """
    form = np.diag([2.0, 1.0, -0.5])
    energy = oa.energies.ExponentialEnergy(form)
    best = np.exp(2.0) / 2
    assert max(energy(on_sphere(5, 3, k)) for k in range(50)) < best
    np.testing.assert_allclose(energy([[1.0, 0.0, 0.0]]), best, rtol=1e-12)
    tokens = on_sphere(8, 3, 4)
    tokens[:, 0] = np.abs(tokens[:, 0])
    end = oa.flow(
        oa.SoftmaxAttention(form, form), tokens, t_span=(0.0, 20.0), normalization="sphere", rtol=1e-6
    ).points[-1]
    return energy(end) / best


@seed(BKKRW25, "agrees", "otattn.gradient_flow.energies.ExponentialEnergy", "otattn.flow", value="1.000")
def test_minimisers_of_the_energy() -> float:
    """``A = I``: the uniform measure of the sphere minimises the energy; flows with ``V = -I`` spread out.

    Value: the energy at the end of such a flow of six tokens of the circle, over that of the uniform measure, ``I_0(1)
    / 2``.
    """
    energy = oa.energies.ExponentialEnergy(np.eye(2))
    uniform = float(np.mean(np.exp(np.cos(2 * np.pi * np.arange(64) / 64)))) / 2
    assert min(energy(on_sphere(6, 2, k)) for k in range(50)) > uniform
    end = oa.flow(
        oa.SoftmaxAttention(np.eye(2), -np.eye(2)),
        on_sphere(6, 2, 0),
        t_span=(0.0, 60.0),
        normalization="sphere",
        rtol=1e-6,
    )
    return energy(end.points[-1]) / uniform


@seed(
    f"{GLPR23}; {TALKS}",
    "agrees",
    "otattn.SoftmaxAttention",
    "otattn.lipschitz.bounds.castin2024_large_radius",
    story="plot_large_radius.py",
)
def test_hardmax_limit() -> None:
    """As ``A`` grows softmax becomes hardmax: ``Gamma_mu(x_i) -> V x_{m_i}``, m_i the largest logit."""
    form, tokens = np.array([[1.0, 0.5], [-0.3, -0.8]]), RNG(3).standard_normal((8, 2))
    chosen = tokens[(tokens @ form.T @ tokens.T).argmax(axis=1)]
    images = [oa.SoftmaxAttention(beta * form, np.eye(2)).on_tokens(tokens) for beta in (10.0, 1000.0)]
    assert np.abs(images[1] - chosen).max() < 1e-6 < np.abs(images[0] - chosen).max()
