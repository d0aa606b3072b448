"""Attention with composed logits against plain loops over tokens, one recipe a model family, values and derivatives."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import pytest

import otattn as oa
from otattn.attention import Mask, PositionBias, Rotation, ScoreAttention, alibi_slopes, grouped_queries

N, D, K, E = 7, 3, 4, 2
Rng = np.random.Generator


@pytest.fixture
def rng() -> Rng:
    return np.random.default_rng(8)


@dataclass
class Naive:
    """One head in plain loops; numbers may be complex (for derivatives by complex step)."""

    Q: Any
    K: Any
    V: Any
    bq: Any
    bk: Any
    bv: Any
    scale: float
    gain: Any = None
    eps: float = 0.0
    omega: Sequence[float] = ()
    adjacent: bool = False
    beta: Callable[[int, int], float] = lambda i, j: 0.0
    cap: float | None = None
    sees: Callable[[int, int], bool] = lambda i, j: True
    sink: float | None = None
    value_eps: float | None = None

    def feature(self, W: Any, b: Any, x: Any, i: int) -> Any:
        z = W @ x + b
        if self.gain is not None:
            z = self.gain * z / np.sqrt((z * z).sum() / len(z) + self.eps)
        out, r = np.array(z), 2 * len(self.omega)
        for t, w in enumerate(self.omega):
            a, c = (2 * t, 2 * t + 1) if self.adjacent else (t, t + r // 2)
            out[a] = z[a] * math.cos(i * w) - z[c] * math.sin(i * w)
            out[c] = z[a] * math.sin(i * w) + z[c] * math.cos(i * w)
        return out

    def __call__(self, X: Any) -> Any:
        rows = []
        for i in range(len(X)):
            top, terms = (0.0, []) if self.sink is None else (self.sink, [(self.sink, np.zeros(len(self.V)))])
            for j in range(len(X)):
                if not self.sees(i, j):
                    continue
                s = self.scale * (self.feature(self.Q, self.bq, X[i], i) * self.feature(self.K, self.bk, X[j], j)).sum()
                s = s if self.cap is None else self.cap * np.tanh(s / self.cap)
                v = self.V @ X[j] + self.bv
                if self.value_eps is not None:
                    v = v / np.sqrt((v * v).sum() / len(v) + self.value_eps)
                terms.append((s + self.beta(i, j), v))
            top = max(np.real(s) for s, _ in terms)
            rows.append(sum(np.exp(s - top) * v for s, v in terms) / sum(np.exp(s - top) for s, _ in terms))
        return np.array(rows)


TABLE = np.array([0.3, -1.0, 0.7, 0.2, 2.0])
BUCKETS = np.linspace(-1.0, 2.0, 8) ** 3
PATTERN = np.random.default_rng(2).random((N, N)) < 0.5
np.fill_diagonal(PATTERN, True)


def t5_bucket(offset: int, buckets: int, far: int, both: bool) -> int:
    """Raffel et al.: half of the buckets for exact offsets, the others up to ``far`` by logarithm."""
    start, away = 0, -offset
    if both:
        buckets //= 2
        start = buckets if offset > 0 else 0
        away = abs(offset)
    away = max(away, 0)
    near = buckets // 2
    if away < near:
        return start + away
    return start + min(buckets - 1, near + int(math.log(away / near) / math.log(far / near) * (buckets - near)))


OMEGA = (1.1, 0.2)
RMS = {"gain": np.array([1.2, 0.8, -0.5, 1.0]), "eps": 0.05}
ROTARY = {"omega": OMEGA}
causal = lambda i, j: j <= i  # noqa: E731
RECIPES: dict[str, tuple[dict, dict]] = {
    "bert": ({}, {}),
    "alibi": ({"bias": PositionBias(0.4), "mask": Mask()}, {"beta": lambda i, j: -0.4 * abs(i - j), "sees": causal}),
    "alibi-both-ways": ({"bias": PositionBias(0.4)}, {"beta": lambda i, j: -0.4 * abs(i - j)}),
    "table": (
        {"bias": PositionBias(table=TABLE), "scale": 1.0},
        {"beta": lambda i, j: TABLE[2 + max(-2, min(2, j - i))], "scale": 1.0},
    ),
    "t5": (
        {"bias": PositionBias.t5(BUCKETS, max_distance=5), "scale": 1.0},
        {"beta": lambda i, j: BUCKETS[t5_bucket(j - i, 8, 5, True)], "scale": 1.0},
    ),
    "t5-decoder": (
        {"bias": PositionBias.t5(BUCKETS, max_distance=6, bidirectional=False), "mask": Mask()},
        {"beta": lambda i, j: BUCKETS[t5_bucket(j - i, 8, 6, False)], "sees": causal},
    ),
    "gpt_neo": (
        {"mask": Mask(before=2), "scale": 1.0},
        {"sees": lambda i, j: 0 <= i - j <= 2, "scale": 1.0},
    ),
    "mistral": (
        {"mask": Mask(before=3), "rotation": Rotation(OMEGA)},
        {"sees": lambda i, j: 0 <= i - j <= 3, **ROTARY},
    ),
    "modernbert": (
        {"mask": Mask(False, before=2, after=2), "rotation": Rotation(OMEGA)},
        {"sees": lambda i, j: abs(i - j) <= 2, **ROTARY},
    ),
    "uneven-window": ({"mask": Mask(False, before=1, after=3)}, {"sees": lambda i, j: -3 <= i - j <= 1}),
    "blocks": (
        {"mask": Mask.blocks([3, 2, 4], before=1)},
        {"sees": lambda i, j: 0 <= i - j <= 1 and (i < 3) == (j < 3) and (i < 5) == (j < 5)},
    ),
    "pattern": ({"mask": Mask(False, allowed=PATTERN)}, {"sees": lambda i, j: bool(PATTERN[i, j])}),
    "gpt_neox": ({"mask": Mask(), "rotation": Rotation(OMEGA[:1])}, {"sees": causal, "omega": OMEGA[:1]}),
    "adjacent": (
        {"mask": Mask(), "rotation": Rotation(OMEGA, layout="adjacent")},
        {"sees": causal, "adjacent": True, **ROTARY},
    ),
    "qwen3": (
        {
            "mask": Mask(),
            "rotation": Rotation(OMEGA),
            "query_norm": oa.RMSNorm(RMS["gain"], eps=0.05),
            "key_norm": oa.RMSNorm(RMS["gain"], eps=0.05),
        },
        {"sees": causal, **ROTARY, **RMS},
    ),
    "cosine": (
        {"query_norm": oa.RMSNorm([0.5] * K), "key_norm": oa.RMSNorm([0.5] * K), "scale": 7.0},
        {"gain": np.full(K, 0.5), "scale": 7.0},
    ),
    "gemma2": (
        {"mask": Mask(before=4), "rotation": Rotation(OMEGA), "cap": 0.6, "scale": 0.9},
        {"sees": lambda i, j: 0 <= i - j <= 4, "cap": 0.6, "scale": 0.9, **ROTARY},
    ),
    "gpt_oss": (
        {"mask": Mask(before=1), "rotation": Rotation(OMEGA), "sink": 0.7},
        {"sees": lambda i, j: 0 <= i - j <= 1, "sink": 0.7, **ROTARY},
    ),
    "all": (
        {
            "mask": Mask(before=3),
            "rotation": Rotation(OMEGA),
            "bias": PositionBias(0.2, table=TABLE),
            "query_norm": oa.RMSNorm(RMS["gain"], eps=0.05),
            "key_norm": oa.RMSNorm(RMS["gain"], eps=0.05),
            "value_norm": oa.RMSNorm(np.ones(E), eps=0.1),
            "cap": 1.5,
            "sink": -0.4,
        },
        {
            "sees": lambda i, j: 0 <= i - j <= 3,
            "beta": lambda i, j: -0.2 * abs(i - j) + TABLE[2 + max(-2, min(2, j - i))],
            "cap": 1.5,
            "sink": -0.4,
            "value_eps": 0.1,
            **ROTARY,
            **RMS,
        },
    ),
}


def both(rng: Rng, name: str) -> tuple[ScoreAttention, Naive]:
    parts, plain = RECIPES[name]
    Q, Kk, V = (rng.normal(size=shape) for shape in ((K, D), (K, D), (E, D)))
    bq, bk, bv = rng.normal(size=K), rng.normal(size=K), rng.normal(size=E)
    ours = ScoreAttention(Q, Kk, V, query_bias=bq, key_bias=bk, value_bias=bv, **parts)
    return ours, Naive(Q, Kk, V, bq, bk, bv, **{"scale": 0.5, **plain})


@pytest.mark.parametrize("name", RECIPES)
def test_values_and_derivatives_are_those_of_plain_loops(rng: Rng, name: str) -> None:
    ours, plain = both(rng, name)
    X = rng.normal(size=(N, D))
    np.testing.assert_allclose(ours.on_tokens(X), plain(X), rtol=0, atol=2e-14)
    J, h = ours.jacobian(X), 1e-30
    for _ in range(2):
        v, g = rng.normal(size=(N, D)), rng.normal(size=(N, E))
        slope = np.imag(plain(X + 1j * h * v)) / h
        np.testing.assert_allclose(J.jvp(v), slope, rtol=0, atol=1e-13 * max(1.0, np.abs(slope).max()))
        assert np.sum(J.vjp(g) * v) == pytest.approx(np.sum(g * slope), rel=1e-11, abs=1e-13)
    np.testing.assert_allclose(J.to_dense() @ v.ravel(), slope.ravel(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "all"])
@pytest.mark.parametrize("size", [1e-6, 1e3, 1e8])
def test_tokens_of_any_size_against_fifty_digits(rng: Rng, name: str, size: float) -> None:
    """Large logits: what float64 gives is what fifty digits give, but for the rounding of the logits themselves."""
    ours, plain = both(rng, name)
    X = size * rng.normal(size=(N, D))
    with mpmath.workdps(50):
        exact = lambda a: np.vectorize(mpmath.mpf)(a)  # noqa: E731
        table = {name: exact(getattr(plain, name)) for name in ("Q", "K", "V", "bq", "bk", "bv")}
        if plain.gain is not None:
            table["gain"] = exact(plain.gain)
        rows = _in_mpmath(Naive(**{**plain.__dict__, **table}), exact(X))
        expected = np.array(rows, dtype=float)
    # logits of this size are rounded by that much; a soft cap and norms keep them small
    logits = 1.0 if name != "gpt_oss" else 1.0 + size**2
    scale = max(1.0, np.abs(expected).max())
    if logits < 1e9:
        np.testing.assert_allclose(ours.on_tokens(X), expected, rtol=0, atol=min(1e-7, 1e-14 * logits) * scale)
    assert np.isfinite(ours.jacobian(X).to_dense()).all()


def _in_mpmath(plain: Naive, X: Any) -> list[list[Any]]:
    sqrt, tanh, exp = (np.frompyfunc(f, 1, 1) for f in (mpmath.sqrt, mpmath.tanh, mpmath.exp))
    rows = []
    for i in range(len(X)):
        terms = [] if plain.sink is None else [(mpmath.mpf(plain.sink), X[0][:E] * 0)]
        for j in range(len(X)):
            if not plain.sees(i, j):
                continue
            features = []
            for W, b, at in ((plain.Q, plain.bq, i), (plain.K, plain.bk, j)):
                z = W @ X[at] + b
                if plain.gain is not None:
                    z = plain.gain * z / sqrt((z * z).sum() / len(z) + plain.eps)
                out, r = np.array(z), 2 * len(plain.omega)
                for t, w in enumerate(plain.omega):
                    c, s = mpmath.cos(at * mpmath.mpf(w)), mpmath.sin(at * mpmath.mpf(w))
                    out[t], out[t + r // 2] = z[t] * c - z[t + r // 2] * s, z[t] * s + z[t + r // 2] * c
                features.append(out)
            score = plain.scale * (features[0] * features[1]).sum()
            score = score if plain.cap is None else plain.cap * tanh(score / plain.cap)
            v = plain.V @ X[j] + plain.bv
            if plain.value_eps is not None:
                v = v / sqrt((v * v).sum() / len(v) + plain.value_eps)
            terms.append((score + plain.beta(i, j), v))
        weights = [exp(s) for s, _ in terms]
        rows.append(list(sum(w * v for w, (_, v) in zip(weights, terms, strict=True)) / sum(weights)))
    return rows


def test_without_parts_it_is_softmax_attention_on_any_measure(rng: Rng) -> None:
    Q, Kk, V, bq = (rng.normal(size=s) for s in ((K, D), (K, D), (E, D), K))
    ours = ScoreAttention(Q, Kk, V, query_bias=bq, key_bias=rng.normal(size=K))
    softmax = oa.SoftmaxAttention.from_qkv(Q, Kk, V, query_bias=bq)
    mu = oa.DiscreteMeasure(rng.normal(size=(5, D)), [0.1, 0.2, 0.3, 0.15, 0.25])
    assert not ours.causal
    np.testing.assert_allclose(ours.pushforward(mu).points, softmax.pushforward(mu).points, atol=1e-14)
    masked = ScoreAttention(Q, Kk, V, query_bias=bq, mask=Mask())
    nu = oa.SpaceTimeMeasure([0.2, 0.9, 0.2, 0.5, 1.0], mu.points, mu.weights)
    expected = oa.MaskedAttention(softmax).pushforward(nu).points
    np.testing.assert_allclose(masked.pushforward(nu).points, expected, atol=1e-14)
    rotary = oa.RotaryAttention(Q, Kk, V, frequencies=OMEGA, layout="half", query_bias=bq, masked=False, length=9.0)
    turned = ScoreAttention(Q, Kk, V, query_bias=bq, rotation=Rotation(OMEGA), length=9.0)
    np.testing.assert_allclose(turned.pushforward(nu).points, rotary.pushforward(nu).points, atol=1e-13)


def test_a_sink_is_one_more_token_of_value_zero(rng: Rng) -> None:
    Q, Kk, V = rng.normal(size=(3, D, D))
    X = rng.normal(size=(5, D))
    ours = ScoreAttention(Q, Kk, V, sink=0.0, length=5.0)
    # a token at the origin has logit 0 and value 0
    seen = oa.DiscreteMeasure(np.vstack([X, np.zeros(D)]))
    expected = oa.SoftmaxAttention.from_qkv(Q, Kk, V)(X, seen)
    np.testing.assert_allclose(ours.on_tokens(X), expected, atol=1e-14)
    assert np.abs(ScoreAttention(Q, Kk, V, sink=40.0, length=1.0).on_tokens(X)).max() < 1e-10
    np.testing.assert_allclose(
        ScoreAttention(Q, Kk, V, sink=-60.0, length=1.0).on_tokens(X),
        oa.SoftmaxAttention.from_qkv(Q, Kk, V).on_tokens(X),
        atol=1e-13,
    )


def test_the_cap_bounds_the_weights_whatever_the_tokens(rng: Rng) -> None:
    ours = ScoreAttention(np.eye(1), np.eye(1), np.eye(1), cap=0.5)
    X = np.array([[-1e9], [1e9]])
    # logits are -0.5 and 0.5 for the second token
    weight = 1.0 / (1.0 + math.exp(-1.0))
    np.testing.assert_allclose(ours.on_tokens(X)[1], 1e9 * (2.0 * weight - 1.0), rtol=1e-14)


@pytest.mark.parametrize(("heads", "expected"), [(1, [2**-8]), (4, [2**-2, 2**-4, 2**-6, 2**-8])])
def test_slopes_of_alibi(heads: int, expected: list[float]) -> None:
    np.testing.assert_allclose(alibi_slopes(heads), expected, rtol=1e-15)
    np.testing.assert_allclose(alibi_slopes(3), [2**-4, 2**-8, 2**-2], rtol=1e-15)


@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets_of_t5(both_ways: bool) -> None:
    """32 buckets up to 128: whole offsets, as the paper says; logarithms at powers of two are exact in both."""
    bias = PositionBias.t5(np.arange(32.0), bidirectional=both_ways)
    offsets = np.arange(-200, 201)
    expected = [t5_bucket(int(o), 32, 128, both_ways) for o in np.clip(offsets, -128, 128)]
    agree = bias.at(offsets.astype(float)) == np.array(expected)
    # ends of buckets where a logarithm is a whole number: float64 may round it down, float32 does not
    whole = np.isin(np.abs(offsets), [16, 32, 64])
    assert agree[~whole].all()
    assert bias.at(np.array([-16.0, -32.0, -64.0])).tolist() == ([10, 12, 14] if both_ways else [16, 21, 26])


def test_grouped_queries_share_keys_and_values(rng: Rng) -> None:
    Q, Kk, V, W = (rng.normal(size=s) for s in ((4 * K, D), (2 * K, D), (2 * E, D), (D, 4 * E)))
    bq, bk, bv, bo = (rng.normal(size=s) for s in (4 * K, 2 * K, 2 * E, D))
    own = [{"sink": 0.1 * h} for h in range(4)]
    biases = {"query_bias": bq, "key_bias": bk, "value_bias": bv, "output_bias": bo}
    whole = grouped_queries(Q, Kk, V, W, num_heads=4, num_kv_heads=2, per_head=own, mask=Mask(), **biases)
    X = rng.normal(size=(N, D))
    total = bo + np.zeros((N, D))
    for h in range(4):
        g = h // 2
        q, k, v = slice(h * K, (h + 1) * K), slice(g * K, (g + 1) * K), slice(g * E, (g + 1) * E)
        plain = Naive(Q[q], Kk[k], V[v], bq[q], bk[k], bv[v], 0.5, sees=causal, sink=0.1 * h)
        total = total + plain(X) @ W[:, h * E : (h + 1) * E].T
    np.testing.assert_allclose(whole.on_tokens(X), total, atol=1e-13)
    with pytest.raises(ValueError, match="must fit 4 heads of queries and 3 of keys"):
        grouped_queries(Q, Kk, V, W, num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="per_head must have one entry a head, received 1 for 4"):
        grouped_queries(Q, Kk, V, W, num_heads=4, num_kv_heads=2, per_head=[{}])


def test_gates(rng: Rng) -> None:
    X, G, g = rng.normal(size=(N, D)), rng.normal(size=(E, D)), rng.normal(size=E)
    ours, plain = both(rng, "gpt_oss")
    gated = oa.GatedAttention(ours, G, g)

    def by_hand(Y: np.ndarray) -> np.ndarray:
        return plain(Y) / (1.0 + np.exp(-(Y @ G.T + g)))

    np.testing.assert_allclose(gated.on_tokens(X), by_hand(X), atol=1e-14)
    v = rng.normal(size=X.shape)
    slope = np.imag(by_hand(X + 1e-30j * v)) / 1e-30
    np.testing.assert_allclose(gated.jacobian(X).jvp(v), slope, atol=1e-13)
    assert np.isfinite(gated.on_tokens(1e4 * X)).all()
    with pytest.raises(ValueError, match="gate must have 1 or 2 rows"):
        oa.GatedAttention(ours, np.ones((3, D)))
    with pytest.raises(TypeError, match="says its value dimension, received FunctionAttention"):
        oa.GatedAttention(oa.FunctionAttention(lambda x, mu: x), G)


def test_a_prefix_does_not_feel_later_tokens(rng: Rng) -> None:
    for name in ("all", "gpt_oss", "mistral"):
        ours, _ = both(rng, name)
        X = rng.normal(size=(N, D))
        changed = X.copy()
        changed[4:] = 1e6
        np.testing.assert_array_equal(ours.on_tokens(changed)[:4], ours.on_tokens(X)[:4])


def test_studies_local_constants_lower_bounds_and_flows(rng: Rng) -> None:
    ours, _ = both(rng, "all")
    X = rng.normal(size=(N, D))
    local = oa.local_lipschitz(ours, X)
    assert local.value == pytest.approx(np.linalg.norm(ours.jacobian(X).to_dense(), 2), rel=1e-9)
    pairs = oa.samplers.perturbation_pairs(oa.SpaceTimeMeasure.from_sequence(X), 1e-4)
    study = oa.stability_study(ours, pairs, n_pairs=10, rng=1, progress=False)
    assert 0.0 < study.best.value <= local.value * 1.01
    bound = oa.lipschitz_lower_bound(ours, radius=1.0, n=2, rng=0)
    assert bound.value == pytest.approx(oa.local_lipschitz(ours, bound.witness).value, rel=1e-8)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"cap": 0.0}, ValueError, "cap must be finite and positive"),
        ({"sink": np.nan}, ValueError, "sink must be finite"),
        ({"mask": "causal"}, TypeError, "mask must be a Mask, received str"),
        ({"bias": np.zeros(3)}, TypeError, "bias must be a PositionBias, received ndarray"),
        ({"rotation": Rotation([1.0, 1.0, 1.0])}, ValueError, "at most k = 4 coordinates, received 3 pairs"),
        ({"query_norm": oa.RMSNorm(np.ones(3))}, ValueError, "query_norm must be a token-wise map of dimension 4"),
        ({"value_norm": 1e-6}, ValueError, "value_norm must be a token-wise map of dimension 2, .* received float"),
        ({"key_bias": np.zeros(3)}, ValueError, "key_bias must have 4 entries"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ScoreAttention(np.eye(4)[:, :3], np.eye(4)[:, :3], np.eye(2, 3), **parts)


def test_positions_that_do_not_fit_are_refused(rng: Rng) -> None:
    for make, message in (
        (lambda: Rotation([1.0], layout="pairs"), "layout must be one of"),
        (lambda: Rotation.of_base(10.0, 3), "dim must be even"),
        (lambda: Rotation.of_base(1.0, 2), "base above 1"),
        (lambda: PositionBias(table=[1.0, 2.0]), "odd number of entries"),
        (lambda: PositionBias.t5(np.zeros(6)), "multiple of 4"),
        (lambda: PositionBias.t5(np.zeros(32), max_distance=8), "few against max_distance"),
        (lambda: Mask(before=-1.0), "before must be finite and non-negative"),
        (lambda: Mask(allowed=np.ones((2, 2))), "square array of bool"),
        (lambda: Mask(allowed=np.ones((2, 3), dtype=bool)), "square array of bool"),
        (lambda: Mask.blocks([2, 0]), "sizes must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    head = ScoreAttention(np.eye(2), np.eye(2), np.eye(2), mask=Mask(allowed=np.ones((3, 3), dtype=bool)))
    with pytest.raises(ValueError, match="positions must be at most 3, the size of allowed, received 4"):
        head.on_tokens(np.ones((4, 2)))
    blind = ScoreAttention(np.eye(2), np.eye(2), np.eye(2), mask=Mask(allowed=np.zeros((3, 3), dtype=bool)))
    with pytest.raises(ValueError, match="every row must see an atom"):
        blind.on_tokens(np.ones((3, 2)))
    with pytest.raises(OverflowError):
        ScoreAttention(np.eye(2), np.eye(2), np.eye(2)).on_tokens([[1e200, 0.0], [-1e200, 0.0]])
