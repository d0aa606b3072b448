"""How much attention stretches small displacements of given tokens."""

import numpy as np
from seed import CAP24, CODE, KPM21, TALKS, seed

import otattn as oa

RNG = np.random.default_rng
A, V = np.array([[1.0, 0.5], [-0.3, -0.8]]), np.array([[0.7, 0.2], [-0.4, 1.1]])
X = RNG(0).standard_normal((6, 2))
SOFTMAX = oa.SoftmaxAttention(A, V)


def differences(f, X, h=1e-5):
    """The Jacobian of a map of tokens by central differences."""
    steps = h * np.eye(X.size).reshape(-1, *X.shape)
    return np.stack([(f(X + step) - f(X - step)).ravel() / (2 * h) for step in steps], axis=1)


@seed(f"{CAP24}; {KPM21}", "agrees", "otattn.JacobianOperator")
def test_jacobian() -> None:
    """``(D_X f eps)_i = V sum_j P_ij (eps_j + (x_j - m_i) <A x_i, eps_j>) + V C_i A eps_i``, m_i and C_i the mean and
    covariance of row i.
    """
    eps = RNG(1).standard_normal(X.shape)
    P = np.exp(X @ A.T @ X.T)
    P /= P.sum(axis=1, keepdims=True)
    formula = []
    for x, e, p in zip(X, eps, P, strict=True):
        centred = X - p @ X
        cov = centred.T @ (p[:, None] * centred)
        formula.append(V @ (p @ eps + centred.T @ (p * (eps @ (A @ x))) + cov @ A @ e))
    np.testing.assert_allclose((SOFTMAX.jacobian(X) @ eps.ravel()).reshape(-1, 2), formula, rtol=1e-10)


@seed(CAP24, "agrees", "otattn.local_lipschitz")
def test_local_constant_is_the_norm_of_the_jacobian() -> None:
    """The local Lipschitz constant of f at X, Frobenius norms, is ``||D_X f||_2``."""
    exact = np.linalg.norm(differences(SOFTMAX.on_tokens, X), 2)
    np.testing.assert_allclose(oa.local_lipschitz(SOFTMAX, X).particle, exact, rtol=1e-8)


@seed(CAP24, "agrees", "otattn.stability_ratio", "otattn.local_lipschitz")
def test_ratio_tends_to_the_local_constant() -> None:
    """Between measures of n equal atoms the W_2 ratio ``W_2(F mu, F nu) / W_2(mu, nu)`` of small displacements tends to
    the local constant of f.
    """
    local = oa.local_lipschitz(SOFTMAX, X)
    moved = X + 1e-6 * local.right / np.linalg.norm(local.right)
    np.testing.assert_allclose(oa.stability_ratio(SOFTMAX, X, moved).value, local.particle, rtol=1e-5)


@seed(CAP24, "agrees", "otattn.local_lipschitz", "otattn.stability_ratio")
def test_constant_of_a_convex_set_is_the_largest_local_one() -> None:
    """The Lipschitz constant on a convex set is the supremum of the local constants: no two points are stretched more than
    the steepest point between them.
    """
    for k in range(5):
        Y = X + RNG(k).standard_normal(X.shape)
        stretched = np.linalg.norm(SOFTMAX.on_tokens(Y) - SOFTMAX.on_tokens(X)) / np.linalg.norm(Y - X)
        between = [oa.local_lipschitz(SOFTMAX, X + s * (Y - X)).particle for s in np.linspace(0, 1, 33)]
        assert stretched <= max(between)


@seed(CAP24, "agrees", "otattn.local_lipschitz")
def test_repeated_tokens_change_nothing() -> None:
    """Repeating every token leaves the local constant of the measure where it is; atoms may move apart, so it is a maximum
    of two parts.
    """
    once, thrice = oa.local_lipschitz(SOFTMAX, X), oa.local_lipschitz(SOFTMAX, np.repeat(X, 3, axis=0))
    np.testing.assert_allclose(thrice.value, once.value, rtol=1e-9)
    np.testing.assert_allclose(once.value, max(once.particle, once.splitting), rtol=1e-12)


@seed(CAP24, "agrees", "otattn.local_lipschitz", value="0 for f, 1 for F")
def test_splitting() -> tuple[float, float]:
    """The mean-field constant restricted to n equal atoms is that of f on n tokens.

    For n fixed: near one measure that may split there is a second part, ``max_i ||D_x Gamma_mu(x_i)||``, which f does
    not see. Value: linear attention with a skew A at one token.
    """
    local = oa.local_lipschitz(oa.LinearAttention([[0.0, 1.0], [-1.0, 0.0]], np.eye(2)), [[1.0, 0.0]])
    return local.particle, local.value


@seed(
    f"{CAP24}, large radius",
    "agrees",
    "otattn.lipschitz.bounds.castin2024_large_radius",
    story="plot_large_radius.py",
    value="2.646",
)
def test_large_radius() -> float:
    """n fixed, almost every X: as R grows, ``Lip_{RX} -> ||V|| sqrt(k)``, k the largest number of rows with the same
    largest logit; every image becomes ``V x_{m_i}``.

    Value: the constant of 8 tokens at R = 30, for ``||V|| = 1``; seven rows select one token.
    """
    attention, tokens = oa.SoftmaxAttention(A, np.eye(2)), RNG(3).standard_normal((8, 2))
    limit = oa.bounds.castin2024_large_radius(attention, tokens)
    found = oa.local_lipschitz(attention, 30.0 * tokens).particle
    np.testing.assert_allclose(found, limit.value, rtol=1e-6)
    chosen = tokens[(tokens @ A.T @ tokens.T).argmax(axis=1)]
    np.testing.assert_allclose(attention.on_tokens(30.0 * tokens), 30.0 * chosen, atol=1e-6)
    return found


@seed(
    f"{KPM21}; {CAP24}",
    "agrees",
    "otattn.LayerNorm",
    "otattn.local_lipschitz",
    story="plot_transformer_block.py",
    value="-1.000",
)
def test_layer_norm_is_not_lipschitz_near_equal_coordinates() -> float:
    """LayerNorm itself has no global constant: at tokens of size s its derivative is of size ``1/s``, and so is that of
    attention behind it.

    Value: the exponent of s.
    """
    behind = oa.Compose(oa.LayerNorm(np.ones(3), np.zeros(3), eps=0.0), oa.SoftmaxAttention(np.eye(3), np.eye(3)))
    tokens = RNG(0).standard_normal((5, 3))
    large, small = (oa.local_lipschitz(behind, s * tokens).particle for s in (1.0, 1e-3))
    return float(np.log(small / large) / np.log(1e-3))


@seed(
    f"{KPM21}; {TALKS}",
    "agrees",
    "otattn.TransformerBlock",
    "otattn.lipschitz.bounds.whole_block",
    story="plot_network_depth.py",
)
def test_products_of_layers() -> None:
    """The constant of a network is at most the product of those of its layers, ``1 + L`` for a residual connection.

    True, and far from what a network does: see the story.
    """
    attention = oa.SoftmaxAttention(0.3 * A, V)
    residual = oa.Residual(attention)
    two = oa.Compose(residual, residual)
    at = [residual.on_tokens(X)]
    one, other = oa.local_lipschitz(residual, X).particle, oa.local_lipschitz(residual, at[0]).particle
    assert oa.local_lipschitz(two, X).particle <= one * other
    assert one <= 1.0 + oa.local_lipschitz(attention, X).particle
    bound = oa.bounds.whole_block(residual, radius=2.0, n=6).value
    np.testing.assert_allclose(bound, 1.0 + oa.bounds.table(attention, radius=2.0, n=6)[0].value, rtol=1e-9)


@seed(CODE, "false as printed", "otattn.local_lipschitz", value="9.0 where the norm is 2")
def test_power_iteration_takes_the_tangent() -> tuple[float, float]:
    """``||J||`` by power iteration ``u <- J^T (J u)`` with output 0 of ``jvp`` in the place of ``J u``.

    Output 0 is the value ``f(X)``, output 1 the tangent: what is computed is ``|J^T f(X)|^{1/2}``, whatever u is.
    Below, f doubles tokens of norm 40.5.
    """
    double, tokens = oa.SoftmaxAttention([[0.0]], [[2.0]]), np.array([[20.25]])
    J = double.jacobian(tokens)
    as_printed = float(np.linalg.norm(J.T @ double.on_tokens(tokens).ravel())) ** 0.5
    return as_printed, oa.local_lipschitz(double, tokens).particle
