"""Local constants: closed forms, laws, witnesses re-evaluated by exact transport, the real layer's reference values."""

import numpy as np
import pytest

import otattn as oa
from otattn.lipschitz.local import value as local_module
from otattn.lipschitz.local.mixed_norms import max_sum_of_norms

# particle part of the sample's heads (before the output matrix), first n tokens of a window; computed independently
REFERENCE = {
    (0, 0, 16): 5.4807955550408005,
    (0, 0, 64): 8.1460734649037,
    (0, 0, 128): 10.353117995883977,
    (0, 5, 16): 5.943114894644713,
    (0, 5, 64): 9.012271537175454,
    (0, 5, 128): 10.101113280619979,
    (0, 11, 16): 5.755385029158341,
    (0, 11, 64): 4.454624032926621,
    (0, 11, 128): 3.898768493874821,
    (1, 0, 16): 4.871395880293458,
    (1, 0, 64): 8.538284012557872,
    (1, 0, 128): 10.130658464070937,
    (1, 5, 16): 5.403389633747608,
    (1, 5, 64): 7.7300692665657715,
    (1, 5, 128): 8.75212529960423,
    (1, 11, 16): 2.936781267186128,
    (1, 11, 64): 3.214194757537988,
    (1, 11, 128): 2.8379379213666436,
}


@pytest.mark.parametrize(("window", "head", "n"), sorted(REFERENCE))
def test_sample_reference(window: int, head: int, n: int) -> None:
    layer = oa.load_sample()
    value = oa.local_lipschitz(layer.heads[head], layer.tokens(window, n))
    assert value.particle == pytest.approx(REFERENCE[window, head, n], rel=1e-6)
    assert value.verify()


def random_case(seed: int, n: int = 5, d: int = 3, e: int = 2, scale: float = 2.0):
    rng = np.random.default_rng(seed)
    attention = oa.SoftmaxAttention(scale * rng.normal(size=(d, d)), rng.normal(size=(e, d)), bias=rng.normal(size=d))
    return attention, oa.DiscreteMeasure(rng.normal(size=(n, d)), rng.dirichlet(np.ones(n))), rng


@pytest.mark.parametrize("p", [1, 2, np.inf])
@pytest.mark.parametrize("seed", range(4))
def test_duplicated_atoms_change_nothing(p: float, seed: int) -> None:
    attention, mu, _ = random_case(seed)
    copies = oa.DiscreteMeasure(np.repeat(mu.points, 3, axis=0), np.repeat(mu.weights, 3) / 3)
    a, b = oa.local_lipschitz(attention, mu, p=p), oa.local_lipschitz(attention, copies, p=p)
    assert b.lower == pytest.approx(a.lower, rel=1e-7)
    assert a.lower <= a.upper * (1 + 1e-12)
    assert max(a.particle, a.splitting) <= a.lower * (1 + 1e-12)


def test_zero_weight_atoms_do_not_enter() -> None:
    attention, mu, rng = random_case(0)
    more = oa.DiscreteMeasure(np.r_[mu.points, 1e4 * rng.normal(size=(2, 3))], np.r_[mu.weights, 0, 0])
    a, b = oa.local_lipschitz(attention, mu), oa.local_lipschitz(attention, more)
    assert b.value == pytest.approx(a.value, rel=1e-12)
    assert b.right.shape == (7, 3)
    assert not b.right[5:].any()


@pytest.mark.parametrize("seed", range(4))
def test_the_right_vector_is_a_witness_by_exact_transport(seed: int) -> None:
    attention, mu, _ = random_case(seed)
    value = oa.local_lipschitz(attention, mu)
    h = 1e-6
    moved = oa.DiscreteMeasure(mu.points + h * value.displacement(), mu.weights)
    ratio = oa.wasserstein(attention.pushforward(mu), attention.pushforward(moved)) / oa.wasserstein(mu, moved)
    # the images are distinct, so the identity coupling is optimal for small h; the remainder is of order h
    assert ratio == pytest.approx(value.particle, rel=1e-4)


@pytest.mark.parametrize("p", [1, 2, np.inf])
def test_splitting_ratio_by_exact_transport(p: float) -> None:
    attention, mu, _ = random_case(7)
    D = attention.field_jacobian(mu.points, mu)
    norms = np.linalg.norm(D, 2, axis=(1, 2))
    i = int(norms.argmax())
    u = np.linalg.svd(D[i])[2][0]
    h = 1e-5
    rest = np.arange(mu.n) != i
    points = np.concatenate([mu.points[rest], mu.points[[i]] + h * u, mu.points[[i]] - h * u])
    nu = oa.DiscreteMeasure(points, np.r_[mu.weights[rest], mu.weights[i] / 2, mu.weights[i] / 2])
    ratio = oa.wasserstein(attention.pushforward(mu), attention.pushforward(nu), p=p) / oa.wasserstein(mu, nu, p=p)
    local = oa.local_lipschitz(attention, mu, p=p)
    assert local.splitting == pytest.approx(norms.max(), rel=1e-12)
    # for p = 1 and inf the second-order response of the other atoms (order h) is not averaged out
    assert ratio == pytest.approx(local.splitting, rel=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_w1_value_is_reached_by_moving_a_small_share_of_one_atom(seed: int) -> None:
    attention, mu, rng = random_case(seed)
    local = oa.local_lipschitz(attention, mu, p=1)
    h, share = 1e-5, 1e-3
    best = 0.0
    for j in range(mu.n):
        for u in rng.normal(size=(40, 3)):
            step = h * u / np.linalg.norm(u)
            w = np.r_[mu.weights, share * mu.weights[j]]
            w[j] *= 1 - share
            nu = oa.DiscreteMeasure(np.r_[mu.points, [mu.points[j] + step]], w)
            F, G = attention.pushforward(mu), attention.pushforward(nu)
            best = max(best, oa.wasserstein(F, G, p=1) / oa.wasserstein(mu, nu, p=1))
    assert best <= local.upper * (1 + 1e-3)
    assert best >= 0.9 * local.lower  # forty random directions on a sphere of R^3 come this close


def test_w_inf_upper_value_holds_for_random_displacements() -> None:
    attention, mu, rng = random_case(3)
    local = oa.local_lipschitz(attention, mu, p=np.inf)
    J = attention.jacobian(mu)
    for _ in range(300):
        eps = rng.normal(size=(5, 3))
        eps /= np.linalg.norm(eps, axis=1, keepdims=True)
        assert np.linalg.norm(J.jvp(eps), axis=1).max() <= local.upper
    image = J.jvp(local.right)
    assert np.linalg.norm(local.right, axis=1).max() <= 1 + 1e-12
    assert np.linalg.norm(image, axis=1).max() == pytest.approx(local.particle, rel=1e-9)


def test_max_sum_of_norms_interval() -> None:
    rng = np.random.default_rng(0)
    # commuting diagonal blocks with one common top direction: the maximum is the sum of the norms
    B = np.stack([np.diag([3.0, 1.0, 0.5]), np.diag([2.0, 1.0, 1.9])])
    lower, upper, u = max_sum_of_norms(B, rng)
    assert lower == pytest.approx(5.0, rel=1e-12)
    assert upper == pytest.approx(5.0, rel=1e-6)
    assert abs(u[0]) == pytest.approx(1.0)
    for _ in range(20):
        B = rng.normal(size=(4, 3, 3))
        lower, upper, _ = max_sum_of_norms(B, rng)
        U = rng.normal(size=(2000, 3))
        U /= np.linalg.norm(U, axis=1, keepdims=True)
        sampled = np.linalg.norm(np.einsum("kij,mj->mki", B, U), axis=2).sum(axis=1).max()
        assert sampled <= lower * (1 + 1e-9) <= upper * (1 + 2e-9)
    assert max_sum_of_norms(np.zeros((2, 3, 3)), rng)[:2] == (0.0, 0.0)


def test_far_mass() -> None:
    u = np.array([1.0, 0.0])
    attention = oa.SoftmaxAttention(10 * np.eye(2), np.eye(2))
    near = oa.local_lipschitz(attention, [u, -u])
    far = oa.local_lipschitz(attention, [u, -u], domain=oa.Ball(1.0))
    assert near.value == pytest.approx(1.0, rel=1e-6)
    assert far.value == far.far_mass == pytest.approx(10.0, rel=1e-9)


@pytest.mark.parametrize("d", [2, 12])
def test_far_mass_is_climbed_to_where_weights_are_even(d) -> None:
    """Of unequal masses: neither atoms nor centre nor a random point are there."""
    u = np.eye(d)[0]
    mu = oa.DiscreteMeasure([u, -u], [0.9, 0.1])
    far = oa.local_lipschitz(oa.SoftmaxAttention(10 * np.eye(d), np.eye(d)), mu, domain=oa.Ball(1.0))
    assert far.far_mass == pytest.approx(10.0, rel=1e-6)


def test_linear_skew_single_token_has_only_a_splitting_part() -> None:
    A = 1.6 * np.array([[0.0, 1.0], [-1.0, 0.0]])
    local = oa.local_lipschitz(oa.LinearAttention(A, np.eye(2)), [[1.0, 0.0]])
    assert local.particle == 0.0
    assert local.splitting == pytest.approx(1.6, rel=1e-14)


def test_iterative_and_dense_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    attention = oa.SoftmaxAttention(rng.normal(size=(4, 4)), rng.normal(size=(4, 4)))
    X = rng.normal(size=(20, 4))
    dense = oa.local_lipschitz(attention, X)
    monkeypatch.setattr(local_module, "DENSE_ENTRIES", 0)
    iterative = oa.local_lipschitz(attention, X)
    assert iterative.particle == pytest.approx(dense.particle, rel=1e-12)
    assert 0 < iterative.residual <= 2e-8
    assert iterative.iterations > 0
    assert iterative.lower <= dense.value * (1 + 1e-14)
    assert dense.value <= iterative.upper


def test_case_l4_close_singular_values() -> None:
    V = np.diag([1.0] + [0.999] * 9)
    for n in (3, 400):
        value = oa.local_lipschitz(oa.SoftmaxAttention(np.zeros((10, 10)), V), np.ones((n, 10))).particle
        assert value == pytest.approx(1.0, abs=1e-8)


@pytest.mark.parametrize("p", [1, 2, np.inf])
def test_zero_values(p: float) -> None:
    local = oa.local_lipschitz(oa.SoftmaxAttention(np.eye(3), np.zeros((2, 3))), np.eye(3), p=p)
    assert (local.value, local.upper) == (0.0, 0.0)


def test_masked_and_multihead() -> None:
    rng = np.random.default_rng(2)
    head = oa.SoftmaxAttention(rng.normal(size=(3, 3)), rng.normal(size=(3, 3)))
    X = rng.normal(size=(6, 3))
    masked = oa.local_lipschitz(oa.MaskedAttention(head), X)
    assert masked.particle == pytest.approx(
        np.linalg.norm(oa.MaskedAttention(head).jacobian(X).to_dense(), 2), rel=1e-12
    )
    twice = oa.local_lipschitz(oa.MultiHeadAttention([head, head]), X)
    assert twice.value == pytest.approx(2 * oa.local_lipschitz(head, X).value, rel=1e-12)


def test_errors() -> None:
    attention = oa.SoftmaxAttention(np.eye(2), np.eye(2))
    with pytest.raises(ValueError, match="p must be 1, 2 or inf"):
        oa.local_lipschitz(attention, np.eye(2), p=3)
    with pytest.raises(ValueError, match="dimension 2"):
        oa.local_lipschitz(attention, np.eye(3))
    with pytest.raises(oa.MemoryBudgetError, match="bytes"):
        oa.local_lipschitz(attention, np.zeros((10_000, 2)), p=1)
    with pytest.raises(TypeError, match="no times"):
        oa.local_lipschitz(oa.MaskedAttention(attention), oa.DiscreteMeasure(np.eye(2)))


def test_growth_and_exponents() -> None:
    layer = oa.load_sample()
    growth = oa.local_growth(layer.heads[:2], layer.hidden_states[:2, :16], n_values=[8, 16])
    assert growth.values.shape == (2, 2, 2)
    assert growth.particle[0, 0, 1] == pytest.approx(REFERENCE[0, 0, 16], rel=1e-6)
    x = np.array([8, 16, 32])
    fit = oa.lipschitz.fit_exponent(x, np.stack([2.0 * x**0.3, 3.0 * x**0.5]))
    assert fit.exponent == pytest.approx(0.4, rel=1e-12)
    assert fit.standard_error == pytest.approx(0.1, rel=1e-12)  # std([.3, .5], ddof=1) / sqrt(2)
    with pytest.raises(ValueError, match="window length 16"):
        oa.local_growth(layer.heads[:1], layer.hidden_states[:1, :16], n_values=[32])
