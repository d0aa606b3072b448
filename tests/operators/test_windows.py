"""Many windows of one head in step, against one search each."""

import numpy as np
import pytest

from otattn.attention import MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.operators import measure_jacobian, top_singular
from otattn.operators import windows as module
from otattn.operators.windows import top_singular_windows

RNG = np.random.default_rng(0)
HEAD = SoftmaxAttention.from_qkv(*RNG.normal(size=(3, 3, 5)), query_bias=RNG.normal(size=3))
TOKENS = RNG.normal(size=(4, 9, 5))


def alone(head, tokens):
    return np.array([top_singular(measure_jacobian(head, x), tol=1e-11).value for x in tokens])


@pytest.mark.parametrize("head", [HEAD, MaskedAttention(HEAD)], ids=["plain", "masked"])
@pytest.mark.parametrize("tol", [1e-3, 2e-5, 1e-9])
def test_values_and_vectors_are_those_of_one_search_each(head, tol, monkeypatch):
    monkeypatch.setattr(module, "top_singular", None)
    values, rights = top_singular_windows(head, TOKENS, tol=tol)
    truth = alone(head, TOKENS)
    assert (np.abs(values - truth) <= tol * truth).all()
    assert (values <= truth * (1.0 + 1e-11)).all()
    for x, v, value in zip(TOKENS, rights, values, strict=True):
        assert np.linalg.norm(v) == pytest.approx(1.0, rel=1e-12)
        assert np.linalg.norm(measure_jacobian(head, x).jvp(v)) == pytest.approx(value, rel=1e-12)
    again, _ = top_singular_windows(head, TOKENS, tol=tol, starts=rights)
    assert (np.abs(again - truth) <= tol * truth).all()


def test_a_start_without_the_top_vector_is_no_trap():
    """Two values alike: the vector of the second is given, and the first is found."""
    head = SoftmaxAttention(np.zeros((2, 2)), np.diag([1.0, 0.9]))
    tokens = RNG.normal(size=(2, 40, 2))
    starts = np.zeros_like(tokens)
    starts[:, :, 1] = 1.0
    assert top_singular_windows(head, tokens, tol=1e-8, starts=starts)[0] == pytest.approx([1.0, 1.0], rel=1e-8)


@pytest.mark.parametrize("why", ["vanishes", "two heads", "no room", "few steps"])
def test_what_cannot_go_in_step_goes_one_by_one(why, monkeypatch):
    head, tokens = HEAD, TOKENS
    if why == "vanishes":
        head = SoftmaxAttention(np.eye(5), np.zeros((2, 5)))
    elif why == "two heads":
        head = MultiHeadAttention([HEAD, HEAD])
    elif why == "no room":
        monkeypatch.setattr("otattn.attention.memory.MEMORY_BUDGET", 100)
    else:
        monkeypatch.setattr(module, "LARGEST_BASIS", 3)
    values, _ = top_singular_windows(head, tokens, tol=1e-9)
    np.testing.assert_allclose(values, alone(head, tokens), rtol=1e-9)


def test_a_value_of_high_multiplicity_ends_the_run_at_once():
    head = SoftmaxAttention(np.zeros((3, 3)), np.eye(3))
    values, _ = top_singular_windows(head, RNG.normal(size=(3, 6, 3)), tol=1e-9)
    np.testing.assert_allclose(values, 1.0, rtol=1e-12)
