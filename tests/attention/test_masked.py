"""Causal attention: who sees whom, sequences and space-time measures, what cannot be masked."""

import numpy as np
import pytest
from variants import MASKED, NORMALISED, POINTWISE

from otattn.attention import (
    Compose,
    LayerNorm,
    MaskedAttention,
    MultiHeadAttention,
    Residual,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure

D = 3
Rng = np.random.Generator
EYE = np.eye(2)


@pytest.fixture(params=sorted(MASKED))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rng() -> Rng:
    return np.random.default_rng(11)


@pytest.fixture
def masked(name: str, rng: Rng) -> MaskedAttention:
    attention = MASKED[name](0.6 * rng.standard_normal((D, D)), rng.standard_normal((2, D)))
    assert isinstance(attention, MaskedAttention)
    return attention


def test_each_row_is_unmasked_attention_over_what_it_sees(masked: MaskedAttention, name: str, rng: Rng) -> None:
    times = np.array([0.2, 0.5, 0.5, 0.9, 0.2, 1.0])
    X, w = rng.standard_normal((6, D)), rng.uniform(0.5, 1.5, 6)
    mu = SpaceTimeMeasure(times, X, w / w.sum())
    out = masked.pushforward(mu).points
    for i in range(6):
        seen = times <= times[i]  # equal times see each other
        part = DiscreteMeasure.normalized(X[seen], mu.weights[seen])
        mass = 1.0 if name.removeprefix("masked-") in NORMALISED else float(mu.weights[seen].sum())
        assert np.allclose(out[i], mass * masked.attention(X[i : i + 1], part)[0], rtol=0, atol=1e-13)


def test_one_time_is_unmasked_attention(masked: MaskedAttention, rng: Rng) -> None:
    X = rng.standard_normal((5, D))
    mu = SpaceTimeMeasure(np.full(5, 0.3), X)
    assert np.allclose(masked.pushforward(mu).points, masked.attention.on_tokens(X), rtol=0, atol=1e-14)
    J, full = masked.jacobian(mu).to_dense(), masked.attention.jacobian(X).to_dense()
    assert np.allclose(J, full, rtol=0, atol=1e-13)


def test_prefixes_are_consistent(masked: MaskedAttention, name: str, rng: Rng) -> None:
    """The output of a token depends on no later token: not by rounding either, however large the later ones are."""
    X = rng.standard_normal((7, D))
    out = masked.on_tokens(X)
    for m in (1, 3, 6):
        # unnormalised kernels integrate against the measure, whose weights are 1/n
        share = 1.0 if name.removeprefix("masked-") in NORMALISED else m / 7
        assert np.allclose(out[:m], share * masked.on_tokens(X[:m]), rtol=0, atol=1e-14)
        Y = X.copy()
        Y[m:] = (1.0 if "exponential" in name else 1e8) * rng.standard_normal((7 - m, D))
        assert np.allclose(masked.on_tokens(Y)[:m], out[:m], rtol=0, atol=1e-15 + 1e-15 * np.abs(out).max())


def test_jacobian_is_block_lower_triangular(masked: MaskedAttention, rng: Rng) -> None:
    X = rng.standard_normal((5, D))
    J = masked.jacobian(X).to_dense().reshape(5, 2, 5, D)
    for i in range(5):
        assert (J[i, :, i + 1 :] == 0.0).all()
    # a later cotangent reaches earlier tokens, never the other way round
    g = np.zeros((5, 2))
    g[2] = rng.standard_normal(2)
    back = masked.jacobian(X).vjp(g)
    assert (back[3:] == 0.0).all()
    v = np.zeros((5, D))
    v[2] = 1.0
    assert (masked.jacobian(X).jvp(v)[:2] == 0.0).all()


def test_sequences_are_measures_with_times(masked: MaskedAttention, rng: Rng) -> None:
    X = rng.standard_normal((6, D))
    mu = SpaceTimeMeasure.from_sequence(X)
    assert np.array_equal(masked.on_tokens(X), masked.pushforward(mu).points)
    pushed = masked.pushforward(X)
    assert isinstance(pushed, SpaceTimeMeasure)
    assert np.array_equal(pushed.times, np.arange(1, 7) / 6)
    # tokens and times permuted together
    order = rng.permutation(6)
    shuffled = SpaceTimeMeasure(mu.times[order], X[order])
    assert np.allclose(masked.pushforward(shuffled).points, masked.on_tokens(X)[order], rtol=0, atol=1e-14)
    # only the order of the times matters
    later = SpaceTimeMeasure(mu.times**3, X)
    assert np.array_equal(masked.pushforward(later).points, masked.on_tokens(X))


def test_queries_between_times(masked: MaskedAttention, rng: Rng) -> None:
    mu = SpaceTimeMeasure([0.25, 0.5, 0.75], rng.standard_normal((3, D)))
    x = rng.standard_normal((2, D))
    out = masked(x, mu, times=[0.6, 0.6])
    shorter = SpaceTimeMeasure([0.25, 0.5, 1.0], np.vstack([mu.points[:2], rng.standard_normal((1, D))]))
    assert np.allclose(masked(x, shorter, times=[0.7, 0.7]), out, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match=r"times must give the time of each row .* received None for 2 rows"):
        masked(x, mu)
    with pytest.raises(ValueError, match="times must have 2 entries"):
        masked(x, mu, times=[0.6])


@pytest.mark.parametrize("kind", ["softmax", "l2", "multihead"])
def test_a_row_before_all_atoms_has_no_value(kind: str) -> None:
    masked = MASKED[f"masked-{kind}"](EYE, EYE)
    mu = SpaceTimeMeasure([0.5, 0.75], EYE)
    with pytest.raises(ValueError, match="must see an atom"):
        masked([[0.0, 0.0]], mu, times=[0.25])
    with pytest.raises(ValueError, match="must see an atom"):
        masked.field_jacobian([[0.0, 0.0]], mu, times=[0.25])


@pytest.mark.parametrize("kind", sorted(POINTWISE))
def test_a_row_before_all_atoms_integrates_nothing(kind: str) -> None:
    masked = MASKED[f"masked-{kind}"](EYE, EYE)
    mu = SpaceTimeMeasure([0.5, 0.75], EYE)
    assert (masked([[1.0, 0.0]], mu, times=[0.25]) == 0.0).all()


@pytest.mark.parametrize("kind", ["softmax", "l2"])
def test_weightless_first_tokens_are_the_limit_of_small_weights(kind: str) -> None:
    rng = np.random.default_rng(12)
    masked = MASKED[f"masked-{kind}"](rng.standard_normal((2, 2)), EYE)
    X, times = rng.standard_normal((4, 2)), [0.1, 0.2, 0.5, 0.9]
    limit = SpaceTimeMeasure(times, X, [0.0, 0.0, 0.5, 0.5])
    small = SpaceTimeMeasure(times, X, np.array([1e-14, 1e-14, 0.5, 0.5]) / (1 + 2e-14))
    assert np.allclose(masked.pushforward(limit).points, masked.pushforward(small).points, rtol=0, atol=1e-12)
    assert np.allclose(masked.jacobian(limit).to_dense(), masked.jacobian(small).to_dense(), rtol=0, atol=1e-12)


def test_masking_a_head_or_the_whole_is_the_same() -> None:
    rng = np.random.default_rng(13)
    heads = [SoftmaxAttention(rng.standard_normal((2, 2)), rng.standard_normal((1, 2))) for _ in range(3)]
    outputs = [rng.standard_normal((2, 1)) for _ in heads]
    X = rng.standard_normal((6, 2))
    whole = MaskedAttention(MultiHeadAttention(heads, outputs))
    parts = MultiHeadAttention([MaskedAttention(h) for h in heads], outputs)
    assert parts.causal
    assert np.array_equal(whole.on_tokens(X), parts.on_tokens(X))
    with pytest.raises(ValueError, match="all masked or all unmasked"):
        MultiHeadAttention([MaskedAttention(heads[0]), heads[1]])


@pytest.mark.parametrize(
    ("attention", "named"),
    [
        (SinkhornAttention(EYE, EYE), "SinkhornAttention"),
        (Compose(SoftmaxAttention(EYE, EYE)), "Compose"),
        (Residual(SoftmaxAttention(EYE, EYE)), "Residual"),
        (LayerNorm([1.0, 1.0]), "LayerNorm"),
        (MaskedAttention(SoftmaxAttention(EYE, EYE)), r"MaskedAttention\(SoftmaxAttention\)"),
        (MultiHeadAttention([SinkhornAttention(EYE, EYE)]), "SinkhornAttention"),
        (MultiHeadAttention([MultiHeadAttention([SinkhornAttention(EYE, EYE)])]), "SinkhornAttention"),
        (EYE, "ndarray"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_masked_is_named(attention: object, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        MaskedAttention(attention)  # type: ignore[arg-type]


def test_kinds_of_measures() -> None:
    X = np.random.default_rng(14).standard_normal((4, 2))
    masked, plain = MaskedAttention(SoftmaxAttention(EYE, EYE)), SoftmaxAttention(EYE, EYE)
    with pytest.raises(TypeError, match="atoms have no times"):
        masked.pushforward(DiscreteMeasure(X))
    # maps without a mask take space-time measures, ignore the times and keep them
    mu = SpaceTimeMeasure([0.1, 0.2, 0.2, 1.0], X)
    image = plain.pushforward(mu)
    assert isinstance(image, SpaceTimeMeasure)
    assert image.times is mu.times
    assert np.array_equal(image.points, plain.on_tokens(X))
    assert np.array_equal(plain.jacobian(mu).to_dense(), plain.jacobian(X).to_dense())
    assert np.array_equal(Residual(SinkhornAttention(EYE, EYE)).pushforward(mu).times, mu.times)


def test_compositions_mask_every_stage() -> None:
    """Each stage sees the image of the past, so the composition is causal too."""
    rng = np.random.default_rng(15)
    stage = Residual(MaskedAttention(SoftmaxAttention(rng.standard_normal((2, 2)), rng.standard_normal((2, 2)))))
    both = Compose(stage, LayerNorm([1.0, 2.0], eps=1e-3), Compose(stage, MaskedAttention(SigmoidAttention(EYE, EYE))))
    X = rng.standard_normal((5, 2))
    by_hand = MaskedAttention(SigmoidAttention(EYE, EYE)).on_tokens(
        stage.on_tokens(LayerNorm([1.0, 2.0], eps=1e-3).on_tokens(stage.on_tokens(X)))
    )
    assert np.allclose(both.on_tokens(X), by_hand, rtol=0, atol=1e-13)
    J = both.jacobian(X).to_dense().reshape(5, 2, 5, 2)
    assert all((J[i, :, i + 1 :] == 0.0).all() for i in range(5))
    # a query with its own time goes through the images of the atoms
    mu = SpaceTimeMeasure.from_sequence(X)
    assert np.allclose(both(X[2:3], mu, times=[0.6]), both.on_tokens(X)[2:3], rtol=0, atol=1e-13)
