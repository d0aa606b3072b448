"""How steep attention is at the worst tokens, and how that grows with their number."""

import numpy as np
from seed import CAP24, TALKS, seed

import otattn as oa

ANTIPODAL, ALIGNED = (oa.SoftmaxAttention(sign * np.eye(2), np.eye(2)) for sign in (-1.0, 1.0))


@seed(CAP24, "agrees", "otattn.lipschitz.bounds.castin2024_discrete_lower", "otattn.adversarial_tokens", value="5.57")
def test_discrete_lower_bound() -> float:
    """``V = I``: ``Lip(f on B_R^n) >= sqrt(n-1) / (1 + (n-1) e^{-2 R^2 gamma})``, ``gamma = max(-gamma_min, gamma_max /
    8)`` over the real eigenvalues of A.

    Value: ``A = -I, R = 4, n = 32``.
    """
    for attention in (ANTIPODAL, ALIGNED, oa.SoftmaxAttention([[1.0, 0.5], [-0.3, -0.8]], np.eye(2))):
        for radius, n in ((0.5, 2), (1.5, 8), (3.0, 50)):
            bound = oa.bounds.castin2024_discrete_lower(attention, radius=radius, n=n)
            assert bound.value <= oa.local_lipschitz(attention, bound.witness.tokens(n)).particle * (1 + 1e-9)
    bound = oa.bounds.castin2024_discrete_lower(ANTIPODAL, radius=4.0, n=32).value
    np.testing.assert_allclose(bound, np.sqrt(31) / (1 + 31 * np.exp(-32.0)), rtol=1e-9)
    return bound


@seed(CAP24, "agrees", "otattn.adversarial_tokens")
def test_witnesses_of_the_lower_bound() -> None:
    """It is attained at ``(Ru, -Ru, ..., -Ru)``, u the eigenvector of gamma_min, when ``-gamma_min >= gamma_max / 8``,
    else at ``(Ru, Ru/2, ..., Ru/2)`` with that of gamma_max.
    """
    for attention, place, method in ((ANTIPODAL, -1.0, "castin-antipodal"), (ALIGNED, 0.5, "castin-half")):
        witness = oa.bounds.castin2024_discrete_lower(attention, radius=2.0, n=10).witness
        one, others = witness.points[np.argsort(witness.weights)]
        np.testing.assert_allclose(others, place * one, rtol=1e-9)
        np.testing.assert_allclose(np.sort(witness.weights), [0.1, 0.9], rtol=1e-12)
        same = oa.adversarial_tokens(attention, n=10, radius=2.0, method=method)
        np.testing.assert_allclose(np.sort(same.weights), [0.1, 0.9], rtol=1e-12)


@seed(CAP24, "agrees", "otattn.local_lipschitz", "otattn.adversarial_tokens", value="n^0.50")
def test_square_root_growth() -> float:
    """At adversarial tokens the local constant grows like ``sqrt(n)``, as long as n is small against ``e^{2 gamma R^2}``.

    Value: the exponent between n = 100 and 10,000 at the published witness, R = 4.
    """
    found = [
        oa.local_lipschitz(
            ANTIPODAL, oa.adversarial_tokens(ANTIPODAL, n=n, radius=4.0, method="castin-antipodal")
        ).value
        for n in (100, 10_000)
    ]
    return float(np.log(found[1] / found[0]) / np.log(100.0))


@seed(CAP24, "agrees", "otattn.lipschitz_lower_bound", value="5.6 published, 64.1 found")
def test_the_order_of_the_upper_bound() -> tuple[float, float]:
    """The printed witnesses show that the order ``sqrt(n)`` of the upper bound is right.

    Of ``R^2 sqrt(n)`` they show ``sqrt(n)``; two anchors across the gradient of a cluster show the whole. Value: ``A =
    -I, V = I, R = 4, n = 32``.
    """
    published = oa.bounds.castin2024_discrete_lower(ANTIPODAL, radius=4.0, n=32).value
    tokens = oa.adversarial_tokens(ANTIPODAL, n=32, radius=4.0, method="two-anchor")
    assert np.linalg.norm(tokens.points, axis=1).max() <= 4.0 * (1 + 1e-12)
    return published, oa.local_lipschitz(ANTIPODAL, tokens).value


@seed(CAP24, "agrees", "otattn.lipschitz.bounds.castin2024_mean_field_lower", value="rates 1.00 and 0.125")
def test_mean_field_lower_bound() -> tuple[float, float]:
    """``V = I``: ``W_2-Lip(F on P(B_R)) >= (gamma / 2) R^2 e^{gamma R^2}`` for large R.

    It holds for every R. Value: the rates in ``R^2``, ``A = -I`` and ``A = I``.
    """
    rates = []
    for attention in (ANTIPODAL, ALIGNED):
        for radius in (0.3, 1.0, 2.0):
            bound = oa.bounds.castin2024_mean_field_lower(attention, radius=radius)
            assert bound.value <= oa.local_lipschitz(attention, bound.witness).value * (1 + 1e-9)
        low, high = (
            oa.bounds.castin2024_mean_field_lower(attention, radius=float(np.sqrt(a))).log_value
            for a in (800.0, 1600.0)
        )
        rates.append((high - low - np.log(2.0)) / 800.0)
    return rates[0], rates[1]


@seed(CAP24, "agrees", "otattn.local_lipschitz", value="1.001")
def test_mean_field_witness() -> float:
    """It is approached at ``p delta_{Ru} + (1 - p) delta_{-Ru}``, ``p = e^{-2 gamma R^2}``: two atoms, one of them light.

    Value: its place is within the factor ``1 + 2s(1 - p)/(2 - p)`` of the bound; the local constant over that formula
    at s = 4.
    """
    s = 4.0
    p = np.exp(-2 * s)
    mu = oa.DiscreteMeasure([[2.0, 0.0], [-2.0, 0.0]], [p, 1 - p])
    entry = np.exp(s) * np.sqrt(1 - p) / (2 - p) * (1 + 2 * s * (1 - p) / (2 - p))
    assert entry >= s / 2 * np.exp(s)
    local = oa.local_lipschitz(ANTIPODAL, mu).value
    assert local >= entry
    return local / entry


@seed(f"{CAP24}; {TALKS}", "agrees", "otattn.lipschitz.bounds.castin2024_discrete_lower", value="4.74 at 91 tokens")
def test_where_the_growth_ends() -> tuple[float, float]:
    """The growth ends at n of the order ``e^{2 gamma R^2}``: there, with equal atoms, the rate ``e^{gamma R^2}`` of all
    measures is reached.

    Value: the largest value of the lower bound over n at R = 1.5, ``A = -I``, which is ``e^{gamma R^2} / 2``, and
    where.
    """
    values = {n: oa.bounds.castin2024_discrete_lower(ANTIPODAL, radius=1.5, n=n).value for n in range(2, 300)}
    best = max(values, key=values.__getitem__)
    np.testing.assert_allclose(values[best], np.exp(1.5**2) / 2, rtol=1e-3)
    np.testing.assert_allclose(best - 1, np.exp(2 * 1.5**2), rtol=0.01)
    return values[best], best
