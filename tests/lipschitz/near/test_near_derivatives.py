"""Second and third derivatives near tokens: the bounds against differences in 40 digits, rounding against exact Jacobians."""

import mpmath as mp
import numpy as np
import pytest
from climbing import directions
from exact_maps import derivatives, layer_norm, matrix, perceptron, softmax

from otattn.attention import MLP, LayerNorm, MaskedAttention, MultiHeadAttention, RMSNorm, SoftmaxAttention
from otattn.lipschitz.arithmetic.largest_eigenvalue import largest_eigenvalue
from otattn.lipschitz.near import gram_hessian
from otattn.lipschitz.near.activations import ACTIVATIONS
from otattn.lipschitz.near.gram_jacobian import jacobian_norm, with_outputs
from otattn.lipschitz.near.heads import heads_at
from otattn.lipschitz.near.third_order import third_order
from otattn.lipschitz.near.tokenwise import tokenwise_expansion
from otattn.models import FeedForward

CASES = [
    (n, d, causal, several)
    for n, d in ((2, 1), (3, 2), (4, 3))
    for causal in (False, True)
    for several in (False, True)
]


def drawn(n, d, causal, several, scale=1.5):
    """Matrices, the map of the library, the same in mpmath, and tokens."""
    rng = np.random.default_rng([n, d, causal, several])
    heads = [
        (scale * rng.standard_normal((d, d)), rng.standard_normal((2, d)), rng.standard_normal(d))
        for _ in range(1 + several)
    ]
    outputs = [rng.standard_normal((3, 2)) for _ in heads]
    made = [SoftmaxAttention(A, V, bias=c) for A, V, c in heads]
    ours = MultiHeadAttention(made, outputs) if several else made[0]
    ours = MaskedAttention(ours) if causal else ours

    def f(x):
        parts = [softmax(x, *h, causal, W if several else None) for h, W in zip(heads, outputs, strict=True)]
        return parts[0] if not several else parts[0] + parts[1]

    return ours, f, rng.standard_normal((n, d)), rng


@pytest.mark.parametrize("case", CASES)
def test_no_direction_exceeds_the_second_and_third_order(case):
    ours, f, X, rng = drawn(*case)
    heads = heads_at(ours, X).heads
    C = gram_hessian.hessian_norm(heads).norm
    W = [1.0 if h.W is None else np.linalg.norm(h.W, 2) for h in heads]
    D3 = sum(w * third_order(h)(0.0) for w, h in zip(W, heads, strict=True))
    seconds, thirds = zip(*(derivatives(f, X, D)[1:] for D in directions(rng, X.shape, 12)), strict=True)
    assert max(seconds) <= C <= 40.0 * max(seconds)  # a bound that is never near would prove nothing
    assert max(thirds) <= D3


@pytest.mark.parametrize("case", [CASES[4], CASES[6]])
def test_third_order_over_the_ball(case):
    ours, f, X, rng = drawn(*case)
    head = heads_at(ours, X).heads[0]
    D3 = third_order(head)
    values = [D3(r) for r in (0.0, 0.01, 0.03, 0.1)]
    assert values == sorted(values)
    for r in (0.03, 0.1):
        for D in directions(rng, X.shape, 6):
            E = next(directions(rng, X.shape, 1))
            assert derivatives(f, X + r * E, D)[2] <= D3(r)


@pytest.mark.parametrize("causal", [False, True])
def test_the_gram_matrix_is_the_frobenius_norm_of_the_hessian_without_the_own_token(causal):
    """Queries frozen, every second derivative by differences in 40 digits."""
    rng = np.random.default_rng(5)
    n, d = 3, 2
    A, V, X = rng.standard_normal((d, d)), rng.standard_normal((2, d)), rng.standard_normal((n, d))
    ours = SoftmaxAttention(A, V)
    head = heads_at(MaskedAttention(ours) if causal else ours, X).heads[0]
    G = with_outputs([head], gram_hessian._row)
    G = np.tril(G) + np.tril(G, -1).T
    queries = X @ A.T  # exactly what the rows of the map use once they do not move
    zeta = rng.standard_normal((n, 2))

    def value(y):
        total = mp.mpf(0)
        for i in range(n):
            seen = range(i + 1 if causal else n)
            s = [mp.fsum(mp.mpf(float(queries[i, k])) * y[j, k] for k in range(d)) for j in seen]
            p = [mp.exp(a) for a in s]
            for e in range(2):
                v = [mp.fsum(mp.mpf(float(V[e, k])) * y[j, k] for k in range(d)) for j in seen]
                total += mp.mpf(float(zeta[i, e])) * mp.fsum(a * b for a, b in zip(p, v, strict=True)) / mp.fsum(p)
        return total

    with mp.workdps(40):
        x, h, square = matrix(X), mp.mpf(10) ** -9, mp.mpf(0)
        for a in range(n * d):
            for b in range(n * d):
                moved = []
                for s, t in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
                    y = x.copy()
                    y[a // d, a % d] += s * h
                    y[b // d, b % d] += t * h
                    moved.append(value(y))
                square += ((moved[0] - moved[1] - moved[2] + moved[3]) / (4 * h * h)) ** 2
    assert float(zeta.ravel() @ G @ zeta.ravel()) == pytest.approx(float(square), rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_the_gram_matrix_of_the_jacobian(case):
    ours, _, X, _ = drawn(*case)
    found = heads_at(ours, X)
    J = ours.jacobian(X).to_dense().reshape(-1, X.size)
    low, high = jacobian_norm(found.heads)
    assert low == pytest.approx(np.linalg.norm(J, 2), rel=1e-10)
    assert low <= high <= low * (1 + 1e-8)
    mine, lost = found.jacobian()
    assert np.linalg.norm(mine - J, 2) <= lost + 1e-12 * high
    image, error = found.images()
    assert np.linalg.norm(image - ours.on_tokens(X)) <= error + 1e-12 * np.linalg.norm(image)


@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1e3), (1e6, 1.0), (1e3, 1e-9), (1e9, 1e-3)])
def test_the_norm_of_the_jacobian_is_never_below_the_exact_one(offset, scale):
    """Logits of 1e3, tokens far from the origin, tiny forms: the floats are off, and the bound says so."""
    rng = np.random.default_rng(3)
    n, d = 3, 2
    A, V = scale * rng.standard_normal((d, d)), rng.standard_normal((2, d))
    X = rng.standard_normal((n, d)) + offset
    _, high = jacobian_norm(heads_at(SoftmaxAttention(A, V), X).heads)
    with mp.workdps(60):
        x, h = matrix(X), mp.mpf(10) ** -25
        columns = []
        for a in range(n * d):
            ends = []
            for s in (1, -1):
                y = x.copy()
                y[a // d, a % d] += s * h
                ends.append(softmax(y, A, V, np.zeros(d)))
            columns.append([(ends[0][i, k] - ends[1][i, k]) / (2 * h) for i in range(n) for k in range(2)])
        J = mp.matrix(columns)
        exact = mp.sqrt(max(mp.eigsy(J * J.T, eigvals_only=True)))
    assert mp.mpf(high) >= exact * (1 - mp.mpf(10) ** -20)
    assert scale > 1.0 or high <= 1.05 * float(exact) or offset > 1e8


def test_the_largest_eigenvalue_by_factorisation():
    rng = np.random.default_rng(0)
    Q, _ = np.linalg.qr(rng.standard_normal((400, 400)))
    w = np.concatenate([[9.0, 8.99], rng.random(398)])
    G = (Q * w) @ Q.T
    for accuracy in (1e-9, 1e-3):
        low, high = largest_eigenvalue(np.tril(G), accuracy)
        assert low == pytest.approx(3.0, rel=1e-9)
        assert low <= high <= 3.0 * (1 + 0.51 * accuracy + 1e-9)
    assert largest_eigenvalue(np.zeros((400, 400))) == (0.0, 0.0)
    assert np.isinf(largest_eigenvalue(np.full((2, 2), np.inf))[1])


NORMS = [LayerNorm([0.5, -2.0, 1.0], eps=1e-3), LayerNorm([1.0, 3.0, 0.1]), RMSNorm([0.7, 1.0, -0.2], eps=1e-6)]


@pytest.mark.parametrize("k", range(3))
def test_normalisations(k):
    norm, rng = NORMS[k], np.random.default_rng(k)
    X = rng.standard_normal((2, 3)) + 2.0
    found = tokenwise_expansion(norm, X)
    value = [
        derivatives(lambda x: layer_norm(x, norm.gain, norm.eps, norm.center), X, D)
        for D in directions(rng, X.shape, 60)
    ]
    assert 0.3 * found.second <= max(v[1] for v in value) <= found.second
    assert 0.1 * found.third(0.0) <= max(v[2] for v in value) <= found.third(0.0)
    assert found.third(1e9) == np.inf or norm.eps > 0.0


@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh", "gelu_tanh"])
@pytest.mark.parametrize("gated", [False, True])
def test_perceptrons(activation, gated):
    rng = np.random.default_rng(7)
    U, G, W = rng.standard_normal((4, 3)), rng.standard_normal((4, 3)), rng.standard_normal((3, 4))
    X = rng.standard_normal((2, 3))
    map = FeedForward(U, W, activation=activation, gate=G if gated else None)
    found = tokenwise_expansion(map, X)
    zero = np.zeros(4)
    value = [
        derivatives(lambda x: perceptron(x, U, zero, W, activation, G if gated else None), X, D)
        for D in directions(rng, X.shape, 20)
    ]
    assert 0.2 * found.second <= max(v[1] for v in value) <= found.second
    assert max(v[2] for v in value) <= found.third(0.0) <= found.third(0.1) <= found.third(10.0)
    for D in directions(rng, X.shape, 3):
        moved = derivatives(lambda x: perceptron(x, U, zero, W, activation, G if gated else None), X + 0.05 * D, D)
        assert moved[2] <= found.third(0.05)


def test_relu_is_linear_up_to_its_kinks():
    map = MLP([[1.0, 0.0], [0.0, 2.0]], [0.0, 0.0], [[1.0, 0.0], [0.0, 3.0]], activation="relu")
    found = tokenwise_expansion(map, np.array([[1.0, 1.0], [4.0, -0.5]]))
    assert found.remainder(0.499) == found.growth(0.499) == 0.0
    assert found.growth(0.6) == pytest.approx(6.0)  # the second unit of the second token
    assert found.growth(1.1) == pytest.approx(6.0)
    assert found.remainder(2.0) == pytest.approx(12.0)


@pytest.mark.parametrize("turned", [False, True])
def test_a_gate_of_relu_is_quadratic_up_to_its_kinks(turned):
    rng = np.random.default_rng(4)
    U, G, W, b = (
        rng.standard_normal((4, 3)),
        rng.standard_normal((4, 3)),
        rng.standard_normal((3, 4)),
        rng.standard_normal(4),
    )
    left, right = rng.standard_normal((2, 3, 3)) if turned else (np.eye(3), np.eye(3))
    X, map = rng.standard_normal((2, 3)), FeedForward(U, W, activation="relu", gate=G, gate_bias=b)
    found = tokenwise_expansion(map, X @ right.T, *((left, right) if turned else (None, None)))
    kink = float(np.min(np.abs(X @ (G @ right).T + b) / np.linalg.norm(G @ right, axis=1)))

    def f(x):
        return map._map(x @ right.T) @ left.T

    def jacobian(x):
        J = map.jacobian(x @ right.T).to_dense().reshape(6, 6)
        return np.kron(np.eye(2), left) @ J @ np.kron(np.eye(2), right)

    def slope(x, D):
        return map._jvp(x @ right.T, D @ right.T) @ left.T

    near = 0.99 * kink
    most = max(np.linalg.norm(jacobian(X + near * D) - jacobian(X), 2) for D in directions(rng, X.shape, 40))
    assert 0.2 * found.growth(near) <= most <= found.growth(near)
    assert found.growth(near) == pytest.approx(2.0 * found.growth(0.5 * near), rel=1e-9)
    for r in (near, 1.01 * kink, 3.0 * kink, 10.0 * kink):
        for D in directions(rng, X.shape, 40):
            assert np.linalg.norm(jacobian(X + r * D) - jacobian(X), 2) <= found.growth(r)
            assert np.linalg.norm(f(X + r * D) - f(X) - r * slope(X, D)) <= found.remainder(r)
    assert found.growth(1.01 * kink) > 1.5 * found.growth(near)
    E = next(directions(rng, X.shape, 1))
    for D in directions(rng, X.shape, 40):
        Y, r = X + 2.0 * kink * E, 3.0 * kink
        assert np.linalg.norm(jacobian(Y + r * D) - jacobian(Y), 2) <= found.growth(r, 2.0 * kink)


def test_activations_and_suprema():
    """Derivatives by differences in 40 digits, suprema on a grid with the step times a bound of the next derivative."""
    s = np.linspace(-9.0, 9.0, 1801)
    for name, phi in ACTIVATIONS.items():
        if name in ("relu", "identity"):
            continue
        with mp.workdps(30):
            f = {"gelu": lambda t: t * mp.ncdf(t), "silu": lambda t: t / (1 + mp.exp(-t)), "tanh": mp.tanh}.get(name)
            f = f or (lambda t: t / (1 + mp.exp(-2 * mp.sqrt(2 / mp.pi) * (t + mp.mpf("0.044715") * t**3))))
            exact = [
                [float(v) * k for v, k in zip(mp.taylor(f, mp.mpf(float(t)), 3), (1, 1, 2, 6), strict=True)]
                for t in s[::60]
            ]
        for k, part in enumerate((phi.value, phi.first, phi.second, phi.third)):
            assert part(s[::60]) == pytest.approx([row[k] for row in exact], abs=1e-12)
        third = np.abs(np.diff(phi.second(s))) / (s[1] - s[0])
        assert third.max() <= phi.sup_third <= 1.02 * third.max()
        fourth = np.abs(np.diff(phi.third(s))) / (s[1] - s[0])
        assert fourth.max() <= phi.sup_fourth <= 1.02 * fourth.max()
        assert np.abs(phi.second(s)).max() <= phi.sup_second <= 1.01 * np.abs(phi.second(s)).max()
        assert np.abs(phi.first(s)).max() <= phi.sup_first <= 1.01 * np.abs(phi.first(s)).max()
