"""Rotary attention: the definition in complex numbers, offsets only, derivatives, local constants."""

import numpy as np
import pytest

from otattn.attention import MultiHeadAttention, SoftmaxAttention
from otattn.attention.rotary import RotaryAttention
from otattn.lipschitz.local.value import local_lipschitz
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure

Rng = np.random.Generator


@pytest.fixture
def rng() -> Rng:
    return np.random.default_rng(3)


def head(rng: Rng, d: int = 3, k: int = 4, e: int = 2, **options: object) -> RotaryAttention:
    """Random factors and biases; base 20 so that all pairs turn by visible angles."""
    settings: dict = {"base": 20.0, "query_bias": rng.normal(size=k), "key_bias": rng.normal(size=k)}
    settings |= {"value_bias": rng.normal(size=e)} | options
    Q, K, V = (rng.normal(size=shape) for shape in ((k, d), (k, d), (e, d)))
    return RotaryAttention(Q, K, V, **settings)


def by_definition(a: RotaryAttention, X: np.ndarray, base: float, r: int) -> np.ndarray:
    """Pairs as complex numbers, turned by exp(i position omega); one row at a time."""
    n = len(X)
    q, k = X @ a.Q.T, X @ a.K.T
    q = q if a.query_bias is None else q + a.query_bias
    k = k if a.key_bias is None else k + a.key_bias

    def pairs(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        head, tail = row[:r], row[r:]
        z = head[0::2] + 1j * head[1::2] if a.layout == "adjacent" else head[: r // 2] + 1j * head[r // 2 :]
        return z, tail

    omega = np.array([base ** (-2 * t / r) for t in range(r // 2)])
    out = []
    for i in range(n):
        logits = []
        for j in range(i + 1 if a.masked else n):
            (zi, ti), (zj, tj) = pairs(q[i]), pairs(k[j])
            turned = np.exp(1j * (i + 1) * omega) * zi, np.exp(1j * (j + 1) * omega) * zj
            logits.append(a.scale * (np.real(turned[0] @ np.conj(turned[1])) + ti @ tj))
        p = np.exp(np.array(logits) - max(logits))
        out.append(p / p.sum() @ (X[: len(p)] @ a.V.T))
    return np.array(out) + (0.0 if a.value_bias is None else a.value_bias)


@pytest.mark.parametrize(
    ("options", "r"),
    [
        ({}, 6),
        ({"layout": "half"}, 6),
        ({"rotary_dim": 4}, 4),
        ({"rotary_dim": 4, "layout": "half", "masked": False}, 4),
    ],
)
def test_definition(rng: Rng, options: dict, r: int) -> None:
    a = head(rng, k=6, **options)
    X = rng.normal(size=(7, 3))
    np.testing.assert_allclose(a.on_tokens(X), by_definition(a, X, 20.0, r), atol=1e-13)


def test_layouts_differ_by_a_permutation(rng: Rng) -> None:
    a = head(rng, k=6)
    order = [0, 2, 4, 1, 3, 5]
    other = RotaryAttention(
        a.Q[order],
        a.K[order],
        a.V,
        base=20.0,
        layout="half",
        query_bias=a.query_bias[order],
        key_bias=a.key_bias[order],
        value_bias=a.value_bias,
    )
    X = rng.normal(size=(6, 3))
    np.testing.assert_allclose(other.on_tokens(X), a.on_tokens(X), atol=1e-13)


def test_logits_are_those_of_the_form_at_the_offset(rng: Rng) -> None:
    a = head(rng, query_bias=None, key_bias=None, value_bias=None)
    X = rng.normal(size=(5, 3))
    rows = []
    for i in range(5):
        logits = np.array([X[j] @ a.form(i - j) @ X[i] for j in range(i + 1)])
        p = np.exp(logits - logits.max())
        rows.append(a.V @ (p / p.sum() @ X[: i + 1]))
    np.testing.assert_allclose(a.on_tokens(X), rows, atol=1e-13)
    # turning is orthogonal: no offset makes the form larger than the factors allow
    top = a.scale * np.linalg.norm(a.Q, 2) * np.linalg.norm(a.K, 2)
    assert max(np.linalg.norm(a.form(s), 2) for s in range(-9, 10)) <= top * (1 + 1e-12)


def test_any_frequencies(rng: Rng) -> None:
    usual = head(rng, k=6, rotary_dim=4)
    X = rng.normal(size=(5, 3))
    again = RotaryAttention(
        usual.Q,
        usual.K,
        usual.V,
        frequencies=20.0 ** (-np.arange(0, 4, 2) / 4),
        query_bias=usual.query_bias,
        key_bias=usual.key_bias,
        value_bias=usual.value_bias,
    )
    np.testing.assert_array_equal(again.on_tokens(X), usual.on_tokens(X))
    still = RotaryAttention(usual.Q, usual.K, usual.V, frequencies=[0.0, 0.0], masked=False)
    plain = SoftmaxAttention.from_qkv(usual.Q, usual.K, usual.V)
    np.testing.assert_allclose(still.on_tokens(X), plain.on_tokens(X), atol=1e-13)


def test_only_offsets_count(rng: Rng) -> None:
    a = head(rng, length=40.0)
    X, times = rng.normal(size=(6, 3)), np.sort(rng.uniform(0.0, 0.5, 6))
    here, later = (a.pushforward(SpaceTimeMeasure(times + shift, X)).points for shift in (0.0, 0.4))
    np.testing.assert_allclose(here, later, atol=1e-12)
    # but distances between the times do
    assert np.abs(here - a.pushforward(SpaceTimeMeasure(0.5 * times, X)).points).max() > 1e-3


def test_a_prefix_of_a_sequence_has_the_same_values(rng: Rng) -> None:
    a, X = head(rng), rng.normal(size=(9, 3))
    np.testing.assert_allclose(a.on_tokens(X[:4]), a.on_tokens(X)[:4], atol=1e-13)
    changed = X.copy()
    changed[5:] = 7.0
    np.testing.assert_array_equal(a.on_tokens(changed)[:5], a.on_tokens(X)[:5])


def test_key_bias_counts_only_with_positions(rng: Rng) -> None:
    a = head(rng)
    X = rng.normal(size=(5, 3))
    without = a.with_factors(a.Q, a.K, a.V)
    object.__setattr__(without, "key_bias", None)
    assert np.abs(a.on_tokens(X) - without.on_tokens(X)).max() > 1e-3
    pair = [
        SoftmaxAttention.from_qkv(a.Q, a.K, a.V, query_bias=a.query_bias, key_bias=b).on_tokens(X)
        for b in (None, a.key_bias)
    ]
    np.testing.assert_array_equal(*pair)


@pytest.mark.parametrize("options", [{}, {"layout": "half", "rotary_dim": 2}, {"masked": False, "length": 11.0}])
def test_derivatives(rng: Rng, options: dict) -> None:
    a = head(rng, **options)
    weights = rng.uniform(0.5, 1.5, 8)
    mu = SpaceTimeMeasure(rng.integers(1, 6, 8) / 6, rng.normal(size=(8, 3)), weights / weights.sum())
    v, h = rng.normal(size=(8, 3)), 1e-4
    J = a.jacobian(mu)

    def f(t: float) -> np.ndarray:
        return a.pushforward(mu._with_points(mu.points + t * v)).points

    # fourth order differences: truncation h^4, rounding 1e-16 / h
    slope = (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)
    np.testing.assert_allclose(J.jvp(v), slope, atol=1e-9)
    g = rng.normal(size=(8, 2))
    assert np.sum(J.jvp(v) * g) == pytest.approx(np.sum(v * J.vjp(g)), rel=1e-12)
    np.testing.assert_allclose(J.to_dense() @ v.ravel(), J.jvp(v).ravel(), atol=1e-12)
    blocked = a.jacobian(mu, block_size=3)
    np.testing.assert_allclose(blocked.vjp(g), J.vjp(g), atol=1e-12)
    # the field: the point moves, the measure stays
    x, times = rng.normal(size=(2, 3)), np.array([0.9, 1.0])
    D = a.field_jacobian(x, mu, times=times)
    for c, row in enumerate(np.eye(3)):
        step = [a(x + s * h * row, mu, times=times) for s in (1, -1, 2, -2)]
        np.testing.assert_allclose(D[:, :, c], (8 * (step[0] - step[1]) - step[2] + step[3]) / (12 * h), atol=1e-9)


def test_local_constant_is_that_of_the_dense_jacobian(rng: Rng) -> None:
    a = head(rng)
    X = rng.normal(size=(12, 3))
    local = local_lipschitz(a, X)
    dense = np.linalg.svd(a.jacobian(X).to_dense(), compute_uv=False)[0]
    assert local.particle == pytest.approx(dense, rel=1e-9)
    times = SpaceTimeMeasure.from_sequence(X).times
    field = np.linalg.norm(a.field_jacobian(X, X, times=times), ord=2, axis=(1, 2)).max()
    assert local.splitting == pytest.approx(field, rel=1e-12)
    assert local.verify()
    # along the top singular vector the images separate by that much
    h = 1e-5
    moved = a.on_tokens(X + h * local.right) - a.on_tokens(X - h * local.right)
    assert np.linalg.norm(moved) / (2 * h) == pytest.approx(dense, rel=1e-8)


def test_multi_head_of_rotary_heads(rng: Rng) -> None:
    parts = [head(rng), head(rng)]
    outputs = [rng.normal(size=(3, 2)) for _ in parts]
    both = MultiHeadAttention(parts, outputs, output_bias=[1.0, 2.0, 3.0])
    X = rng.normal(size=(5, 3))
    expected = sum(p.on_tokens(X) @ W.T for p, W in zip(parts, outputs, strict=True)) + [1.0, 2.0, 3.0]
    np.testing.assert_allclose(both.on_tokens(X), expected, atol=1e-13)
    dense = np.linalg.svd(both.jacobian(X).to_dense(), compute_uv=False)[0]
    assert local_lipschitz(both, X).particle == pytest.approx(dense, rel=1e-9)


def test_huge_logits_and_one_token(rng: Rng) -> None:
    a = head(rng)
    X = 1e3 * rng.normal(size=(6, 3))
    assert np.isfinite(a.on_tokens(X)).all()
    assert np.isfinite(a.jacobian(X).to_dense()).all()
    one = a.jacobian(X[:1]).to_dense()
    np.testing.assert_allclose(one, a.V, atol=1e-12)
    with pytest.raises(OverflowError):
        a.on_tokens(1e200 * X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "pairs"}, "layout must be one of"),
        ({"rotary_dim": 3}, "rotary_dim must be even"),
        ({"rotary_dim": 6}, "at most k = 4"),
        ({"base": 1.0}, "base must be above 1"),
        ({"frequencies": [1.0, 0.5, 0.1]}, "at most k = 4, received 6"),
        ({"frequencies": [1.0], "rotary_dim": 4}, "twice the number of frequencies, received 4 and 1"),
        ({"frequencies": [np.nan]}, "frequencies must be finite"),
        ({"base": np.nan}, "base must be finite"),
        ({"length": 0.0}, "length"),
        ({"query_bias": [1.0]}, "query_bias must have 4 entries"),
        ({"value_bias": [1.0]}, "value_bias must have 2 entries"),
    ],
)
def test_bad_options(rng: Rng, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head(rng, **options)


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match="rotary_dim must be even"):
        RotaryAttention(np.eye(3), np.eye(3), np.eye(3))
    with pytest.raises(ValueError, match="K must have shape"):
        RotaryAttention(np.eye(2), np.ones((2, 3)), np.eye(2))
    a = RotaryAttention(np.eye(2), np.eye(2), np.eye(2))
    with pytest.raises(ValueError, match="V must have shape"):
        a.with_factors(np.ones((2, 5)), np.ones((2, 5)), np.ones((3, 5)))
    with pytest.raises(TypeError, match="times"):
        a.pushforward(DiscreteMeasure([[1.0, 2.0]]))
