"""What attention is: a push-forward of the measure of the tokens, in every variant."""

import numpy as np
from seed import CACP25, CAP24, KPM21, SABP22, VBC20, seed

import otattn as oa

RNG = np.random.default_rng
A, V = np.array([[1.0, 0.5], [-0.3, -0.8]]), np.array([[0.7, 0.2], [-0.4, 1.1]])
X = RNG(0).standard_normal((6, 2))


def rows(logits: np.ndarray) -> np.ndarray:
    """Softmax of each row."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@seed(f"{VBC20}; {SABP22}; {CAP24}", "agrees", "otattn.SoftmaxAttention", "otattn.DiscreteMeasure")
def test_push_forward() -> None:
    """Self-attention of n tokens is the push-forward ``F(mu) = (Gamma_mu)_# mu`` of their empirical measure, ``Gamma_mu(x)
    = V int e^{<Ax, y>} y dmu(y) / int e^{<Ax, y>} dmu(y)``.
    """
    image = oa.SoftmaxAttention(A, V).pushforward(oa.DiscreteMeasure(X))
    np.testing.assert_allclose(image.points, rows(X @ A.T @ X.T) @ X @ V.T, rtol=1e-12)


@seed(f"{VBC20}; {CAP24}", "agrees", "otattn.SoftmaxAttention")
def test_permutation_equivariance() -> None:
    """The map f on sequences commutes with permutations of the tokens, so it is a map of measures."""
    attention, order = oa.SoftmaxAttention(A, V), RNG(1).permutation(6)
    np.testing.assert_allclose(attention.on_tokens(X[order]), attention.on_tokens(X)[order], rtol=1e-12)


@seed(CAP24, "agrees", "otattn.DiscreteMeasure")
def test_any_measure_extends_sequences() -> None:
    """F is defined for every measure of compact support and extends f: repeated tokens and weighted atoms are the same
    measure.
    """
    attention = oa.SoftmaxAttention(A, V)
    weighted = oa.DiscreteMeasure(X[:3], [3 / 6, 2 / 6, 1 / 6])
    repeated = attention.on_tokens(X[[0, 0, 0, 1, 1, 2]])
    np.testing.assert_allclose(attention.pushforward(weighted).points, repeated[[0, 3, 5]], rtol=1e-12)
    far = attention(np.array([[5.0, 5.0]]), weighted)  # and at points that carry no mass
    assert far.shape == (1, 2)


@seed(f"{CAP24}; {CACP25}", "agrees", "otattn.SoftmaxAttention")
def test_one_matrix_for_queries_and_keys() -> None:
    """Queries and keys enter through ``A = K^T Q / sqrt(k)`` only."""
    Q, K, W = (RNG(seed).standard_normal((3, 2)) for seed in (1, 2, 3))
    learned = oa.SoftmaxAttention.from_qkv(Q, K, W)
    np.testing.assert_allclose(learned.A, K.T @ Q / np.sqrt(3), rtol=1e-12)
    plain = rows((X @ Q.T) @ (X @ K.T).T / np.sqrt(3)) @ X @ W.T
    np.testing.assert_allclose(learned.on_tokens(X), plain, rtol=1e-12)


@seed(f"{KPM21}; {CAP24}", "agrees", "otattn.MultiHeadAttention")
def test_multi_head() -> None:
    """Multi-head attention is ``sum_h W_h Gamma^h_mu``, a push-forward too."""
    heads = [oa.SoftmaxAttention(A, V), oa.SoftmaxAttention(-A.T, V.T)]
    outputs = [RNG(h).standard_normal((2, 2)) for h in range(2)]
    found = oa.MultiHeadAttention(heads, outputs).on_tokens(X)
    np.testing.assert_allclose(
        found, sum(h.on_tokens(X) @ W.T for h, W in zip(heads, outputs, strict=True)), rtol=1e-12
    )


@seed(f"{KPM21}; {CACP25}", "agrees", "otattn.L2Attention")
def test_l2_attention() -> None:
    """L2 attention has the weights ``exp(-|Qx - Ky|^2)``, normalised over y."""
    Q, K = A, A + 0.1
    gaps = ((X @ Q.T)[:, None] - (X @ K.T)[None]) ** 2
    np.testing.assert_allclose(oa.L2Attention(Q, K, V).on_tokens(X), rows(-gaps.sum(axis=2)) @ X @ V.T, rtol=1e-12)


@seed(f"{SABP22}; {CACP25}", "agrees", "otattn.SinkhornAttention")
def test_sinkhorn_attention() -> None:
    """Sinkhorn attention is the limit of rows and columns normalised in turn: ``int k(x, y) dmu(y) = 1 = int k(x, y)
    dmu(x)``.
    """
    weights = np.exp(X @ A.T @ X.T)
    for _ in range(200):
        weights /= weights.sum(axis=1, keepdims=True)
        weights /= weights.sum(axis=0, keepdims=True)
    found = oa.SinkhornAttention(A, V, tol=1e-13).on_tokens(X)
    np.testing.assert_allclose(weights @ X @ V.T, found, rtol=1e-10)


@seed(
    SABP22,
    "agrees",
    "otattn.SinkhornAttention",
    "otattn.SoftmaxAttention",
    story="plot_few_normalisations.py",
    value="0.17, 0.0086, 0.0017",
)
def test_few_sinkhorn_steps() -> None:
    """A few steps suffice in practice: one step of rows is softmax, and the images tend to those of Sinkhorn attention
    geometrically.

    Value: relative error of the images after 1, 3 and 5 normalisations.
    """
    limit, errors = oa.SinkhornAttention(A, V).on_tokens(X), []
    weights = np.exp(X @ A.T @ X.T)
    for step in range(5):
        weights /= weights.sum(axis=1 - step % 2, keepdims=True)
        errors.append(float(np.linalg.norm(weights @ X @ V.T - limit) / np.linalg.norm(limit)))
    assert errors[0] > errors[2] > errors[4]
    return errors[0], errors[2], errors[4]


@seed(
    CACP25,
    "agrees",
    "otattn.SigmoidAttention",
    "otattn.ReLUAttention",
    "otattn.LinearAttention",
    "otattn.ExponentialAttention",
)
def test_unnormalised_kernels() -> None:
    """Sigmoid attention, and the unnormalised kernels of the talks: ``Gamma_mu(x) = V int h(<Ax, y>) y dmu(y)``, h
    sigmoid, ReLU, identity or exp.
    """
    logits = X @ A.T @ X.T
    for kind, h in (
        (oa.SigmoidAttention, lambda s: 1 / (1 + np.exp(-s))),
        (oa.ReLUAttention, lambda s: np.maximum(s, 0)),
        (oa.LinearAttention, lambda s: s),
        (oa.ExponentialAttention, np.exp),
    ):
        np.testing.assert_allclose(kind(A, V).on_tokens(X), h(logits) @ X @ V.T / len(X), rtol=1e-12)


@seed(
    f"{CAP24}; {KPM21}",
    "agrees",
    "otattn.LayerNorm",
    "otattn.RMSNorm",
    "otattn.LayerNormDomain",
    story="plot_token_radius.py",
)
def test_layer_norm_fixes_the_radius() -> None:
    """LayerNorm puts every token on one ellipsoid, RMSNorm on one sphere scaled by the gain: the radius R of the theorems
    is a constant of the model, ``|x| <= sqrt(d) max |gain| + |bias|``.
    """
    gain, bias = np.array([1.0, 2.0, 0.5]), np.array([0.3, -0.1, 0.2])
    tokens = 10.0 * RNG(0).standard_normal((50, 3))
    normed = oa.LayerNorm(gain, bias, eps=0.0).on_tokens(tokens)
    z = (normed - bias) / gain
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), np.sqrt(3), rtol=1e-9)
    domain = oa.LayerNormDomain(gain, bias)
    assert domain.contains(normed, tol=1e-6)
    assert np.linalg.norm(normed, axis=1).max() <= domain.max_norm <= np.sqrt(3) * 2.0 + np.linalg.norm(bias)
    scaled = oa.RMSNorm(gain, eps=0.0).on_tokens(tokens) / gain
    np.testing.assert_allclose(np.linalg.norm(scaled, axis=1), np.sqrt(3), rtol=1e-9)
