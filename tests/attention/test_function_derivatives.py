"""Derivatives of maps that are functions: given, numerical, by torch and by jax; and what is built on them."""

import numpy as np
import pytest

import otattn as oa
from otattn._derivatives import numerical
from otattn.attention import FunctionAttention, MaskedAttention, SoftmaxAttention

RNG = np.random.default_rng(3)
A, V = RNG.normal(size=(3, 3)), RNG.normal(size=(2, 3))
X = RNG.normal(size=(5, 3))
MU = oa.DiscreteMeasure(X, [0.1, 0.2, 0.3, 0.25, 0.15])
RATIONAL = oa.DiscreteMeasure(X[:3], [0.5, 0.25, 0.25])
KNOWN = SoftmaxAttention(A, V)


def weights_of(x, mu):
    logits = x @ A.T @ mu.points.T
    P = mu.weights * np.exp(logits - logits.max(axis=1, keepdims=True))
    return P / P.sum(axis=1, keepdims=True)


def at_measures(x, mu):
    return weights_of(x, mu) @ mu.points @ V.T


def at_tokens(X):
    P = np.exp(X @ A.T @ X.T)
    return P / P.sum(axis=1, keepdims=True) @ X @ V.T


def not_analytic(x, mu):
    P = np.abs(mu.weights * np.exp(x @ A.T @ mu.points.T))
    return P / P.sum(axis=1, keepdims=True) @ mu.points @ V.T


def real_only(X):
    return at_tokens(np.array(X, dtype=np.float64))


def in_single(x, mu):
    P = np.float32(mu.weights) * np.exp(np.float32(x @ A.T @ mu.points.T))
    return P / P.sum(axis=1, keepdims=True) @ np.float32(mu.points @ V.T)


def through_numbers(x, mu):
    """Takes real measures only: no complex numbers get through covariance."""
    return at_measures(x, mu) + 0.0 * np.trace(mu.covariance())


def jvp(x, mu, dx, dy):
    P = weights_of(x, mu)
    T = dx @ A.T @ mu.points.T + x @ A.T @ dy.T
    dP = P * (T - np.sum(P * T, axis=1, keepdims=True))
    return (dP @ mu.points + P @ dy) @ V.T


def vjp(x, mu, g):
    P, back = weights_of(x, mu), g @ V
    T = back @ mu.points.T
    T = P * (T - np.sum(P * T, axis=1, keepdims=True))
    return T @ mu.points @ A, P.T @ back + T.T @ x @ A.T


def tokens_jvp(X, v):
    mu = oa.DiscreteMeasure(X)
    return jvp(X, mu, v, v)


def tokens_vjp(X, g):
    return sum(vjp(X, oa.DiscreteMeasure(X), g))


WAYS = {
    "complex step": ({"function": at_measures}, "complex step", 1e-12),
    "complex step, tokens": ({"function": at_tokens}, "complex step", 1e-12),
    "differences": ({"function": not_analytic}, "central differences", 1e-9),
    "differences, tokens": ({"function": real_only}, "central differences", 1e-9),
    "differences, real measures": ({"function": through_numbers}, "central differences", 1e-9),
    "single precision": ({"function": in_single}, None, 1e-2),
    "given": ({"function": at_measures, "jvp": jvp, "vjp": vjp}, "given", 1e-12),
    "given along": ({"function": at_measures, "jvp": jvp}, "given", 1e-12),
    "given adjoint": ({"function": at_measures, "vjp": vjp}, "given", 1e-12),
    "given, tokens": ({"function": at_tokens, "jvp": tokens_jvp, "vjp": tokens_vjp}, "given", 1e-12),
    "given adjoint, tokens": ({"function": at_tokens, "vjp": tokens_vjp}, "given", 1e-12),
}


def same_derivatives(own, mu, tol, *, elsewhere=None):
    """All products and the fields agree with those of the map that the function copies."""
    J, K = own.jacobian(mu), KNOWN.jacobian(mu)
    rng = np.random.default_rng(0)
    for _ in range(3):
        v, g = rng.normal(size=(mu.n, 3)), rng.normal(size=(mu.n, 2))
        np.testing.assert_allclose(J.jvp(v), K.jvp(v), rtol=tol, atol=tol)
        np.testing.assert_allclose(J.vjp(g), K.vjp(g), rtol=tol, atol=tol)
    np.testing.assert_allclose(J.to_dense(), K.to_dense(), rtol=tol, atol=tol)
    for at in (mu.points, *(() if elsewhere is None else (elsewhere,))):
        np.testing.assert_allclose(own.field_jacobian(at, mu), KNOWN.field_jacobian(at, mu), rtol=tol, atol=tol)
    return J


@pytest.mark.parametrize("way", WAYS)
def test_derivatives(way):
    options, method, tol = WAYS[way]
    own = FunctionAttention(dim=3, value_dim=2, **options)
    uniform = oa.DiscreteMeasure(X)
    J = same_derivatives(own, uniform, tol)
    assert J.method == (method or J.method)
    assert (J.error == 0.0) == (tol == 1e-12)
    # the stated error is one: the probed direction's true error is below it
    v = np.random.default_rng(0).standard_normal(X.shape)
    exact = KNOWN.jacobian(uniform).jvp(v)
    assert np.linalg.norm(J.jvp(v) - exact) <= (J.error + 1e-13) * np.linalg.norm(exact)
    if "tokens" in way:
        same_derivatives(own, RATIONAL, tol)
    else:
        same_derivatives(own, MU, tol, elsewhere=X[:2] + 0.3)


@pytest.mark.parametrize("way", ["complex step", "complex step, tokens", "differences", "given"])
@pytest.mark.parametrize("p", [1, 2, np.inf])
def test_local_constants(way, p):
    own = FunctionAttention(dim=3, value_dim=2, **WAYS[way][0])
    local, expected = oa.local_lipschitz(own, X, p=p), oa.local_lipschitz(KNOWN, X, p=p)
    assert local.value == pytest.approx(expected.value, rel=1e-8)
    assert local.splitting == pytest.approx(expected.splitting, rel=1e-8)
    assert local.upper >= local.value * (1 - 1e-9)
    assert local.verify()


def test_compositions_keep_the_error():
    own = FunctionAttention(real_only, 3, value_dim=2)
    double = oa.MultiHeadAttention([own], [np.ones((3, 2))])
    J = oa.Residual(double).jacobian(X)
    assert J.method == "central differences"
    assert 0.0 < J.error < 1e-9
    assert oa.Compose(oa.LayerNorm(np.ones(3)), double).jacobian(X).error > 0.0
    assert J.reweighted(np.full(5, 0.2)).error == J.error
    assert (KNOWN.jacobian(X).method, KNOWN.jacobian(X).error) == ("analytic", 0.0)


def test_wrong_derivatives_are_refused():
    with pytest.raises(ValueError, match="jvp must be the derivative of function"):
        FunctionAttention(at_measures, 3, value_dim=2, jvp=lambda x, mu, dx, dy: jvp(x, mu, dx, 0 * dy)).jacobian(X)
    with pytest.raises(ValueError, match="vjp must be the adjoint"):
        FunctionAttention(at_tokens, 3, value_dim=2, vjp=lambda X, g: 1.01 * tokens_vjp(X, g)).jacobian(X)
    with pytest.raises(TypeError, match="jvp must be a callable"):
        FunctionAttention(at_tokens, jvp=np.eye(2))


def test_large_adjoints_by_columns_are_refused(monkeypatch):
    monkeypatch.setattr("otattn._derivatives.derivative.MATRIX_BYTES", 8 * 14 * 10)
    J = FunctionAttention(at_tokens, 3, value_dim=2).jacobian(X)
    J.jvp(X)
    with pytest.raises(oa.MemoryBudgetError, match="give both jvp and vjp"):
        J.vjp(np.ones((5, 2)))


# causal maps


def causal_tokens(X):
    logits = X @ A.T @ X.T
    P = np.exp(logits) * np.tri(len(X))
    return P / P.sum(axis=1, keepdims=True) @ X @ V.T


def causal_measures(x, mu, times):
    P = mu.weights * np.exp(x @ A.T @ mu.points.T) * (mu.times <= times[:, None])
    return P / P.sum(axis=1, keepdims=True) @ mu.points @ V.T


def test_causal_functions_of_measures():
    masked = MaskedAttention(KNOWN)
    own = FunctionAttention(causal_measures, 3, value_dim=2, causal=True)
    mu = oa.SpaceTimeMeasure([0.2, 0.2, 0.5, 0.7, 0.1], X, MU.weights)
    np.testing.assert_allclose(own.jacobian(mu).to_dense(), masked.jacobian(mu).to_dense(), rtol=1e-12, atol=1e-13)
    at, times = X[:2] + 0.1, [0.3, 0.6]
    np.testing.assert_allclose(own(at, mu, times=times), masked(at, mu, times=times), rtol=1e-12)
    np.testing.assert_allclose(
        own.field_jacobian(at, mu, times=times), masked.field_jacobian(at, mu, times=times), rtol=1e-12, atol=1e-13
    )
    assert oa.local_lipschitz(own, mu).value == pytest.approx(oa.local_lipschitz(masked, mu).value, rel=1e-10)
    assert oa.stability_ratio(own, X, X + 0.1 * RNG.normal(size=X.shape)).verify()


def test_causal_functions_of_tokens_are_maps_of_sequences():
    masked = MaskedAttention(KNOWN)
    own = FunctionAttention(causal_tokens, 3, value_dim=2, causal=True)
    shuffled = oa.SpaceTimeMeasure([0.4, 0.2, 0.6, 1.0, 0.8], X)
    for mu in (X, shuffled):
        np.testing.assert_allclose(own.pushforward(mu).points, masked.pushforward(mu).points, rtol=1e-12)
        np.testing.assert_allclose(own.jacobian(mu).to_dense(), masked.jacobian(mu).to_dense(), rtol=1e-12, atol=1e-13)
        for p in (1, 2, np.inf):
            local, expected = oa.local_lipschitz(own, mu, p=p), oa.local_lipschitz(masked, mu, p=p)
            assert local.splitting == 0.0
            assert local.value == pytest.approx(expected.particle, rel=1e-6)
    bound = oa.lipschitz_lower_bound(own, radius=1.0, n=2, rng=0)
    assert bound.value == pytest.approx(oa.local_lipschitz(masked, bound.witness).particle, rel=1e-6)
    with pytest.raises(oa.NoJacobianError, match=r"field_jacobian needs a function \(x, mu, times\)"):
        own.field_jacobian(X, X)
    for mu in (oa.SpaceTimeMeasure([0.5, 0.5], X[:2]), oa.SpaceTimeMeasure([0.5, 1.0], X[:2], [0.3, 0.7])):
        with pytest.raises(ValueError, match="must be a sequence"):
            own.pushforward(mu)
    with pytest.raises(TypeError, match="SpaceTimeMeasure"):
        own.pushforward(oa.DiscreteMeasure(X))


# functions of tokens that are no functions of their measure


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(causal_tokens, id="order"),
        pytest.param(lambda X: at_tokens(X + np.arange(len(X))[:, None]), id="positions"),
        pytest.param(lambda X: X @ A.T @ (X.T @ X) @ V.T, id="a sum over tokens"),
    ],
)
def test_what_is_no_function_of_the_measure_is_refused(function):
    with pytest.raises(ValueError, match=r"through their measure, .* causal=True .* divide sums"):
        FunctionAttention(function, 3, value_dim=2).on_tokens(X)


def test_functions_of_tokens_are_known_at_the_tokens():
    own = FunctionAttention(at_tokens, 3, value_dim=2)
    for call in (lambda: own(X[:2], X), lambda: own.field_jacobian(X + 1.0, X)):
        with pytest.raises(ValueError, match="x must be the atoms of mu"):
            call()
    with pytest.raises(ValueError, match="multiples of 1/N"):
        own.pushforward(oa.DiscreteMeasure(X[:2], [1 / np.pi, 1 - 1 / np.pi]))
    np.testing.assert_allclose(own.pushforward(RATIONAL).points, KNOWN.pushforward(RATIONAL).points, rtol=1e-12)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lambda: 0, {}),
        (lambda x, mu, times: x, {}),
        (lambda a, b, c, d: a, {"causal": True}),
        (lambda *args: args[0], {}),
        (lambda X, *, scale: X, {}),
    ],
)
def test_parameters_tell_what_a_function_takes(function, options):
    with pytest.raises(TypeError, match=r"function must take \(X\).*wrap it"):
        FunctionAttention(function, **options)
    assert FunctionAttention(lambda X, scale=2.0: scale * X).on_tokens([[1.0]]).item() == 2.0


# what is built on them


W = np.diag([1.0, 0.5])
OWN = FunctionAttention(
    lambda x, mu: (P := mu.weights * np.exp(x @ W @ mu.points.T)) @ mu.points @ W / P.sum(1)[:, None], 2
)
COPIED = SoftmaxAttention(W, W)


def test_study_flow_and_gradient_flow():
    Z = X[:3, :2]
    sampler = oa.samplers.uniform_ball_pairs(3, 2, 1.0)
    studies = [oa.stability_study(a, sampler, n_pairs=4, rng=0, progress=False) for a in (OWN, COPIED)]
    np.testing.assert_allclose(studies[0].ratios, studies[1].ratios, rtol=1e-9)
    runs = [oa.flow(a, Z, t_span=(0.0, 0.5)) for a in (OWN, COPIED)]
    np.testing.assert_allclose(runs[0].points[-1], runs[1].points[-1], rtol=1e-6)
    reports = [oa.check_gradient_flow(a, Z, rng=0) for a in (OWN, COPIED)]
    assert reports[0].field_defect == pytest.approx(reports[1].field_defect, abs=1e-9)
    assert reports[0].wasserstein_defect == pytest.approx(reports[1].wasserstein_defect, abs=1e-9)
    tokens = oa.check_gradient_flow(FunctionAttention(lambda X: (X - X.mean(axis=0)) @ W, 2), Z, rng=0)
    assert tokens.field_defect < 1e-12
    assert tokens.wasserstein_defect < 1e-12


@pytest.mark.slow
def test_lower_bound():
    bound = oa.lipschitz_lower_bound(OWN, radius=1.0, n=2, rng=0)
    assert bound.value == pytest.approx(oa.lipschitz_lower_bound(COPIED, radius=1.0, n=2, rng=0).value, rel=1e-2)
    assert bound.value == pytest.approx(oa.local_lipschitz(COPIED, bound.witness).value, rel=1e-9)


def test_no_theorem_covers_it():
    own = FunctionAttention(at_measures, 3, value_dim=2)
    rows = oa.theorems(own, radius=1.0, n=3).rows()
    assert all(not row["applies"] and row["reason"] for row in rows)
    with pytest.raises(ValueError, match="no upper bound applies to FunctionAttention"):
        oa.lipschitz_upper_bound(own, radius=1.0, n=3)


def test_the_complex_step_is_only_believed_where_it_agrees():
    """A function whose complex values are wrong in one entry of many."""

    def sly(z):
        return z**2 if np.isrealobj(z) else np.where(np.arange(3) == 2, np.abs(z) ** 2 + 0j, z**2)

    derivative = numerical.numerical_derivative(sly, X)
    assert derivative.method == "central differences"
    np.testing.assert_allclose(derivative.jvp(np.ones_like(X)), 2 * X, rtol=1e-9)
    assert numerical.numerical_derivative(lambda z: z**2, X).method == "complex step"
    flat = numerical.numerical_derivative(lambda z: np.ones((2, 1)), X)
    np.testing.assert_array_equal(flat.jvp(X), 0.0)


# other libraries


def test_torch_functions():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    At, Vt = torch.tensor(A), torch.tensor(V)

    def soft(X):
        return torch.softmax(X @ At.T @ X.T, dim=-1) @ X @ Vt.T

    def at(x, mu):
        return torch.softmax(x @ At.T @ mu.points.T + torch.log(mu.weights), dim=-1) @ mu.points @ Vt.T

    assert same_derivatives(FunctionAttention(soft, 3, value_dim=2), RATIONAL, 1e-12).method == "torch"
    assert same_derivatives(FunctionAttention(at, 3, value_dim=2), MU, 1e-12, elsewhere=X[:2]).error == 0.0
    single = same_derivatives(
        FunctionAttention(lambda X: torch.softmax(X @ At.float().T @ X.T, dim=-1) @ X @ Vt.float().T, 3, value_dim=2),
        RATIONAL,
        1e-4,
    )
    assert single.error == 2.0**-23
    layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    assert FunctionAttention(layer, 3, value_dim=2).jacobian(X).error == 2.0**-23
    exact = FunctionAttention(layer.double(), 3, value_dim=2).jacobian(X)
    step = FunctionAttention(lambda X: layer(torch.tensor(X)).detach().numpy(), 3, value_dim=2).jacobian(X)
    np.testing.assert_allclose(exact.to_dense(), step.to_dense(), rtol=1e-8, atol=1e-9)
    constant = FunctionAttention(lambda X: torch.ones(len(X), 2).double(), 3, value_dim=2)
    np.testing.assert_array_equal(constant.jacobian(X).to_dense(), 0.0)
    with pytest.raises(TypeError, match=r"add\(\)"):
        FunctionAttention(lambda X: X.no_such() if hasattr(X, "detach") else np.add(X), 3).on_tokens(X)


def test_jax_functions():
    jax = pytest.importorskip("jax", reason="jax is not installed")

    def soft(x, mu):
        return jax.nn.softmax(x @ A.T @ mu.points.T + jax.numpy.log(mu.weights), axis=-1) @ mu.points @ V.T

    J = same_derivatives(FunctionAttention(soft, 3, value_dim=2), MU, 1e-12, elsewhere=X[:2])
    assert (J.method, J.error) == ("jax", 0.0)
