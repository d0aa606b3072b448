"""Attention and the token-wise maps after it as one stage: budgets of single tokens, what climbs against it, coordinates, rounding."""

import numpy as np
import pytest
from scipy.optimize import linprog

import otattn as oa
from otattn.lipschitz.near import build, segment
from otattn.lipschitz.near.gram_jacobian import row_grams
from otattn.lipschitz.near.heads import heads_at, turned
from otattn.lipschitz.near.tokenwise import _powers
from otattn.models import FeedForward

rng = np.random.default_rng(3)
n, d = 4, 3


def drawn(*shape):
    return rng.standard_normal(shape)


HEADS = [oa.SoftmaxAttention(0.7 * drawn(d, d), drawn(2, d), bias=drawn(d)) for _ in "ab"]
SEVERAL = oa.MultiHeadAttention(HEADS, [drawn(d, 2), drawn(d, 2)], output_bias=drawn(d))
NORM, ROOT = oa.LayerNorm([1.0, 0.7, 1.3], drawn(d), eps=0.05), oa.RMSNorm([1.0, 0.7, 1.3], eps=0.05)
MLP = oa.MLP(drawn(5, d), drawn(5), drawn(d, 5))
GATED = FeedForward(drawn(5, d), drawn(d, 5), activation="silu", gate=drawn(5, d))
KINKED = oa.MLP(drawn(5, d), drawn(5), drawn(d, 5), activation="relu")
X = drawn(n, d)
MAPS = {
    "post": oa.TransformerBlock(SEVERAL, MLP, attention_norm=NORM, mlp_norm=ROOT, pre_norm=False),
    "masked": oa.TransformerBlock(
        oa.MaskedAttention(SEVERAL), GATED, attention_norm=ROOT, mlp_norm=NORM, pre_norm=False
    ),
    "plain heads": oa.Compose(SEVERAL, NORM, oa.Residual(MLP, scale=-0.4), oa.MLP(drawn(5, d), drawn(5), drawn(2, 5))),
    "one": oa.Compose(oa.Residual(SEVERAL, scale=0.3), ROOT),
    "relu": oa.Compose(oa.Residual(SEVERAL), KINKED, ROOT),
}


def run_of(attention, tokens=X):
    (run,) = build._segments(build._path(attention, tokens))
    assert isinstance(run, segment.Run)
    return run


def jacobian(attention, tokens):
    return attention.jacobian(tokens).to_dense().reshape(-1, tokens.size)


def placed(M, J, right):
    """``(I x M) J (I x right)``."""
    J = J if M is None else np.kron(np.eye(n), M) @ J
    return J if right is None else J @ np.kron(np.eye(n), right)


@pytest.mark.parametrize("turn", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", MAPS)
def test_nothing_leaves_the_remainder_and_the_growth(name, turn):
    """Displacements climbed along the difference from the linear map, in plain and in other coordinates."""
    attention, generator = MAPS[name], np.random.default_rng(1)
    e = 2 if name == "plain heads" else d
    left, right = (generator.standard_normal((e, e)), generator.standard_normal((d, d))) if turn else (None, None)
    found = run_of(attention).expansion(left, right)
    J, image = jacobian(attention, X), attention.on_tokens(X)
    L, R = (np.eye(k) if M is None else M for k, M in ((e, left), (d, right)))
    for r in (1e-4, 1e-2):
        best = grown = 0.0
        for start in range(2):
            D = generator.standard_normal(X.shape) * generator.random((n, 1)) ** (4 * (start % 2))
            for _ in range(4):
                D *= r / np.linalg.norm(D)
                Y = X + D @ R.T
                off = (attention.on_tokens(Y) - image - (J @ (D @ R.T).ravel()).reshape(image.shape)) @ L.T
                best = max(best, float(np.linalg.norm(off)))
                change = jacobian(attention, Y) - J
                grown = max(grown, float(np.linalg.norm(placed(left, change, right), 2)))
                D = (change.T @ (off @ L).ravel()).reshape(X.shape) @ R
                if not np.linalg.norm(D) > 0.0:
                    break
        assert best <= found.remainder(r)
        assert grown <= found.growth(r)
        assert name == "relu" or found.remainder(r) <= 300.0 * best or r > 1e-3
        assert found.remainder(r) < found.remainder(r, 1e-6) < found.remainder(r, 1e-5)
        assert found.growth(r) < found.growth(r, 1e-6) < found.growth(r, 1e-5)


def test_tokens_have_budgets_of_their_own():
    """At small radii the segment is below the chain of its stages, which charges the worst token for what all do."""
    for name in ("post", "masked", "plain heads"):
        chain = build._chain(build._path(MAPS[name], X), None, None)
        found = run_of(MAPS[name]).expansion(None, None)
        assert found.remainder(1e-5) < 0.7 * chain.remainder(1e-5)


def test_one_far_token_does_not_count():
    """A token whose row stretches much but whose norm is large bends little: only products of both count."""
    stretch = np.diag([3.0, 1.0, 1.0])
    tokens = np.array([[300.0, 1.0, -1.0], [1.0, 0.5, 2.0], [-1.0, 0.3, 0.1]])
    attention = oa.Compose(oa.SoftmaxAttention(np.eye(3), stretch), oa.RMSNorm(np.ones(3), eps=1e-6))
    both = run_of(attention, tokens).expansion(None, None)
    rest = run_of(attention, tokens[:1]).expansion(None, None)
    assert rest.remainder(1e-4) < 1e-2 * both.remainder(1e-4)


def test_the_greedy_sum_is_the_linear_program():
    generator = np.random.default_rng(0)
    for _ in range(40):
        size = int(generator.integers(1, 8))
        values, lengths = generator.random(size), 0.1 + generator.random(size)
        total = generator.random() * np.linalg.norm(lengths) * 1.2
        rates = (values / lengths) ** 2
        exact = linprog(
            -rates, A_ub=np.ones((1, size)), b_ub=[total**2], bounds=[(0.0, b * b) for b in lengths], method="highs"
        )
        assert segment._shared(values, lengths, total) == pytest.approx(np.sqrt(-exact.fun), rel=1e-7)
    assert segment._shared(np.zeros(2), np.zeros(2), 0.0) == 0.0
    assert segment._shared(np.array([1.0, np.inf]), np.ones(2), 1.0) == np.inf


@pytest.mark.parametrize("causal", [False, True])
def test_gram_matrices_of_the_rows(causal):
    attention = oa.MaskedAttention(SEVERAL) if causal else SEVERAL
    heads = heads_at(attention, X).heads
    right = drawn(d, d)
    J = jacobian(attention, X) @ np.kron(np.eye(n), right)
    for scale, residual in ((1.0, None), (-0.7, right)):
        found = row_grams(turned(heads, None, right), scale, residual)
        for i in range(n):
            row = scale * J[i * d : (i + 1) * d]
            if residual is not None:
                row = row + np.kron(np.eye(n)[i], right)
            exact = row @ row.T
            assert np.linalg.eigvalsh(found[i] - exact)[0] >= 0.0
            assert np.linalg.norm(found[i] - exact) <= 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", MAPS)
def test_the_coordinates(name):
    """Rows have norm at most 1 in them, all tokens together at most alpha, and the errors' factors are norms of products."""
    run = run_of(MAPS[name])
    seen = []

    def caught(i, left, right, make):
        seen.append((i, left, right))
        return make(i, left, right)

    first, stages = run.branches[0][0], run._stages
    wrapped = [
        segment.TokenStage(
            s.slopes, lambda i, a, b, make=s.expansion: caught(i, a, b, make), s.slope_error, s.image_error
        )
        for s in stages
    ]
    scale, residual = (1.0, None) if first.heads is not None else (first.map.scale, np.eye(d))
    grams = row_grams(run._heads, scale, residual)
    J = jacobian(first.map, X)

    def rows(T):
        return float(np.linalg.norm(np.concatenate([t @ J[i * d : (i + 1) * d] for i, t in enumerate(T)]), 2))

    frame = (np.diag([2.0, 1.0, 0.5]), np.diag([0.5, 1.0, 2.0]))
    left = drawn(3, run.jacobian.shape[2])
    found = segment.segment_of(first.expansion(frame[0], None), frame, grams, rows, wrapped, left, 0.0)
    lefts = {}
    for t, stage in enumerate(stages):
        whole = [np.linalg.inv(R) @ J[i * d : (i + 1) * d] for i, _, R in seen[t * n : (t + 1) * n]]
        assert max(np.linalg.norm(M, 2) for M in whole) <= 1.0
        assert np.linalg.norm(np.concatenate(whole), 2) <= found.alpha
        errors = [frame[1]] + [None] * t
        for i, Q, R in seen[t * n : (t + 1) * n]:
            lefts[t, i] = Q
            end = left
            for later in reversed(stages[t + 1 :]):
                end = end @ later.slopes[i]
            gap = Q.T @ Q - end.T @ end
            assert np.linalg.eigvalsh(gap)[0] >= -1e-12 * np.linalg.norm(gap)
            for u in range(t + 1):
                M = errors[0] if u == 0 else np.linalg.inv(lefts[u - 1, i])
                for between in stages[u:t]:
                    M = between.slopes[i] @ M
                assert found.k[t][u][i] >= np.linalg.norm(np.linalg.inv(R) @ M, 2) * (1 - 1e-9)
                assert found.k[t][u][i] <= np.linalg.norm(np.linalg.inv(R) @ M, 2) * (1 + 1e-6)
        J = np.concatenate([stage.slopes[i] @ J[i * d : (i + 1) * d] for i in range(n)])
        if t + 1 < len(stages):
            assert stage.slopes.shape[1] == d


def test_single_blocks_are_segments_and_stacks_are_not(monkeypatch):
    whole = oa.Compose(MAPS["post"], MAPS["masked"])
    for dense in (build.DENSE, 4):
        monkeypatch.setattr("otattn.lipschitz.near.build.DENSE", dense)
        assert len(build.chain_at(MAPS["post"], X).stages) == 1
        assert len(build.chain_at(whole, X).stages) == 8


def test_stacks_of_segments(monkeypatch):
    """Norms by products: a stack of two segments has two stages, and nothing climbs above its numbers."""
    monkeypatch.setattr("otattn.lipschitz.near.build.DENSE", 4)
    whole = oa.Compose(MAPS["post"], MAPS["masked"])
    chain = build._chain(build._segments(build._path(whole, X)), None, None)
    assert len(chain.stages) == 2
    assert chain.how == "probabilistic"
    J = jacobian(whole, X)
    assert np.linalg.norm(J, 2) <= chain.norm <= 1.05 * np.linalg.norm(J, 2)
    generator, image = np.random.default_rng(0), whole.on_tokens(X)
    for r in (1e-5, 1e-4):
        D = np.linalg.svd(J)[2][0].reshape(X.shape)
        for _ in range(10):
            D *= r / np.linalg.norm(D)
            moved = whole.on_tokens(X + D) - image
            assert np.linalg.norm(moved) <= r * chain.stretch(r)
            assert np.linalg.norm(jacobian(whole, X + D), 2) <= chain.constant(r)
            D = (jacobian(whole, X + D).T @ moved.ravel()).reshape(X.shape)
            D += 0.3 * np.linalg.norm(D) * generator.standard_normal(X.shape)


def test_rounding_is_small_and_counted():
    stage = run_of(MAPS["post"]).stage(None, None)
    assert 0.0 < stage.image_error < 1e-9
    assert 0.0 < stage.jacobian_error < 1e-7
    exact = jacobian(MAPS["post"], X)
    assert np.linalg.norm(stage.jacobian.matrix - exact, 2) <= stage.jacobian_error


def test_sums_of_powers():
    generator = np.random.default_rng(0)
    for shape in ((4, 3), (9, 2), (1, 5)):
        U = generator.standard_normal(shape)
        u = np.linalg.norm(U, axis=1)
        cubes, fourths = _powers(U @ U.T, u, float(np.linalg.norm(U, 2)))
        for k in range(200):
            D = U[k % len(U)] + (k % 3) * generator.standard_normal(shape[1])
            s = U @ D / np.linalg.norm(D)
            assert np.sqrt((s**6).sum()) <= cubes
            assert np.sqrt((s**8).sum()) <= fourths
        assert cubes <= u.max() ** 2 * np.linalg.norm(U, 2) * (1 + 1e-9)
    one = np.array([[3.0, 0.0], [0.0, 1.0]])
    assert _powers(one @ one.T, np.array([3.0, 1.0]), 3.0) == pytest.approx((27.0, 81.0), rel=1e-9)


@pytest.mark.parametrize("where", ["heads", "perceptron"])
def test_tokens_that_do_not_move_the_next_stage(where):
    """A stage without a slope, known up to the rounding of its bias: coordinates are no finer than that."""
    off = oa.MultiHeadAttention([oa.SoftmaxAttention(np.eye(d), np.zeros((d, d)))], [np.eye(d)], output_bias=drawn(d))
    flat = oa.MLP(drawn(5, d), drawn(5), np.zeros((d, 5)), output_bias=drawn(d))
    attention = (
        oa.Compose(off, NORM) if where == "heads" else oa.Compose(oa.SoftmaxAttention(np.eye(d), np.eye(d)), flat, NORM)
    )
    found = oa.certify(attention, X, radius=1e-6)
    assert 0.0 <= found.value < 1e-8
