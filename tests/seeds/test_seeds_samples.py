"""Attention of n tokens against attention of the law that they are drawn from."""

import functools

import numpy as np
from seed import BLPV25, seed

import otattn as oa

HEAD, LAW = oa.SoftmaxAttention([[1.0]], [[1.0]]), oa.GaussianMeasure([0.0], [[1.0]])


@functools.cache
def study() -> oa.SampleComplexity:
    return oa.sample_complexity(HEAD, LAW, [64, 512, 4096], radius=[0.5, 8.0], samples=24, rng=0)


@seed(BLPV25, "agrees", "otattn.sample_complexity", value="n^-0.56, standard error 0.04", slow=True)
def test_uniform_rate() -> tuple[float, float]:
    """``E sup_{|x| <= R} |Gamma_{mu_n}(x) - Gamma_mu(x)| <= C(R) / sqrt(n)``.

    Value: the exponent for N(0, 1) and R = 0.5.
    """
    low, high = study().fit(0).interval()
    assert low < -0.5 < high
    return study().fit(0).exponent, study().fit(0).standard_error


@seed(BLPV25, "agrees", "otattn.sample_complexity", value="C = 1.27 at R = 0.5, 1.2e+04 at R = 4", slow=True)
def test_constant_of_the_rate() -> tuple[float, ...]:
    """C(R) grows exponentially (for Gaussians with ``R^2``).

    Value: the constant of the central limit theorem, ``e^{s/2} sqrt(1 + s)``, ``s = R^2``.
    """
    found = oa.sample_complexity(HEAD, LAW, [2, 4], radius=[0.5, 4.0], samples=1, rng=0)
    s = found.spreads
    np.testing.assert_allclose(found.constants, np.exp(s / 2) * np.sqrt(1 + s), rtol=1e-6)
    return found.constants[0], 0.5, found.constants[1], 4.0


@seed(BLPV25, "agrees", "otattn.sample_complexity", value="n^-0.06", slow=True)
def test_hardmax_rate() -> float:
    """Where softmax approaches hardmax the rate is logarithmic.

    Value: the exponent at R = 8; below ``e^{R^2 / 2}`` tokens one of them holds all the weight.
    """
    assert study().regimes[1] == ["hardmax"] * 3
    return study().fit(1).exponent


@seed(BLPV25, "agrees", "otattn.sample_complexity", value="n^-0.39", slow=True)
def test_rate_of_moments() -> float:
    """Moments of ``F(mu_n)`` converge at a rate ``C'(R) / n^beta``, beta < 1/2.

    Value: the exponent of the mean for N(0, 1), with a standard error of 0.1.
    """
    found = study().mean_fit()
    assert found.standard_error < 0.15
    return found.exponent


@seed(
    f"{BLPV25}, experiments on text",
    "agrees",
    "otattn.sample_complexity",
    "otattn.load_sample",
    value="n^-0.46, uniformly n^-0.04",
    slow=True,
)
def test_rates_on_text() -> tuple[float, float]:
    """On tokens of BERT models, too, moments converge slightly more slowly than ``n^{-1/2}``, while the uniform error on
    the ball of the tokens hardly falls.

    Value: samples of 16 to 256 of the 512 tokens that enter layer 3 of MiniLM, head 1.
    """
    sample = oa.load_sample()
    tokens = sample.hidden_states.reshape(-1, sample.dim)
    radius = float(np.linalg.norm(tokens, axis=1).max())
    head = sample.softmax_heads("samples")[1]
    found = oa.sample_complexity(head, oa.DiscreteMeasure(tokens), [16, 64, 256], radius=radius, samples=8, rng=0)
    return found.mean_fit().exponent, found.fit(0).exponent
