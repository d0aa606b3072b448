"""Products on a torch device against numpy's, and local constants that iterate there."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

import otattn as oa
from otattn.attention import MaskedAttention, MultiHeadAttention, RotaryAttention, SoftmaxAttention
from otattn.attention import memory as attention_memory
from otattn.lipschitz.local import value as local_module
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure
from otattn.operators import FusedJacobian, SingularValueError, measure_jacobian, top_singular


def head(rng, *, d=5, k=3, e=4, size=0.6):
    Q, K, V = rng.normal(size=(k, d)), rng.normal(size=(k, d)), rng.normal(size=(e, d))
    return SoftmaxAttention.from_qkv(size * Q, size * K, V, query_bias=rng.normal(size=k))


def cases():
    """Every kind of map that the product covers, with uneven weights, an atom without weight and equal times among them."""
    rng = np.random.default_rng(0)
    X, w, t = rng.normal(size=(23, 5)), rng.dirichlet(np.ones(23)), rng.integers(9, size=23) / 10
    w[4] = 0.0
    weighted, timed = DiscreteMeasure(X, w / w.sum()), SpaceTimeMeasure(t, X, w / w.sum())
    one, other = head(rng), head(rng)
    small = head(rng, k=2, e=1)  # another size: another batch
    outputs = [rng.normal(size=(6, e)) for e in (4, 1, 4)]
    layer = MultiHeadAttention([one, small, other], outputs)
    return {
        "head": (one, X),
        "weighted head": (one, weighted),
        "identity values": (SoftmaxAttention(rng.normal(size=(5, 5)), np.eye(5)), weighted),
        "masked head": (MaskedAttention(one), X),
        "masked, weighted": (MaskedAttention(one), timed),
        "layer": (layer, weighted),
        "masked layer": (MaskedAttention(layer), timed),
        "sum of heads": (MultiHeadAttention([one, other]), X),
        "far logits": (head(rng, size=4.0), X),
    }


CASES = cases()


@pytest.mark.parametrize("memory", [None, 1, 3000], ids=["kept", "row by row", "blocks"])
@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_numpy(name, memory):
    torch = pytest.importorskip("torch")
    from otattn.operators.device import DeviceGram

    attention, mu = CASES[name]
    J = FusedJacobian(attention, mu)
    x = np.random.default_rng(1).normal(size=(J.n, J.d))
    expected = J.scaled_gram(x)
    for dtype, tol in ((np.float64, 1e-12), (np.float32, 2e-4)):
        got = DeviceGram(J.layer, torch.device("cpu"), dtype, memory=memory).scaled_gram(x.astype(dtype))
        assert got.dtype == dtype
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=0, atol=tol * np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_constants_are_those_without_a_device(name, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(local_module, "DENSE_ENTRIES", 0)
    attention, mu = CASES[name]
    plain, device = (oa.local_lipschitz(attention, mu, tol=1e-10, device=d) for d in (None, "cpu"))
    assert device.particle == pytest.approx(plain.particle, rel=1e-10)
    assert device.value == pytest.approx(plain.value, rel=1e-10)
    assert device.splitting == plain.splitting
    assert device.residual <= 2e-10
    assert device.verify()
    J = measure_jacobian(attention, mu)
    top = top_singular(J, precision="precise", device="cpu")
    assert top.converged
    assert top.verify(J)
    assert abs(top.value - np.linalg.svd(J.to_dense(), compute_uv=False)[0]) <= top.error_bar


@pytest.mark.parametrize("size", [1e-150, 1e-30, 1e30, 1e150])
def test_values_of_any_size(size, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(local_module, "DENSE_ENTRIES", 0)
    attention, X = CASES["head"]
    huge = SoftmaxAttention(attention.A, size * attention.V)
    plain, device = (oa.local_lipschitz(huge, X, device=d).particle for d in (None, "cpu"))
    assert device == pytest.approx(plain, rel=1e-8)


def test_where_float32_does_not_carry(monkeypatch):
    """Logits beyond its range: the device iterates in float64."""
    pytest.importorskip("torch")
    monkeypatch.setattr(local_module, "DENSE_ENTRIES", 0)
    rng = np.random.default_rng(2)
    attention, X = SoftmaxAttention(1e4 * rng.normal(size=(3, 3)), rng.normal(size=(3, 3))), rng.normal(size=(15, 3))
    assert not FusedJacobian(attention, X).layer.fits_float32
    plain, device = (oa.local_lipschitz(attention, X, device=d) for d in (None, "cpu"))
    assert device.particle == pytest.approx(plain.particle, rel=1e-8)


def test_rounded_iterations_cost_products_and_no_accuracy(monkeypatch):
    """A device whose float32 products are right to three digits (TF32): the residual in float64 tells, and more products follow."""
    pytest.importorskip("torch")
    from otattn.operators.device import DeviceGram

    attention, mu = CASES["layer"]
    J = measure_jacobian(attention, mu)
    exact = top_singular(J, precision="precise", device="cpu")
    honest = DeviceGram.scaled_gram

    def rounded(self, x):
        y = honest(self, x)
        if self.dtype == np.float64:
            return y
        noise = np.random.default_rng(int(1e6 * abs(float(y.flat[0])))).normal(size=y.shape)
        return (y * (1.0 + 1e-3 * noise)).astype(np.float32)

    monkeypatch.setattr(DeviceGram, "scaled_gram", rounded)
    rough = top_singular(J, precision="precise", device="cpu")
    assert rough.value == pytest.approx(exact.value, rel=1e-9)
    assert rough.verify(J)
    assert rough.iterations > exact.iterations


def test_a_device_without_float64(monkeypatch):
    """Float32 there, then numpy's float64."""
    pytest.importorskip("torch")
    from otattn.operators import device as device_module
    from otattn.operators import scaled

    made = []
    honest = device_module.DeviceGram.__init__

    def counted(self, layer, device, dtype, **options):
        made.append(np.dtype(dtype))
        honest(self, layer, device, dtype, **options)

    monkeypatch.setattr(device_module.DeviceGram, "__init__", counted)
    J = measure_jacobian(*CASES["layer"])
    plain = top_singular(J, precision="precise", device="cpu")
    assert made == [np.float32, np.float64]
    made.clear()
    monkeypatch.setattr(scaled, "has_float64", lambda device: False)
    narrow = top_singular(J, precision="precise", device="cpu")
    assert made == [np.float32]
    assert narrow.value == pytest.approx(plain.value, rel=1e-9)


def test_few_products_say_what_was_reached():
    pytest.importorskip("torch")
    J = measure_jacobian(*CASES["layer"])
    with pytest.raises(SingularValueError, match="lower value") as info:
        top_singular(J, precision="precise", max_iter=3, device="cpu")
    assert 0.0 < info.value.lower <= top_singular(J, precision="precise").value * (1 + 1e-12)


def rotary(rng):
    Q, K, V = rng.normal(size=(3, 2, 4))
    return RotaryAttention(Q, K, V)


@pytest.mark.parametrize(
    ("attention", "named"),
    [
        (oa.L2Attention(np.eye(4), np.eye(4), np.eye(4)), "L2Attention"),
        (rotary(np.random.default_rng(0)), "RotaryAttention"),
        (oa.Compose(SoftmaxAttention(np.eye(4), np.eye(4)), SoftmaxAttention(np.eye(4), np.eye(4))), "Compose"),
        (
            MultiHeadAttention(
                [SoftmaxAttention(np.eye(4), np.eye(4)), oa.L2Attention(np.eye(4), np.eye(4), np.eye(4))]
            ),
            "MultiHeadAttention with a head of L2Attention",
        ),
    ],
)
def test_maps_without_a_product_are_named(attention, named):
    pytest.importorskip("torch")
    X = np.random.default_rng(0).normal(size=(5, 4))
    with pytest.raises(TypeError, match=f"device needs softmax attention.*received {named}.*leave device out"):
        oa.local_lipschitz(attention, X, device="cpu")
    with pytest.raises(TypeError, match="device needs a FusedJacobian, received "):
        top_singular(measure_jacobian(attention, X), device="cpu")


def test_what_is_no_device():
    torch = pytest.importorskip("torch")
    attention, X = CASES["head"]
    for name in ("gpu of mine", "meta", *(() if torch.cuda.is_available() else ("cuda",))):
        with pytest.raises(ValueError, match=f'device must be one that torch can use here, received "{name}"'):
            oa.local_lipschitz(attention, X, device=name)
    with pytest.raises(TypeError, match="device must be a name"):
        oa.local_lipschitz(attention, X, device=0)
    with pytest.raises(ValueError, match="device needs p = 2"):
        oa.local_lipschitz(attention, X, p=1, device="cpu")
    assert oa.local_lipschitz(attention, X, device=torch.device("cpu")).verify()


def test_without_torch(monkeypatch):
    """One line that says what to install; and nothing is imported when no device is asked for."""
    honest = builtins.__import__

    def missing(name, *args, **options):
        if name.split(".")[0] == "torch":
            raise ImportError(name)
        return honest(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    attention, X = CASES["head"]
    with pytest.raises(ImportError, match=r"needs torch.*pip install 'otattn\[torch\]'") as info:
        oa.local_lipschitz(attention, X, device="cpu")
    assert "\n" not in str(info.value)
    assert oa.local_lipschitz(attention, X).verify()


def test_memory_follows_the_budget(monkeypatch):
    torch = pytest.importorskip("torch")
    from otattn.operators.device import DeviceGram

    J = measure_jacobian(*CASES["layer"])
    assert len(list(DeviceGram(J.layer, torch.device("cpu"), np.float64)._blocks())) == 1
    monkeypatch.setattr(attention_memory, "MEMORY_BUDGET", 8 * 3 * 22 * 4 * 5)
    cut = DeviceGram(J.layer, torch.device("cpu"), np.float64)
    assert [stop - start for start, stop, _ in cut._blocks()] == [5, 5, 5, 5, 2]
    assert all(not heads.kept for heads in cut._groups)
