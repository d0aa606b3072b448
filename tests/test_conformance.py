"""One suite for every map: derivatives, adjoints, symmetries of measures, blocks, immutability."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from functools import partial

import numpy as np
import pytest
from attention_maps import MAPS, D, Rng

from otattn.attention import AttentionMap, JacobianOperator, base, memory
from otattn.lipschitz import local_lipschitz
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure
from otattn.operators import measure_jacobian, top_singular
from otattn.operators.network import TwoPrecisions

TOKENWISE = ("layernorm", "rmsnorm", "mlp")


@pytest.fixture(params=MAPS, ids=str)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rng() -> Rng:
    return np.random.default_rng(20240607)


@pytest.fixture
def attention(name: str, rng: Rng) -> AttentionMap:
    return MAPS[name](rng)


def measure(attention: AttentionMap, rng: Rng, n: int = 7, *, weights: np.ndarray | None = None) -> base.Measure:
    """Random atoms and weights; for causal maps also times, some of them equal."""
    points = rng.standard_normal((n, D))
    w = rng.uniform(0.5, 1.5, n) if weights is None else weights
    w = w / w.sum()
    if not attention.causal:
        return DiscreteMeasure(points, w)
    return SpaceTimeMeasure(rng.integers(1, max(n - 1, 2), n) / n, points, w)


def rebuilt(mu: base.Measure, points: np.ndarray, weights: np.ndarray, index: np.ndarray | None = None) -> base.Measure:
    """A measure of the kind of ``mu`` with other atoms; ``index`` says whose times they take."""
    if isinstance(mu, SpaceTimeMeasure):
        return SpaceTimeMeasure(mu.times if index is None else mu.times[index], points, weights)
    return DiscreteMeasure(points, weights)


def values(attention: AttentionMap, mu: base.Measure, points: np.ndarray) -> np.ndarray:
    return attention.pushforward(rebuilt(mu, points, mu.weights)).points


def close(a: np.ndarray, b: np.ndarray, tol: float = 1e-12) -> None:
    """Equality relative to the size of the arrays as a whole."""
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    scale = max(float(np.abs(b).max()), 1e-300)
    assert float(np.abs(a - b).max()) <= tol * max(scale, 1.0), float(np.abs(a - b).max())


def sixth_order(f: Callable[[float], np.ndarray], h: float) -> np.ndarray:
    """f'(0) by central differences; truncation is about h^6, rounding about 1e-16/h, both below 1e-12."""
    return (45.0 * (f(h) - f(-h)) - 9.0 * (f(2 * h) - f(-2 * h)) + (f(3 * h) - f(-3 * h))) / (60.0 * h)


# derivatives


def step(name: str) -> float:
    """Piecewise polynomials have no truncation error: a step too small to cross a kink."""
    return 1e-5 if "relu" in name else 1e-3


def test_jacobian_matches_differences(name: str, attention: AttentionMap, rng: Rng) -> None:
    mu = measure(attention, rng)
    direction = rng.standard_normal((mu.n, D))
    expected = sixth_order(lambda t: values(attention, mu, mu.points + t * direction), step(name))
    # 1e-9: the derivatives of order 7 of the roughest maps are about 1e7
    close(attention.jacobian(mu).jvp(direction), expected, 1e-9)


def test_taylor_remainder_falls_like_the_square(name: str, attention: AttentionMap, rng: Rng) -> None:
    mu = measure(attention, rng)
    direction = rng.standard_normal((mu.n, D))
    slope, start = attention.jacobian(mu).jvp(direction), values(attention, mu, mu.points)
    remainders = [
        np.linalg.norm(values(attention, mu, mu.points + h * direction) - start - h * slope) for h in (1e-3, 2.5e-4)
    ]
    # exactly 16 for a quadratic; piecewise linear maps leave nothing but rounding
    assert remainders[1] <= remainders[0] / 14.0 or remainders[0] < 1e-14


def test_field_jacobian_matches_differences(name: str, attention: AttentionMap, rng: Rng) -> None:
    mu = measure(attention, rng)
    x = rng.standard_normal((4, D))
    times = np.array([0.9, 0.95, 0.6, 1.0]) if attention.causal else None

    def moved(row: np.ndarray, t: float) -> np.ndarray:
        return attention(x + t * row, mu, times=times)

    field = attention.field_jacobian(x, mu, times=times)
    expected = np.stack(
        [sixth_order(partial(moved, row), step(name)) for row in np.eye(D)],
        axis=2,
    )
    close(field, expected, 1e-9)
    close(attention.field_jacobian(x, mu, times=times, block_size=1), field)


def test_adjoint_identity(attention: AttentionMap, rng: Rng) -> None:
    J = attention.jacobian(measure(attention, rng))
    for _ in range(3):
        v, g = rng.standard_normal((J.n, J.d)), rng.standard_normal((J.n, J.e))
        Jv, Jg = J.jvp(v), J.vjp(g)
        size = np.linalg.norm(Jv) * np.linalg.norm(g) + np.linalg.norm(Jg) * np.linalg.norm(v)
        assert abs(np.sum(Jv * g) - np.sum(v * Jg)) <= 1e-12 * size


def test_dense_products_and_operator_algebra_agree(attention: AttentionMap, rng: Rng) -> None:
    mu = measure(attention, rng, 5)
    J = attention.jacobian(mu)
    assert isinstance(J, JacobianOperator)
    dense = J.to_dense()
    assert dense.shape == J.shape == (J.n * J.e, J.n * J.d)
    close(J @ np.eye(J.shape[1]), dense)
    close(J.H @ np.eye(J.shape[0]), dense.T)
    close(J.T.matvec(np.ones(J.shape[0])), dense.sum(axis=0))
    close(J.matmat(np.ones((J.shape[1], 1)))[:, 0], dense.sum(axis=1))
    root = np.repeat(np.sqrt(mu.weights), J.e)[:, None], np.repeat(np.sqrt(mu.weights), J.d)[None, :]
    weighted = J.reweighted(mu.weights)
    close(weighted.to_dense(), root[0] * dense / root[1])
    close(weighted @ np.eye(J.shape[1]), root[0] * dense / root[1])
    close(weighted.H @ np.eye(J.shape[0]), (root[0] * dense / root[1]).T)


def test_products_part_by_part_are_those_of_the_map(attention: AttentionMap, rng: Rng) -> None:
    """What Lanczos iterates, in L^2(mu): each part of a network on its own path, and the same in float32."""
    mu = measure(attention, rng)
    J, plain = measure_jacobian(attention, mu), attention.jacobian(mu).reweighted(mu.weights)
    v, g = rng.standard_normal((mu.n, J.d)), rng.standard_normal((mu.n, J.e))
    close(J.jvp(v), plain.jvp(v), 1e-11)
    close(J.vjp(g), plain.vjp(g), 1e-11)
    equal = rebuilt(mu, mu.points, np.full(mu.n, 1.0 / mu.n))
    J, plain = measure_jacobian(attention, equal), attention.jacobian(equal)
    close(J.jvp(v), plain.jvp(v), 1e-11)
    if isinstance(J, TwoPrecisions):
        size = float(np.linalg.norm(plain.to_dense(), 2))
        assert 0.0 < np.linalg.norm(J.single.jvp(v) - plain.jvp(v)) <= 1e-3 * size * np.linalg.norm(v)
        assert 0.0 < np.linalg.norm(J.single.vjp(g) - plain.vjp(g)) <= 1e-3 * size * np.linalg.norm(g)


def test_the_local_constant_is_that_of_the_dense_jacobian(attention: AttentionMap, rng: Rng) -> None:
    mu = measure(attention, rng)
    J = attention.jacobian(mu).reweighted(mu.weights)
    size = float(np.linalg.norm(J.to_dense(), 2))
    top = top_singular(measure_jacobian(attention, mu), precision="precise", rng=1)
    assert abs(top.value - size) <= top.error_bar + 1e-12 * size
    local = local_lipschitz(attention, mu)
    assert abs(local.particle - size) <= 1e-11 * size
    assert local.verify()


# symmetries of measures


def test_permutation_equivariance(attention: AttentionMap, rng: Rng) -> None:
    mu = measure(attention, rng)
    order = rng.permutation(mu.n)
    nu = rebuilt(mu, mu.points[order], mu.weights[order], order)
    close(attention.pushforward(nu).points, attention.pushforward(mu).points[order])
    v = rng.standard_normal((mu.n, D))
    close(attention.jacobian(nu).jvp(v[order]), attention.jacobian(mu).jvp(v)[order], 1e-11)


def test_weights_are_multiplicities(attention: AttentionMap, rng: Rng) -> None:
    counts = np.array([1, 3, 2, 1, 4])
    mu = measure(attention, rng, 5, weights=counts.astype(float))
    index = np.repeat(np.arange(5), counts)
    tokens = rebuilt(mu, mu.points[index], np.full(11, 1.0 / 11), index)
    close(attention.pushforward(tokens).points, attention.pushforward(mu).points[index])


def test_duplicated_atoms_change_nothing(name: str, attention: AttentionMap, rng: Rng) -> None:
    """Copies of one atom act as one when moved together, and feel the field Jacobian alone when moved apart."""
    mu = measure(attention, rng, 5)
    index = np.array([0, 1, 2, 2, 2, 3, 4])
    share = np.array([1.0, 1.0, 0.2, 0.3, 0.5, 1.0, 1.0])
    cut = rebuilt(mu, mu.points[index], mu.weights[index] * share, index)
    close(attention.pushforward(cut).points, attention.pushforward(mu).points[index])
    x = rng.standard_normal((2, D))
    times = np.array([0.99, 0.9]) if attention.causal else None
    close(attention(x, cut, times=times), attention(x, mu, times=times))
    together = rng.standard_normal((5, D))
    J = attention.jacobian(cut)
    close(J.jvp(together[index]), attention.jacobian(mu).jvp(together)[index], 1e-11)
    apart = np.zeros((7, D))
    apart[2:5] = rng.standard_normal((3, D))
    apart[2:5] -= (share[2:5] @ apart[2:5]) / share[2:5].sum()
    times = cut.times if isinstance(cut, SpaceTimeMeasure) else None
    field = attention.field_jacobian(cut.points, cut, times=times)
    close(J.jvp(apart), np.einsum("ied,id->ie", field, apart), 1e-11)


@pytest.mark.parametrize("size", [1.0, 1e8])
def test_atoms_of_zero_weight_change_nothing(name: str, attention: AttentionMap, rng: Rng, size: float) -> None:
    if "exponential" in name:
        size = 1.0  # rows at huge atoms have no value in float64, see test_cases
    mu = measure(attention, rng)
    dead = size * rng.standard_normal((3, D))
    points, w = np.vstack([dead[:2], mu.points, dead[2:]]), np.concatenate([[0, 0], mu.weights, [0]])
    live = np.flatnonzero(w)
    if isinstance(mu, SpaceTimeMeasure):
        # the first dead atom comes before all mass
        nu: base.Measure = SpaceTimeMeasure(np.concatenate([[0.0, 0.5], mu.times, [0.7]]), points, w)
    else:
        nu = DiscreteMeasure(points, w)
    close(attention.pushforward(nu).points[live], attention.pushforward(mu).points)
    x = rng.standard_normal((2, D))
    times = np.array([0.99, 0.9]) if attention.causal else None
    close(attention(x, nu, times=times), attention(x, mu, times=times))
    close(attention.field_jacobian(x, nu, times=times), attention.field_jacobian(x, mu, times=times))
    J, smaller = attention.jacobian(nu), attention.jacobian(mu)
    v = rng.standard_normal((nu.n, D))
    close(J.jvp(v)[live], smaller.jvp(v[live]), 1e-11)
    g = np.zeros((nu.n, J.e))
    g[live] = rng.standard_normal((mu.n, J.e))
    back = J.vjp(g)
    close(back[live], smaller.vjp(g[live]), 1e-11)
    assert (back[w == 0] == 0.0).all()
    assert np.isfinite(J.to_dense()).all()


# blocks and memory


@pytest.mark.parametrize("block_size", [1, 3])
def test_block_size_does_not_matter(attention: AttentionMap, rng: Rng, block_size: int) -> None:
    mu = measure(attention, rng)
    v = rng.standard_normal((mu.n, D))
    times = mu.times if isinstance(mu, SpaceTimeMeasure) else None
    J, blocked = attention.jacobian(mu), attention.jacobian(mu, block_size=block_size)
    close(attention(mu.points, mu, times=times, block_size=block_size), attention.pushforward(mu).points)
    close(blocked.jvp(v), J.jvp(v))
    g = rng.standard_normal((mu.n, J.e))
    close(blocked.vjp(g), J.vjp(g))
    close(blocked.to_dense(), J.to_dense())


def test_tiny_memory_budget_does_not_matter(attention: AttentionMap, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    mu = measure(attention, rng)
    times = mu.times if isinstance(mu, SpaceTimeMeasure) else None
    v = rng.standard_normal((mu.n, D))
    J = attention.jacobian(mu)
    expected = (
        attention.pushforward(mu).points,
        J.jvp(v),
        attention.field_jacobian(mu.points, mu, times=times),
    )
    monkeypatch.setattr(memory, "MEMORY_BUDGET", 500)
    small = attention.jacobian(mu)
    close(attention.pushforward(mu).points, expected[0])
    close(small.jvp(v), expected[1], 1e-11)
    close(attention.field_jacobian(mu.points, mu, times=times), expected[2])
    g = rng.standard_normal((mu.n, J.e))
    close(small.vjp(g), J.vjp(g), 1e-11)


# the protocol


def test_shapes_kinds_and_dimensions(attention: AttentionMap, rng: Rng) -> None:
    mu = measure(attention, rng)
    image = attention.pushforward(mu)
    assert type(image) is type(mu)
    assert image.weights is mu.weights
    if isinstance(mu, SpaceTimeMeasure) and isinstance(image, SpaceTimeMeasure):
        assert image.times is mu.times
    assert attention.in_dim == D
    assert image.points.shape == (mu.n, attention.out_dim)
    X = rng.standard_normal((4, D))
    uniform = SpaceTimeMeasure.from_sequence(X) if attention.causal else DiscreteMeasure(X)
    assert np.array_equal(attention.on_tokens(X), attention.pushforward(uniform).points)
    assert np.array_equal(attention.pushforward(X).points, attention.on_tokens(X))
    close(attention(X, X), attention.on_tokens(X))


def test_arguments_are_never_changed_and_results_are_fresh(attention: AttentionMap, rng: Rng) -> None:
    mu = measure(attention, rng)
    x, v = mu.points.copy(), rng.standard_normal((mu.n, D))
    kept = x.copy(), v.copy()
    J = attention.jacobian(mu)
    times = mu.times if isinstance(mu, SpaceTimeMeasure) else None
    out = attention(x, mu, times=times)
    again = out.copy()
    attention.field_jacobian(x, mu, times=times)
    product = J.jvp(v)
    g = product.copy()
    J.vjp(g)
    J.to_dense()
    assert np.array_equal(x, kept[0])
    assert np.array_equal(v, kept[1])
    assert np.array_equal(g, product)
    assert not np.shares_memory(product, v)
    assert not attention.pushforward(mu).points.flags.writeable
    # writing into a result does not reach the map
    out[:] = np.pi
    product[:] = np.pi
    assert np.array_equal(attention(x, mu, times=times), again)
    assert np.array_equal(J.jvp(v), g)


def test_maps_are_frozen(attention: AttentionMap) -> None:
    for f in fields(attention):  # type: ignore[arg-type]
        value = getattr(attention, f.name)
        if isinstance(value, np.ndarray):
            assert not value.flags.writeable
        with pytest.raises(FrozenInstanceError):
            setattr(attention, f.name, value)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8])
def test_narrow_types_are_widened(attention: AttentionMap, rng: Rng, dtype: type) -> None:
    # no constant token, for the norms
    X: np.ndarray = (np.round(2.0 * rng.standard_normal((5, D))) + np.arange(D)).astype(dtype)
    wide = X.astype(np.float64)
    X[(wide == wide[:, :1]).all(axis=1)] = np.array([1, 2, 4])
    out = attention.on_tokens(X)
    assert out.dtype == np.float64
    assert np.array_equal(out, attention.on_tokens(X.astype(np.float64)))


def test_wrong_shapes_are_named(attention: AttentionMap, rng: Rng) -> None:
    mu = measure(attention, rng)
    with pytest.raises(ValueError, match="x must have dimension 3"):
        attention(np.zeros((2, D + 1)), mu, times=[1.0, 1.0])
    with pytest.raises(ValueError, match="dimension"):
        attention.on_tokens(np.zeros((2, D + 1)))
    with pytest.raises(ValueError, match="NaN"):
        attention.on_tokens(np.full((2, D), np.nan))
    J = attention.jacobian(mu)
    with pytest.raises(ValueError, match="direction must have shape"):
        J.jvp(np.zeros((D, mu.n)))
    with pytest.raises(ValueError, match="cotangent must have shape"):
        J.vjp(np.zeros((mu.n + 1, J.e)))
    with pytest.raises(ValueError, match="block_size"):
        attention.jacobian(mu, block_size=0)
    with pytest.raises(ValueError, match="weights must be positive"):
        J.reweighted(np.concatenate([[0.0], np.full(mu.n - 1, 1.0)]))


def test_names_of_token_maps_do_not_look_at_the_measure(name: str, attention: AttentionMap, rng: Rng) -> None:
    x = rng.standard_normal((2, D))
    times = np.array([0.99, 0.9]) if attention.causal else None
    first, second = (attention(x, measure(attention, rng), times=times) for _ in range(2))
    assert np.allclose(first, second, atol=1e-8) == name.startswith(TOKENWISE)
