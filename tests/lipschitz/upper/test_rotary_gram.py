"""The Gram bound of rotary heads: its numbers one by one, where it is nearly attained, what climbs against it, its proof in balls."""

import mpmath as mp
import numpy as np
import pytest

import otattn as oa
from otattn import bounds


def drawn(rng, k=4, d=3, e=2, **options):
    """A head of moderate size with frequencies among them 0 and pi."""
    pairs = int(rng.integers(1, k // 2 + 1))
    omega = rng.choice([0.0, 1e-3, 0.7, np.pi, 5.0], size=pairs) * rng.choice([1.0, -1.0])
    Q, K, V = (rng.standard_normal((rows, d)) * 10 ** rng.uniform(-1, 0.7) for rows in (k, k, e))
    return oa.RotaryAttention(Q, K, V, frequencies=omega, layout=str(rng.choice(["half", "adjacent"])), **options)


def norm(M):
    return float(np.linalg.norm(M, 2))


@pytest.mark.parametrize("a", [0.0, 1e-6, 0.3, 4.0, 1e6])
@pytest.mark.parametrize("n", [2, 3, 9, 1000])
def test_formula_where_all_offsets_are_alike(a, n):
    """No turns, ``A = a I`` on the unit ball, ``V = 3 I``: lambda is ``(n - 1) a^2``, so that m is ``min(n, 2)``."""
    head = oa.RotaryAttention(a * np.eye(2), np.eye(2), 3.0 * np.eye(2), frequencies=[0.0], scale=1.0)
    with mp.workdps(40):
        b, v, lam = mp.mpf(a), mp.mpf(3), (n - 1) * mp.mpf(a) ** 2
        sigma, w = v * b, v
        T = v * mp.sqrt(mp.mpf(n) / 2) + mp.sqrt(w**2 * lam / 2 + v**2 * n / 8)
        alpha = T**2 + 2 * sigma * (v + max(w * b, v / 2)) / mp.sqrt(2) * mp.sqrt(2)
        exact = mp.sqrt(sigma**2 + (alpha + mp.hypot(alpha, 2 * sigma * T)) / 2)
    bound = bounds.rotary_gram_bound(head, radius=1.0, n=n)
    assert 0.0 <= bound.value / exact - 1 <= 1e-9
    assert bound.verify()


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("length", [None, 2.5])
def test_numbers_are_those_of_the_definition(masked, length):
    """Each norm from the dense forms of all offsets, lambda from the dense Gram matrices of all windows."""
    rng = np.random.default_rng(7)
    for n in (2, 3, 6):
        head = drawn(rng, masked=masked, length=length)
        E, s = rng.standard_normal((3, 3)), 1.0 if length is None else length / n
        found = bounds.rotary_gram_bound(head, domain=oa.Ellipsoid(E), n=n).details
        offsets = range(0 if masked else 1 - n, n)
        forms = {m: head.form(m * s) @ E for m in offsets}
        keys = {m: E.T @ head.form(m * s) for m in offsets}
        windows = [range(1, n), range(n - 1)] if masked else [range(1 - j, n - j + 1) for j in range(1, n + 1)]
        lam = max(np.linalg.eigvalsh(sum(forms[m] @ forms[m].T for m in window))[-1] for window in windows)
        assert found["a"] == pytest.approx(max(map(norm, forms.values())), rel=1e-9)
        assert found["lambda_root"] == pytest.approx(np.sqrt(lam), rel=1e-9)
        assert found["sigma"] == pytest.approx(norm(head.V @ E) * max(map(norm, keys.values())), rel=1e-9)
        assert found["w"] == pytest.approx(norm(head.V @ E), rel=1e-9)


def test_biases_and_a_shifted_domain_are_one():
    """Logits of ``E z + b`` are those of z with the biases ``Q b`` and ``K b``."""
    rng = np.random.default_rng(8)
    head, E, b = drawn(rng), rng.standard_normal((3, 3)), rng.standard_normal(3)
    there = bounds.rotary_gram_bound(head, domain=oa.Ellipsoid(E, b), n=5)
    biased = oa.RotaryAttention(
        head.Q,
        head.K,
        head.V,
        frequencies=head.frequencies,
        layout=head.layout,
        query_bias=head.Q @ b,
        key_bias=head.K @ b,
    )
    here = bounds.rotary_gram_bound(biased, domain=oa.Ellipsoid(E), n=5)
    assert there.value == pytest.approx(here.value, rel=1e-9)
    assert there.value > bounds.rotary_gram_bound(head, domain=oa.Ellipsoid(E), n=5).value


@pytest.mark.parametrize("n", [256, 257, 400])
def test_many_windows_are_covered_by_one(n):
    """Without a mask, from 257 tokens on: at least the largest window, at most all offsets together."""
    head = drawn(np.random.default_rng(9), masked=False)
    root = bounds.rotary_gram_bound(head, radius=1.0, n=n).details["lambda_root"]
    grams = {m: (A := head.form(m)) @ A.T for m in range(1 - n, n)}
    sums = np.cumsum([grams[m] for m in sorted(grams)], axis=0)
    windows = [sums[n - 1], *(sums[j + n] - sums[j] for j in range(n - 1))]
    most = max(np.linalg.eigvalsh(w)[-1] for w in windows)
    assert np.sqrt(most) * (1 - 1e-9) <= root <= np.sqrt(2 * most) * (1 + 1e-9)
    assert (root <= np.sqrt(most) * (1 + 1e-9)) == (n <= 256)


def test_two_anchors_nearly_attain_it():
    """Large logits on a flat ellipsoid, queries and keys that see different things as those of trained heads do."""
    rng = np.random.default_rng(6)
    Q, K = rng.standard_normal((2, 4, 12))
    head = oa.RotaryAttention(Q, K, rng.standard_normal((3, 12)), base=100.0)
    flat = oa.Ellipsoid(np.diag(np.geomspace(10.0, 0.5, 12)))
    upper = bounds.rotary_gram_bound(head, domain=flat, n=16).value
    lower = oa.lipschitz_lower_bound(head, domain=flat, n=16).value
    assert lower <= upper <= 2.0 * lower
    assert upper < 0.5 * bounds.rotary_row_bound(head, domain=flat, n=16).value


@pytest.mark.parametrize("seed", range(8))
def test_never_exceeded(seed):
    """What climbs in small dimensions stays below, whatever the frequencies, biases, mask and length."""
    rng = np.random.default_rng([3, seed])
    options = {"masked": seed % 2 == 0, "length": (None, None, 3.0)[seed % 3]}
    if seed % 4 > 1:
        options |= {"query_bias": rng.standard_normal(4), "key_bias": rng.standard_normal(4)}
    head, n = drawn(rng, d=int(rng.integers(2, 5)), **options), int(rng.integers(2, 6))
    d = head.Q.shape[1]
    domain = oa.Ellipsoid(rng.standard_normal((d, int(rng.integers(1, d + 1)))), rng.standard_normal(d) * (seed % 2))
    lower = oa.lipschitz_lower_bound(head, domain=domain, n=n, rng=seed).value
    assert 0.0 < lower <= bounds.rotary_gram_bound(head, domain=domain, n=n).value


def test_one_token_zero_values_and_zero_forms():
    head = drawn(np.random.default_rng(1))
    one = bounds.rotary_gram_bound(head, radius=5.0, n=1).value
    assert one == pytest.approx(norm(head.V), rel=1e-10)
    still = head.with_factors(head.Q, head.K, 0.0 * head.V)
    assert bounds.rotary_gram_bound(still, radius=5.0, n=4).value == 0.0
    blind = head.with_factors(0.0 * head.Q, head.K, head.V)
    assert bounds.rotary_gram_bound(blind, radius=5.0, n=4).value == pytest.approx(3 / np.sqrt(2) * one, rel=1e-9)
    point = oa.PointSet([[1.0, 2.0, -1.0]])
    assert bounds.rotary_gram_bound(head, domain=point, n=4).value <= 2.0 * one * 1.07


def test_sizes_of_tokens_and_matrices_only_scale_it():
    """Powers of two move between Q, K, V and the domain, without overflow and without loss."""
    rng = np.random.default_rng(2)
    head, E = drawn(rng, query_bias=rng.standard_normal(4)), rng.standard_normal((3, 3))
    here = bounds.rotary_gram_bound(head, domain=oa.Ellipsoid(E), n=5)
    for power in (-80, 80):
        moved = oa.RotaryAttention(
            2.0**-power * head.Q,
            2.0**-power * head.K,
            2.0**-power * head.V,
            frequencies=head.frequencies,
            layout=head.layout,
            scale=head.scale,
            query_bias=head.query_bias,
        )
        there = bounds.rotary_gram_bound(moved, domain=oa.Ellipsoid(2.0**power * E), n=5)
        assert there.log_value == pytest.approx(here.log_value - power * np.log(2.0), abs=1e-9)


@pytest.mark.parametrize("masked", [True, False])
def test_rigorous_on_every_domain(masked):
    pytest.importorskip("flint")
    rng = np.random.default_rng(5)
    head = drawn(rng, masked=masked, query_bias=rng.standard_normal(4), key_bias=rng.standard_normal(4), length=11.0)
    domains = (
        oa.Ball(1.5),
        oa.Ellipsoid(rng.standard_normal((3, 3)), rng.standard_normal(3)),
        oa.LayerNormDomain([0.5, 0.8, 0.3], [0.1, 0.2, 0.0]),
        oa.Box([-1.0, 0.0, 2.0], [0.5, 0.0, 3.0]),
        oa.PointSet(rng.standard_normal((5, 3))),
    )
    for domain in domains:
        bound = bounds.rotary_gram_bound(head, domain=domain, n=6)
        proved = bound.rigorous_value()
        assert bound.verify(rigorous=True)
        assert bound.value * (1.0 - 1e-9) <= proved <= bound.value


def test_what_it_does_not_cover_is_refused():
    head = drawn(np.random.default_rng(1))
    with pytest.raises(ValueError, match="attention must be RotaryAttention without a mask, received SoftmaxAttention"):
        bounds.rotary_gram_bound(oa.SoftmaxAttention(np.eye(3), np.eye(3)), radius=1.0, n=2)
    with pytest.raises(ValueError, match="p must be 2"):
        bounds.rotary_gram_bound(head, radius=1.0, n=2, p=3)
    with pytest.raises(ValueError, match="n, a number of tokens, must be given"):
        bounds.rotary_gram_bound(head, radius=1.0)
