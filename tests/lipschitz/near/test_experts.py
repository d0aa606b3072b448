"""Experts near given tokens: how far nothing switches, the second derivative, rounding against 40 digits."""

import mpmath as mp
import numpy as np
import pytest
from climbing import climbed, directions, norm
from exact_maps import derivatives, matrix

import otattn as oa
from otattn.lipschitz.near.experts import experts
from otattn.models.experts import Experts

E, D, H = 3, 3, 4


def drawn(seed, top=2, limit=7.0, size=0.6):
    rng = np.random.default_rng(seed)
    shapes = ((E, D), (E,), (E, D, 2 * H), (E, 2 * H), (E, H, D), (E, D))
    parts = [size * rng.standard_normal(shape) for shape in shapes]
    return Experts(*parts, top=top, alpha=1.702, limit=limit), rng.standard_normal((3, D)), rng


def exact(layer, chosen, H=H):
    """The map in mpmath with the experts of each token as they are at the tokens."""

    def f(x):
        out = mp.zeros(x.rows, D)
        for i in range(x.rows):
            logits = {
                e: mp.fsum(mp.mpf(float(layer.router[e, k])) * x[i, k] for k in range(D))
                + mp.mpf(float(layer.router_bias[e]))
                for e in chosen[i]
            }
            p = {e: mp.exp(a) for e, a in logits.items()}
            total = mp.fsum(p.values())
            for e in chosen[i]:
                z = x[i, :] * matrix(layer.gate_up[e]) + matrix(layer.gate_up_bias[e])
                limit = mp.mpf(layer.limit)
                g = [min(z[2 * j], limit) for j in range(H)]
                u = [max(min(z[2 * j + 1], limit), -limit) for j in range(H)]
                h = mp.matrix(
                    [[(b + 1) * a / (1 + mp.exp(-mp.mpf(layer.alpha) * a)) for a, b in zip(g, u, strict=True)]]
                )
                o = h * matrix(layer.down[e]) + matrix(layer.down_bias[e])
                for k in range(D):
                    out[i, k] += p[e] / total * o[k]
        return out

    return f


@pytest.mark.parametrize(("top", "limit"), [(1, 7.0), (2, 7.0), (3, 7.0), (2, 0.4)])
def test_the_second_derivative(top, limit):
    layer, X, rng = drawn(top, top, limit)
    f = exact(layer, layer._chosen(X)[0])
    found = experts(layer).expansion(X, None, None)
    seconds = [derivatives(f, X, D)[1] for D in directions(rng, X.shape, 12)]
    most = found.growth(1e-9) / 1e-9
    assert max(seconds) <= most <= 60.0 * max(seconds)
    assert found.remainder(1e-9) == pytest.approx(0.5e-18 * most, rel=1e-6)
    r = 0.9 * float(found.reach.min())
    here = layer.jacobian(X).to_dense().reshape(X.size, -1)
    for D in directions(rng, X.shape, 6):
        there = layer.jacobian(X + r * D).to_dense().reshape(X.size, -1)
        assert np.linalg.norm(there - here, 2) <= found.growth(r)
        assert np.linalg.norm(layer._map(X + r * D) - layer._map(X) - r * layer._jvp(X, D)) <= found.remainder(r)
        assert derivatives(f, X + 0.5 * r * D, D)[1] <= found.growth(0.5 * r, 0.5 * r) / (0.5 * r)
    left, right = rng.standard_normal((2, 3, 3))
    other = experts(layer).expansion(X, left, right)
    scale = np.linalg.norm(left, 2) * np.linalg.norm(right, 2) ** 2
    assert other.growth(1e-9) == pytest.approx(scale * found.growth(1e-9), rel=1e-6)


def test_two_opposite_experts():
    """Values are 0 and slopes opposite where the weights are equal: of the second derivative 2 Cov(o', t) is left."""
    ones = np.ones((2, 1))
    zero = np.zeros((2, 1))
    gate_up = np.zeros((2, 2, 2))
    gate_up[:, 0, 1] = 1.0  # u = x_1, g constant
    down = np.array([[[1.0, 2.0]], [[-1.0, -2.0]]])
    bias = np.column_stack([ones, zero])
    layer = Experts(
        [[3.0, 0.0], [-3.0, 0.0]], [3.0, -3.0], gate_up, bias, down, np.zeros((2, 2)), top=2, alpha=1.0, limit=9.0
    )
    X = np.array([[-1.0, 0.4]])
    found = experts(layer).expansion(X, None, None)
    h = 1e-4
    ends = [layer._map(X + np.array([[s * h, 0.0]])) for s in (-1, 0, 1)]
    exactly = float(np.linalg.norm(ends[0] - 2.0 * ends[1] + ends[2])) / h**2
    assert exactly * (1 - 1e-5) <= found.growth(1e-12) / 1e-12 <= exactly * (1 + 1e-3)


def test_rounding_of_the_router():
    """Large logits: the weights are off by far more than the values."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(20):
        router = 1e6 * rng.standard_normal((1, 3)) + 1e-1 * rng.standard_normal((2, 3))
        down, zero = np.array([[[1.0, 2.0, 0.0]], [[-1.0, 0.5, 3.0]]]), np.zeros((2, 3, 2))
        layer = Experts(router, np.zeros(2), zero, np.ones((2, 2)), down, np.zeros((2, 3)), top=2, alpha=1.0, limit=9.0)
        X = rng.standard_normal((1, 3))
        with mp.workdps(40):
            true = exact(layer, [[0, 1]], H=1)(matrix(X))
            lost = float(mp.mnorm(matrix(layer._map(X)) - true, "f"))
        value = experts(layer).errors(X)[0]
        assert lost <= value
        worst = max(worst, lost)
    assert worst > 1e-12


def test_the_reach_is_where_the_map_switches():
    ones = np.ones((2, 2, 2))
    layer = Experts(
        [[2.0, 0.0], [0.0, 1.0]],
        np.zeros(2),
        ones,
        np.zeros((2, 2)),
        ones[:, :1],
        np.zeros((2, 2)),
        top=1,
        alpha=1.0,
        limit=9.0,
    )
    found = experts(layer).expansion(np.array([[2.0, 1.0]]), None, None)
    assert float(found.reach[0]) == pytest.approx(3.0 / np.sqrt(5.0), rel=1e-9)  # of the logits 4 and 1
    near = experts(layer).expansion(np.array([[4.3, 3.7]]), None, None)
    assert float(near.reach[0]) == pytest.approx(1.0 / np.sqrt(2.0), rel=1e-9)  # of 8 to its limit 9
    assert np.isfinite(near.growth(0.7))
    assert np.isinf(near.growth(0.71))
    assert np.isinf(near.growth(0.4, 0.4))


@pytest.mark.parametrize(("seed", "offset"), [(0, 0.0), (1, 0.0), (2, 1e4)])
def test_rounding(seed, offset):
    layer, X, rng = drawn(seed, 2, 1e9 if offset else 7.0)
    X = X + offset
    value, slope = experts(layer).errors(X)
    f = exact(layer, layer._chosen(X)[0])
    with mp.workdps(40):
        lost = mp.mnorm(matrix(layer._map(X)) - f(matrix(X)), "f")
        d, h = matrix(next(directions(rng, X.shape, 1))), mp.mpf(10) ** -18
        exactly = (f(matrix(X) + h * d) - f(matrix(X) - h * d)) / (2 * h)
        moved = mp.mnorm(matrix(layer._jvp(X, np.array(d.tolist(), dtype=float))) - exactly, "f")
    assert 0.0 < lost <= value
    assert moved <= slope
    assert offset > 0.0 or value < 1e-11 > slope


def test_certificates_and_what_removes_a_refusal():
    layer, X, rng = drawn(5)
    network = oa.Residual(oa.Compose(oa.RMSNorm(np.ones(D), eps=1e-3), layer))
    here = norm(network, X)
    assert oa.certify(network, X, radius=1e-12).value == pytest.approx(here, rel=1e-8)
    with pytest.raises(oa.CertificateError, match="certified_radius finds one that is small enough"):
        oa.certify(network, X, radius=10.0)
    for kind in ("pairs", "constant"):
        ball = oa.certified_radius(network, X, factor=2.0, kind=kind)
        assert ball.domain.radius > 1e-4
        found = climbed(network, X, ball.domain.radius * np.sqrt(len(X)), rng, kind == "constant")
        assert 0.8 * here < found <= ball.value
