"""Certificates of heads with composed logits: derivatives against differences in 40 digits, and what climbs inside the balls."""

from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest
from climbing import climbed, directions, norm
from exact_maps import derivatives, layer_norm, matrix, score

import otattn as oa
from otattn.attention.scores import Mask, PositionBias, Rotation, ScoreAttention
from otattn.lipschitz.near import capped, gram_hessian
from otattn.lipschitz.near.build import _path, chain_at
from otattn.lipschitz.near.capped import CapTerms, capped_hessian
from otattn.lipschitz.near.gram_jacobian import jacobian_norm, with_outputs
from otattn.lipschitz.near.head import sink_terms
from otattn.lipschitz.near.heads import heads_at
from otattn.lipschitz.near.normed import BlockNorms
from otattn.lipschitz.near.rotary import lifted
from otattn.lipschitz.near.third_order import third_order

rng = np.random.default_rng(5)
X = rng.standard_normal((4, 3))


def drawn(*shape):
    return rng.standard_normal(shape)


def head(**options):
    return ScoreAttention(drawn(4, 3), drawn(4, 3), drawn(2, 3), **options)


def biases():
    return {"query_bias": drawn(4), "key_bias": drawn(4), "value_bias": drawn(2)}


BARE = {
    "plain": head(**biases()),
    "window": head(mask=Mask(before=1), **biases()),
    "two sides": head(mask=Mask(False, before=1, after=2)),
    "blocks": head(mask=Mask.blocks([2, 2], causal=False)),
    "alibi": head(bias=PositionBias(0.5), mask=Mask()),
    "table": head(scale=0.7, bias=PositionBias(table=drawn(5))),
    "sink": head(sink=0.5),
    "sink of a length": head(sink=0.5, length=3.0, query_bias=drawn(4)),
    "strong sink": head(sink=4.0, mask=Mask(before=2), bias=PositionBias(0.1)),
}
LIFTED = {
    "turned": head(rotation=Rotation.of_base(10.0, 4), mask=Mask(before=1), **biases()),
    "turned in part": head(rotation=Rotation.of_base(10.0, 2, layout="adjacent"), bias=PositionBias(0.3)),
    "biases and a sink": head(sink=0.5, **biases()),
    "turned and a sink": head(sink=1.0, rotation=Rotation.of_base(10.0, 4), mask=Mask(before=2), **biases()),
}


def root(k, eps=1e-6):
    return oa.RMSNorm(1.0 + 0.3 * drawn(k), eps=eps)


KEYS = root(4)
NORMED = {
    "QK-norm": head(query_norm=root(4), key_norm=root(4), rotation=Rotation.of_base(10.0, 4), mask=Mask(before=2)),
    "cosine": head(query_norm=oa.RMSNorm(np.full(4, 0.5)), key_norm=oa.RMSNorm(np.full(4, 0.5)), value_bias=drawn(2)),
    "all normed": head(
        query_norm=oa.LayerNorm(drawn(4), drawn(4), eps=1e-2), key_norm=root(4), value_norm=root(2, 1e-1), sink=0.3
    ),
    "one normed": oa.MultiHeadAttention(
        [head(query_norm=root(4, 1e-2)), head(**biases())], [drawn(3, 2), drawn(3, 2)], output_bias=drawn(3)
    ),
}
CAPPED = {
    "cap": head(cap=1.0, query_bias=drawn(4), value_bias=drawn(2)),
    "high cap": head(cap=20.0, bias=PositionBias(0.2)),
    "cap and sink": head(cap=2.0, sink=0.5, mask=Mask(before=2)),
    "several caps": oa.MultiHeadAttention(
        [head(cap=1.0, mask=Mask(before=1)), head(cap=3.0, mask=Mask())], [drawn(3, 2), drawn(3, 2)]
    ),
    "turned cap": head(cap=3.0, rotation=Rotation.of_base(10.0, 4), mask=Mask(before=2), **biases()),
    "normed cap": head(cap=1.0, query_norm=root(4), key_norm=root(4, 1e-2), key_bias=drawn(4)),
}
SEVERAL = {
    "several": oa.MultiHeadAttention(
        [head(mask=Mask(before=1), sink=0.3), head(mask=Mask(), sink=-0.2)],
        [drawn(3, 2), drawn(3, 2)],
        output_bias=drawn(3),
    ),
    "several turned": oa.MultiHeadAttention(
        [head(mask=Mask(before=b), rotation=Rotation.of_base(10.0, 4), sink=s) for b, s in ((1, 0.3), (2, -0.2))]
    ),
}
ALL = BARE | LIFTED | NORMED | CAPPED | SEVERAL


@pytest.fixture(autouse=True)
def _seeded():
    """Each test draws the same numbers, whichever run before it."""
    global rng
    rng = np.random.default_rng(9)


def exact(attention):
    parts = getattr(attention, "heads", (attention,))
    outputs = getattr(attention, "outputs", None) or [None] * len(parts)

    def f(x):
        out = score(x, parts[0], outputs[0])
        for h, W in zip(parts[1:], outputs[1:], strict=True):
            out += score(x, h, W)
        return out

    return f


@pytest.mark.parametrize(
    "name", ["window", "table", "sink", "strong sink", "several", "cap", "high cap", "cap and sink", "several caps"]
)
def test_no_direction_exceeds_the_second_and_third_order(name):
    attention = ALL[name]
    heads = heads_at(attention, X).heads
    C = (capped_hessian if name in CAPPED else gram_hessian.hessian_norm)(heads).norm
    W = [1.0 if h.W is None else np.linalg.norm(h.W, 2) for h in heads]
    D3 = sum(w * third_order(h)(0.0) for w, h in zip(W, heads, strict=True))
    found = [derivatives(exact(attention), X, D) for D in directions(rng, X.shape, 9)]
    seconds, thirds = ([row[k] for row in found] for k in (1, 2))
    assert max(seconds) <= C <= 40.0 * max(seconds)  # a bound that is never near would prove nothing
    assert max(thirds) <= D3
    assert max(row[0] for row in found) <= jacobian_norm(heads)[1]


@pytest.mark.parametrize("name", ["sink", "strong sink", "cap", "cap and sink", "high cap"])
def test_third_order_over_the_ball(name):
    D3 = third_order(heads_at(ALL[name], X).heads[0])
    assert D3(0.0) <= D3(0.02) <= D3(0.1) < np.inf
    for D in directions(rng, X.shape, 3):
        E = next(directions(rng, X.shape, 1))
        assert derivatives(exact(ALL[name]), X + 0.05 * E, D)[2] <= D3(0.05)


def test_a_lone_token_before_a_sink():
    """One token whose row is its own and the sink's: its second derivative is that of the own token's terms alone."""
    for sink in (-1.0, 1.0, 4.0):
        attention = head(sink=sink)
        Y = 2.0 * drawn(1, 3)
        heads = heads_at(attention, Y).heads
        found = [derivatives(exact(attention), Y, D) for D in directions(rng, Y.shape, 9)]
        assert sink_terms(heads) > 0.0
        assert max(row[1] for row in found) <= gram_hessian.hessian_norm(heads).norm
        assert max(row[2] for row in found) <= third_order(heads[0])(0.0)


@pytest.mark.parametrize("cap", [None, 0.8])
def test_the_gram_matrix_of_rows_with_a_sink(cap):
    """Queries frozen, every second derivative by differences in 40 digits."""
    attention = ScoreAttention(np.eye(2), drawn(2, 2), drawn(2, 2), scale=1.0, sink=0.4, cap=cap, mask=Mask(before=1))
    n, Y = 3, drawn(3, 2)
    row = gram_hessian._row if cap is None else capped._row
    G = with_outputs([heads_at(attention, Y).heads[0].moving], row)
    G = np.tril(G) + np.tril(G, -1).T
    queries, zeta = Y @ attention.K, drawn(n, 2)  # g = K^T x

    def value(y):
        total = mp.mpf(0)
        for i in range(n):
            seen = range(max(i - 1, 0), i + 1)
            z = [mp.fsum(mp.mpf(float(queries[i, k])) * y[j, k] for k in range(2)) for j in seen]
            p = [mp.exp(a if cap is None else cap * mp.tanh(a / cap)) for a in z]
            for e in range(2):
                v = [mp.fsum(mp.mpf(float(attention.V[e, k])) * y[j, k] for k in range(2)) for j in seen]
                top = mp.fsum(a * b for a, b in zip(p, v, strict=True))
                total += mp.mpf(float(zeta[i, e])) * top / (mp.fsum(p) + mp.exp(mp.mpf(0.4)))
        return total

    with mp.workdps(40):
        x, h, square = matrix(Y), mp.mpf(10) ** -9, mp.mpf(0)
        for a in range(2 * n):
            for b in range(2 * n):
                moved = []
                for s, t in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
                    y = x.copy()
                    y[a // 2, a % 2] += s * h
                    y[b // 2, b % 2] += t * h
                    moved.append(value(y))
                square += ((moved[0] - moved[1] - moved[2] + moved[3]) / (4 * h * h)) ** 2
    assert float(zeta.ravel() @ G @ zeta.ravel()) == pytest.approx(float(square), rel=1e-9)


FEW = ["window", "strong sink", "turned and a sink", "QK-norm", "cap and sink"]
EACH = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in ALL if name not in FEW)]


@pytest.mark.parametrize("name", ALL)
def test_it_tends_to_the_local_constant(name):
    attention = ALL[name]
    here = norm(attention, X)
    for kind in ("pairs", "constant"):
        bounds = [oa.certify(attention, X, radius=rho, kind=kind) for rho in (1e-5, 1e-7, 1e-12)]
        values = [b.value for b in bounds]
        assert values == sorted(values, reverse=True)
        assert here * (1 - 1e-12) <= values[-1] <= here * (1 + 1e-6)
        assert bounds[0].details["how"] == ("margins" if name in [*NORMED, "normed cap"] else "proved")


@pytest.mark.parametrize("name", EACH)
def test_nothing_climbs_above(name):
    attention = ALL[name]
    for kind in ("pairs", "constant"):
        bound = oa.certify(attention, X, radius=1e-4 if name in NORMED else 1e-3, kind=kind)
        found = climbed(attention, X, bound.domain.radius * np.sqrt(len(X)), rng, kind == "constant", 4, 8)
        assert norm(attention, X) * 0.8 < found <= bound.value <= 3.0 * norm(attention, X)


@pytest.mark.parametrize(("name", "far"), [(name, 0.0) for name in ALL] + [("sink", 1e4), ("turned and a sink", 3.0)])
def test_images_hold_the_exact_ones(name, far):
    """Against 40 digits, tokens at the origin and far from it, where large numbers cancel."""
    attention, tokens = ALL[name], X * (1.0 if far == 0.0 else 1e-3) + far
    chain, image = chain_at(attention, tokens), _path(attention, tokens)[-1].image
    with mp.workdps(40):
        true = exact(attention)(matrix(tokens))
        bias = getattr(attention, "output_bias", None)
        if bias is not None:
            true += mp.ones(len(X), 1) * matrix(bias)
        lost = mp.mnorm(matrix(image) - true, "f")
    assert lost <= chain.image_error < 1e-9 * (1.0 + float(np.abs(tokens).max()))


@pytest.mark.parametrize(
    ("name", "far"),
    [("sink", 0.0), ("sink", 1e4), ("QK-norm", 0.0), ("several", 0.0), ("several caps", 0.0), ("cap and sink", 5.0)],
)
def test_the_norm_of_the_jacobian_is_never_below_the_exact_one(name, far):
    attention, tokens = ALL[name], X[:3] * (1.0 if far == 0.0 else 1e-3) + far
    chain = chain_at(attention, tokens)
    with mp.workdps(60):
        x, h, f = matrix(tokens), mp.mpf(10) ** -25, exact(attention)
        columns = []
        for a in range(tokens.size):
            step = mp.zeros(*tokens.shape)
            step[a // 3, a % 3] = h
            columns.append(list((f(x + step) - f(x - step)) / (2 * h)))
        J = mp.matrix(columns)
        square = max(mp.eigsy(J * J.T, eigvals_only=True))
    assert mp.mpf(chain.norm) >= mp.sqrt(square) * (1 - mp.mpf(10) ** -20)
    assert far > 0.0 or chain.norm <= float(mp.sqrt(square)) * (1 + 1e-8)


@pytest.mark.parametrize("turned", [False, True])
def test_norms_of_blocks(turned):
    """Derivatives in 40 digits of ``left N(right z)``, N a norm of three of five coordinates and one of the other two."""
    blocks = BlockNorms(((slice(0, 3), oa.LayerNorm(drawn(3), eps=1e-2)), (slice(3, 5), root(2, 1e-1))), 6)
    left, right = (drawn(6, 6) if turned else np.eye(6) for _ in range(2))
    z = drawn(2, 6)
    found = blocks.expansion(z @ right.T, *((left, right) if turned else (None, None)))

    def f(x):
        y = x * matrix(right).T
        parts = [layer_norm(y[:, b.start : b.stop], n.gain, n.eps, n.center) for b, n in blocks.norms]
        for (b, _), part in zip(blocks.norms, parts, strict=True):
            for i in range(y.rows):
                for t in range(part.cols):
                    y[i, b.start + t] = part[i, t]
        return y * matrix(left).T

    values = [derivatives(f, z, D) for D in directions(rng, z.shape, 60)]
    assert 0.05 * found.second <= max(v[1] for v in values) <= found.second
    assert 0.01 * found.third(0.0) <= max(v[2] for v in values) <= found.third(0.0)
    v, g = drawn(2, 6), drawn(2, 6)
    assert np.sum(blocks._jvp(z, v) * g) == pytest.approx(np.sum(v * blocks._vjp(z, g)), rel=1e-12)
    value, slope = blocks.errors(z)
    assert 0.0 < value < 1e-11 > slope > 0.0


def test_norms_of_blocks_in_other_scales():
    blocks = BlockNorms(((slice(0, 3), root(3)), (slice(3, 5), root(2))), 5)
    x, twice = drawn(2, 5), 2.0 * np.eye(5)
    plain, inner, outer = (blocks.expansion(x, *sides) for sides in ((None, None), (None, twice), (twice, None)))
    assert inner.second == pytest.approx(4.0 * plain.second)
    assert inner.third(0.0) == pytest.approx(8.0 * plain.third(0.0))
    assert inner.third(0.1) == pytest.approx(8.0 * plain.third(0.2))
    assert outer.third(0.1) == pytest.approx(2.0 * plain.third(0.1))


def test_the_terms_of_a_cap():
    """One row of one token, each term alone."""
    one = np.ones(1)
    bend, jerk = CapTerms(one, one, 1.0, 0.0), CapTerms(one, 0.0 * one, 0.0, 1.0)
    # 6 y k q^2 + 6 v q^2 + 6 y q a, without a gradient
    assert bend.terms(0.5 * np.eye(1), 0.0 * one, 2.0 * np.eye(1), 3.0 * np.eye(1), 7.0, 5.0, 0.0) == 36.0 + 30.0 + 84.0
    still = CapTerms(0.0 * one, one, 1.0, 0.0)
    assert still.terms(0.5 * np.eye(1), one, np.eye(1), 0.0 * np.eye(1), 0.0, 0.0, 0.0) == 12.0 * 0.5 + (18.0 - 12.0)
    assert still.terms(0.5 * np.eye(1), one, 0.0 * np.eye(1), 0.0 * np.eye(1), 0.0, 2.0, 0.0) == 12.0 * 0.5
    assert jerk.terms(0.5 * np.eye(1), one, np.eye(1), np.eye(1), 0.0, 0.0, 0.0) == 0.5 + (8.0 - 1.0)
    assert jerk.bends(3.0 * one, 2.0)[0] == 0.0  # never above the supremum
    assert CapTerms(one, one, 9.0, 1.0).bends(3.0 * one, 2.0)[0] == 7.0


def test_norms_are_shared_and_scaled():
    """Heads that share keys and their norm have one block for them; without, or with another norm, two."""
    K, both = drawn(4, 3), drawn(2, 4, 3)
    for second, size in ((KEYS, 16), (root(4), 20), (None, 20)):
        heads = [ScoreAttention(Q, K, np.eye(3)[:2], key_norm=n) for Q, n in zip(both, (KEYS, second), strict=True)]
        lift, norms, turn, last = lifted(oa.MultiHeadAttention(heads), 4)
        assert len(lift.L) == norms.size == size - 2  # values are shared
        assert turn.L.shape == (size - 2, size - 2)
        placed = turn.images(norms._map(lift.images(X)[0]))[0]
        whole = oa.MultiHeadAttention(heads).on_tokens(X)
        assert np.allclose(last.on_tokens(placed), whole, rtol=0, atol=1e-13)


def test_a_mask_that_hides_all():
    attention = head(mask=Mask(False, before=1, allowed=np.zeros((4, 4), dtype=bool)))
    with pytest.raises(ValueError, match="every row must see an atom"):
        oa.certify(attention, X, radius=1e-3)
    assert oa.certify(
        head(mask=Mask(False, allowed=np.eye(4, dtype=bool)[::-1].copy())), X, radius=1e-6
    ).verify()  # another token each


@pytest.mark.parametrize("name", ["alibi", "turned and a sink"])
def test_tampered_certificates(name):
    attention = ALL[name]
    bound = oa.certify(attention, X, radius=1e-3)
    assert bound.verify()
    assert not replace(bound, value=bound.value * (1 - 1e-6)).verify()
    names = set(attention.__dataclass_fields__) - {"Q", "K", "V"}
    for field, values in (("bias", [PositionBias(s) for s in (-1.0, 2.0)]), ("sink", [-3.0, 2.0]), ("mask", [Mask()])):
        for value in values:
            kept = {n: getattr(attention, n) for n in names} | {field: value}
            other = ScoreAttention(attention.Q, attention.K, attention.V, **kept)
            steeper = oa.certify(other, X, radius=1e-3).value > bound.value
            assert replace(bound, attention=other).verify() == (not steeper)


@pytest.mark.parametrize("name", ["strong sink", "several turned", "one normed", "turned cap"])
def test_long_ones_by_products(name, monkeypatch):
    attention = ALL[name]
    monkeypatch.setattr("otattn.lipschitz.near.build.DENSE", 4)
    chain = chain_at(attention, X)
    assert norm(attention, X) <= chain.norm * (1 + 1e-9) <= norm(attention, X) * 1.05
    assert climbed(attention, X, 1e-4, rng) <= chain.stretch(1e-4)
    assert climbed(attention, X, 1e-4, rng, True) <= chain.constant(1e-4)
