"""The local constant in torch: its value, its gradients, warm starts, batches, precision, and its use as a penalty."""

import subprocess
import sys

import numpy as np
import pytest

import otattn as oa

torch = pytest.importorskip("torch", reason="torch is not installed")
nn = torch.nn
torch.set_num_threads(1)
local = oa.torch.local_lipschitz


def layer(kind="attention", dim=6, seed=0):
    torch.manual_seed(seed)
    if kind == "attention":
        return nn.MultiheadAttention(dim, 2, batch_first=True).double()
    return nn.TransformerEncoderLayer(dim, 2, 10, dropout=0.0, batch_first=True, activation="gelu").double()


def tokens(*shape, seed=1):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape))


def called(module):
    return (lambda X: module(X, X, X, need_weights=False)[0]) if isinstance(module, nn.MultiheadAttention) else module


def jacobian(module, X):
    J = torch.autograd.functional.jacobian(called(module), X)
    return J.reshape(J.shape[0] * J.shape[1], -1)


@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_value_is_the_norm_of_the_derivative(kind):
    module, X = layer(kind), tokens(5, 6)
    found, expected = local(module, X, tol=1e-9), torch.linalg.matrix_norm(jacobian(module, X), 2)
    assert found.value.item() == pytest.approx(expected.item(), rel=1e-12)
    assert found.value.item() == pytest.approx(oa.local_lipschitz(oa.from_torch(module), X).particle, rel=1e-10)
    assert found.residual.item() < 1e-8
    torch.testing.assert_close(found.output, called(module)(X))
    J = jacobian(module, X)
    torch.testing.assert_close(
        J @ found.right.flatten(), found.value.detach() * found.left.flatten(), atol=1e-7, rtol=0
    )
    assert "LocalConstant(" in repr(found)
    assert len(repr(found)) < 100


@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_gradients_against_differences(kind):
    """In tokens and in every parameter, to 1e-5 of the gradient's size (and to far less)."""
    module, X = layer(kind), tokens(5, 6).requires_grad_()
    local(module, X, tol=1e-10).value.backward()
    rng, h = np.random.default_rng(0), 1e-5
    for p in [X, *module.parameters()]:
        v = torch.tensor(rng.standard_normal(p.shape))
        with torch.no_grad():
            start, values = p.clone(), []
            for step in (h, -h):
                p.copy_(start + step * v)
                values.append(local(module, X, tol=1e-10).value.item())
            p.copy_(start)
        slope = (values[0] - values[1]) / (2 * h)
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        assert (grad * v).sum().item() == pytest.approx(
            slope, abs=1e-6 * max(1.0, grad.norm().item() * v.norm().item())
        )


def test_gradient_goes_on_into_what_made_the_tokens():
    module, embedding = layer(), tokens(5, 6, seed=3).requires_grad_()
    local(module, torch.tanh(embedding), tol=1e-10).value.backward()
    inner = torch.tanh(embedding.detach()).requires_grad_()
    local(module, inner, tol=1e-10).value.backward()
    torch.testing.assert_close(embedding.grad, inner.grad * (1 - torch.tanh(embedding.detach()) ** 2))


def test_members_of_a_batch_have_their_own():
    module, X = layer(), tokens(3, 5, 6)
    found = local(module, X, tol=1e-9)
    singles = [local(module, x, tol=1e-9).value.item() for x in X]
    np.testing.assert_allclose(found.value.detach().numpy(), singles, rtol=1e-12)
    assert local(lambda X: torch.tanh(X), X[:, None]).value.shape == (3, 1)


def by_backward(found):
    found.value.sum().backward()
    return found


def by_product(found):
    return found


def by_half(found):
    """A scaled loss that is negative for some members and nothing for another."""
    (found.value * torch.tensor([1e3, -1e-3, 0.0])).sum().backward()
    return found


@pytest.mark.parametrize("use", [by_backward, by_product, by_half])
def test_warm_starts_are_power_iterations(use):
    """However the last result was used, the next step starts from ``J right``; values rise to the norm."""
    module, X = layer(), tokens(3, 5, 6)
    expected = local(module, X, tol=1e-9).value.detach()
    found, last = None, torch.zeros(3)
    for _ in range(60):
        found = use(local(module, X, start=found, steps=1))
        now = found.value.detach()
        assert (now >= last - 1e-12).all()
        last = now
    assert (last <= expected * (1 + 1e-12)).all()
    live = slice(0, 2) if use is by_half else slice(None)
    torch.testing.assert_close(last[live], expected[live], rtol=1e-3, atol=0)
    assert (found.residual[live] < 0.1).all()
    again = local(module, X, start=local(module, X, tol=1e-10), steps=1)
    torch.testing.assert_close(again.value.detach(), expected, rtol=1e-12, atol=0)


def test_a_graph_that_is_gone_keeps_the_start():
    module, X = layer(), tokens(5, 6)
    found = local(module, X, steps=1)
    torch.autograd.grad(found.value, list(module.parameters()), allow_unused=True)
    torch.testing.assert_close(found.left, found.start)
    more = local(module, X, steps=8)
    assert more.value > local(module, X, steps=1).value


def test_measuring_without_gradients():
    module, X = layer(), tokens(5, 6)
    expected = local(module, X).value.item()
    with torch.no_grad():
        assert local(module, X).value.requires_grad is False
    with torch.inference_mode():
        assert local(module, X + 0.0).value.item() == pytest.approx(expected, rel=1e-10)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precisions(dtype):
    module, X = layer(), tokens(5, 6)
    expected = local(module, X).value.item()
    found = local(module.to(dtype), X.to(dtype), tol=1e-3, steps=None if dtype == torch.float32 else 20)
    assert found.value.dtype == torch.float32
    assert found.value.item() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 0.05)


def test_autocast():
    module, X = layer("layer").float(), tokens(4, 5, 6).float()
    expected = local(module, X).value
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = local(module, X, steps=20)
        loss = found.output.float().square().mean() + 0.1 * found.value.mean()
    loss.backward()
    assert found.value.dtype == torch.float32
    torch.testing.assert_close(found.value.detach(), expected.detach(), rtol=0.05, atol=0)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert grads
    assert all(torch.isfinite(g).all() and g.dtype == torch.float32 for g in grads)


def test_derivatives_that_vanish():
    for function in (lambda X: torch.ones_like(X), lambda X: 0.0 * X, lambda X: X.detach() + 1.0):
        X = tokens(4, 3).requires_grad_()
        found = local(function, X)
        assert found.value.item() == 0.0
        assert found.residual.item() == 0.0
    identity = local(lambda X: 2.0 * X, X)
    assert identity.value.item() == pytest.approx(2.0, rel=1e-14)
    identity.value.backward()
    assert X.grad is None or (X.grad == 0.0).all()


def test_a_penalty_makes_the_constant_smaller():
    module, X = layer("layer", seed=4).float(), tokens(4, 5, 6).float()
    before, state = local(module, X).value.max().item(), None
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(40):
        optimiser.zero_grad()
        state = local(module, X, start=state, steps=1)
        state.value.mean().backward()
        optimiser.step()
    assert local(module, X).value.max().item() < 0.6 * before


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda X: local(layer(), X.numpy()),
            TypeError,
            r"floating torch tensor, received ndarray; .*otattn.local_lipschitz",
        ),
        (lambda X: local(layer(), X.long()), TypeError, r"received a tensor of torch.int64"),
        (lambda X: local(layer(), X[0]), ValueError, r"must have shape \(n, d\)"),
        (lambda X: local(oa.SoftmaxAttention(np.eye(6), np.eye(6)), X), TypeError, r"otattn.local_lipschitz takes it"),
        (lambda X: local(3, X), TypeError, r"module or function, received int"),
        (lambda X: local(lambda X: X.sum(), X), TypeError, r"one tensor of values for each token.*received shape \(\)"),
        (lambda X: local(lambda X: {"a": X}, X), TypeError, r"received dict; wrap it"),
        (
            lambda X: local(layer(), X, start=X[:2]),
            ValueError,
            r"start must have the shape \(5, 6\).*received \(2, 6\)",
        ),
        (lambda X: local(layer(), X, start=3.0), ValueError, r"received \(\)"),
        (lambda X: local(layer(), X, steps=0), ValueError, r"steps must be at least 1"),
        (
            lambda X: local(layer(), X, tol=1e-12, max_iter=4),
            oa.ConvergenceError,
            r"residual must be at most 1e-12, reached",
        ),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(tokens(5, 6))


def test_torch_is_not_imported_before_it_is_asked_for():
    code = """
import sys, otattn as oa
oa.torch, oa.from_torch, oa.FunctionAttention(lambda X: X).jacobian([[1.0]])
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
