"""Attention of n tokens against attention of their law: rates, constants, regimes."""

import numpy as np
import pytest

import otattn as oa
from otattn import plotting

LINE = oa.SoftmaxAttention([[1.0]], [[1.0]])
NORMAL = oa.GaussianMeasure([0.0], [[1.0]])


def test_root_n_on_a_small_ball_and_logarithm_on_a_large_one():
    found = oa.sample_complexity(LINE, NORMAL, [64, 256, 1024], radius=[8.0, 0.5, 4.0], samples=10, rng=1)
    assert found.reference == "exact"
    assert found.spreads == pytest.approx([64.0, 0.25, 16.0])
    large, small, middle = (found.fit(i) for i in range(3))
    low, high = small.interval()
    assert low < -0.5 < high
    assert large.exponent > middle.exponent > small.exponent
    assert large.exponent > -0.1
    assert [row[0] for row in found.regimes] == ["hardmax", "root n", "hardmax"]
    assert found.regimes[2] == ["hardmax", "hardmax", "hardmax"]
    # nested balls, the radii in any order
    assert (found.errors[0] >= found.errors[2]).all()
    assert (found.errors[2] >= found.errors[1]).all()
    # hardmax: attention at n tokens does not leave them
    assert (found.errors[0] >= 8.0 - 5.0).all()
    rows = found.rows()
    assert [row["radius"] for row in rows[::3]] == [8.0, 0.5, 4.0]
    assert rows[3]["error"] == pytest.approx(found.errors[1, 0].mean())
    assert rows[3]["C / sqrt(n)"] == pytest.approx(found.constants[1] / 8.0)
    assert len(plotting.plot_sample_complexity(found).lines) >= 4


def test_constant_is_that_of_the_central_limit_theorem():
    """At a fixed point: sqrt(n) times the root mean square of many errors, with a bias and a cross of dimensions."""
    A, V = np.array([[0.3, 0.2], [-0.1, 0.25]]), np.array([[1.0, 0.5], [0.0, 2.0], [0.3, 0.1]])
    head = oa.SoftmaxAttention(A, V, bias=[0.2, -0.1], value_bias=[1.0, 2.0, 3.0])
    law = oa.GaussianMeasure([1.0, -2.0], [[1.0, 0.4], [0.4, 0.5]])
    tiny = 1e-9  # the ball is a point
    found = oa.sample_complexity(head, law, [2, 4], radius=tiny, samples=1, rng=0)
    rng, n = np.random.default_rng(0), 800
    G, b = head.gaussian_affine(law)
    assert np.allclose(G @ np.zeros(2), 0.0)
    errors = [head(np.zeros((1, 2)), law.sample(n, rng))[0] - b for _ in range(600)]
    assert np.sqrt(n * np.mean(np.sum(np.square(errors), axis=1))) == pytest.approx(found.constants[0], rel=0.08)
    assert found.spreads[0] == pytest.approx(np.array([0.2, -0.1]) @ law.cov @ np.array([0.2, -0.1]), rel=1e-6)


def test_supremum_against_a_fine_grid():
    """On the line the search must find what a grid of 20001 points finds."""
    rng = np.random.default_rng(5)
    found = oa.sample_complexity(LINE, NORMAL, [16, 32], radius=3.0, samples=3, rng=rng)
    again = np.random.default_rng(5)
    x = np.linspace(-3.0, 3.0, 20001)[:, None]
    for j, n in enumerate((16, 32)):
        for k in range(3):
            mu = NORMAL.sample(n, again)
            again.standard_normal((256, 1)), again.random((64, 1))  # what the search draws
            grid = np.abs(LINE(x, mu) - x).max()
            assert found.errors[0, j, k] == pytest.approx(grid, rel=1e-6)


def test_laws_and_their_references():
    X = oa.load_sample().tokens(0, 30)
    head = oa.load_sample().heads[0]
    text = oa.sample_complexity(head, oa.DiscreteMeasure(X), [20, 320], radius=1.0, samples=3, rng=0)
    assert (text.reference, text.reference_size, text.spreads) == ("exact", None, None)
    assert text.errors[0, 1].mean() < 0.6 * text.errors[0, 0].mean()
    uniform = oa.sample_complexity(
        LINE, lambda n, rng: rng.uniform(-1.0, 1.0, (n, 1)), [8, 32, 128], radius=1.0, samples=8, rng=0
    )
    assert (uniform.reference, uniform.reference_size) == ("sample", 16 * 128)
    assert uniform.fit().exponent == pytest.approx(-0.5, abs=0.15)
    assert uniform.mean_fit().exponent == pytest.approx(-0.5, abs=0.2)
    # a map that does not keep Gaussians
    sigmoid = oa.sample_complexity(oa.SigmoidAttention([[1.0]], [[1.0]]), NORMAL, [8, 32], radius=1.0, samples=2, rng=0)
    assert (sigmoid.reference, sigmoid.reference_size) == ("sample", 512)


def test_refusals():
    for attention, law, word in (
        (oa.MaskedAttention(LINE), NORMAL, "without times, received MaskedAttention"),
        (LINE, [[1.0]], "write DiscreteMeasure"),
    ):
        with pytest.raises(TypeError, match=word):
            oa.sample_complexity(attention, law, [4, 8], radius=1.0, rng=0)
    with pytest.raises(ValueError, match="at least two different numbers"):
        oa.sample_complexity(LINE, NORMAL, [4, 4], radius=1.0, rng=0)
    with pytest.raises(ValueError, match="radius"):
        oa.sample_complexity(LINE, NORMAL, [4, 8], radius=-1.0, rng=0)
