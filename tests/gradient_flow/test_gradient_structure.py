"""The table of variants by gradient-flow structure, and the check itself."""

import json

import numpy as np
import pytest

from otattn.attention import (
    ExponentialAttention,
    L2Attention,
    LayerNorm,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    ReLUAttention,
    Residual,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.attention.jacobian import JacobianOperator
from otattn.gradient_flow import check_gradient_flow, structure_table
from otattn.gradient_flow.asymmetry import dense_asymmetry, mobility_defect, operator_asymmetry
from otattn.gradient_flow.report import VERDICTS
from otattn.gradient_flow.twisted import twisted_field
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure

YES, NO = 1e-6, 1e-2
SYMMETRIC = ("V = A", "V = -A")
WASSERSTEIN = ("Sinkhorn", "exponential", "linear", "ReLU", "sigmoid")


def _sym(rng: np.random.Generator, d: int) -> np.ndarray:
    B = rng.standard_normal((d, d)) / np.sqrt(d)
    return (B + B.T) / np.sqrt(2.0)


@pytest.mark.parametrize("dim", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_whole_table(dim: int, seed: int) -> None:
    """Every defect is below 1e-6 where the structure holds and above 1e-2 where it does not."""
    table = structure_table(dim=dim, rng=seed)
    seen = 0
    for row in table.entries:
        r = row.report
        symmetric = row.values in SYMMETRIC
        tied = row.variant == "L2, Q = K" and row.values == "V = Q^T K"
        expected: list[tuple[float | None, bool]] = [(r.field_defect, row.values != "V = I")]
        if not tied:  # tied L2 attention of separate tokens is close to a diagonal map
            expected.append((r.wasserstein_defect, symmetric and row.variant in WASSERSTEIN))
        if row.variant in ("softmax", "L2", "masked softmax", "L2, Q = K"):
            expected.append((r.twisted_defect, symmetric and row.variant == "softmax"))
        else:
            assert r.twisted_defect is None
        if row.variant in ("softmax", "Sinkhorn", "linear", "L2", "L2, Q = K"):
            expected.append((r.bures_defect, tied or (symmetric and row.variant in ("softmax", "Sinkhorn", "linear"))))
        else:
            assert r.bures_defect is None
        for defect, holds in expected:
            assert defect is not None
            assert defect < YES if holds else defect > NO, (row.variant, row.values, r)
            seen += 1
        known = symmetric and row.variant in (*WASSERSTEIN, "softmax")
        assert (r.energy is not None) == known
        if known:
            assert r.coefficient == pytest.approx(1.0 if row.values == "V = A" else -1.0, rel=1e-12)
            assert r.dissipation_defect is not None
            assert r.dissipation_defect < 1e-6
            assert r.mobility_defect is None or r.mobility_defect < YES
        assert r.verdict in VERDICTS
    assert seen > 90
    assert table.report("softmax", "V = -A").verdict == "gradient flow with mobility 1/Z"
    assert table.report("Sinkhorn", "V = A").verdict == "Wasserstein gradient flow"
    assert table.report("L2, Q = K", "V = Q^T K").verdict in (
        "gradient flow on centred Gaussians",
        "Wasserstein gradient flow",
    )
    assert table.report("L2", "V = A").verdict == "gradient field of each measure"
    assert table.report("masked softmax", "V = A").verdict == "gradient field of each measure"
    assert table.report("softmax", "V = A^T, A not symmetric").verdict == "gradient field of each measure"
    assert table.report("linear", "V = I").verdict == "no gradient structure"


def test_table_exports() -> None:
    table = structure_table(dim=2, n=4, rng=np.random.default_rng(5))
    data = json.loads(json.dumps(table.to_dict()))
    assert len(data["rows"]) == len(table.entries)
    lines = table.to_markdown().splitlines()
    assert len(lines) == len(table.entries) + 2
    assert len({line.count("|") for line in lines}) == 1
    again = structure_table(dim=2, n=4, rng=table.seed)
    assert again.report("ReLU", "V = I").wasserstein_defect == table.report("ReLU", "V = I").wasserstein_defect
    with pytest.raises(KeyError, match="no row"):
        table.report("softmax", "V = B")
    with pytest.raises(ValueError, match="dim must be at least 2"):
        structure_table(dim=1, rng=0)


@pytest.mark.parametrize("weighted", [False, True])
def test_weights_enter_through_the_metric(weighted: bool) -> None:
    """With unequal weights the plain Jacobian is not symmetric, the reweighted one is."""
    rng = np.random.default_rng(0)
    A, X = _sym(rng, 3), rng.standard_normal((6, 3))
    w = np.array([0.0, 1.0, 2.0, 3.0, 0.5, 0.1]) if weighted else np.ones(6)
    mu = DiscreteMeasure.normalized(X, w)
    for attention in (SinkhornAttention(A, A), SigmoidAttention(A, -A), ExponentialAttention(A, A)):
        report = check_gradient_flow(attention, mu, rng=1)
        assert report.verdict == "Wasserstein gradient flow"
        plain = dense_asymmetry(attention.jacobian(mu.support()).to_dense())
        assert (plain > NO) == weighted
    assert check_gradient_flow(SoftmaxAttention(A, A), mu, rng=1).verdict == "gradient flow with mobility 1/Z"


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
def test_huge_logits(scale: float) -> None:
    """Z spans thousands of powers of ten: still symmetric to the rounding of the logits, and no overflow."""
    rng = np.random.default_rng(2)
    A, X = scale * _sym(rng, 3), rng.standard_normal((8, 3))
    report = check_gradient_flow(SoftmaxAttention(A, A), X, rng=3)
    assert report.verdict == "gradient flow with mobility 1/Z"
    assert report.twisted_defect is not None
    assert report.twisted_defect < max(1e-12, 1e-14 * scale)
    assert report.wasserstein_defect > NO
    for attention in (
        SoftmaxAttention(A, np.eye(3)),
        L2Attention(A / scale**0.5, scale**0.5 * np.eye(3), A),
        MaskedAttention(SoftmaxAttention(A, A)),
    ):
        twisted = check_gradient_flow(attention, X, rng=3).twisted_defect
        assert twisted is not None
        assert twisted > NO


@pytest.mark.parametrize("kind", ["softmax", "softmax-bias", "l2", "masked", "masked-l2"])
def test_twisted_jacobian_against_differences(kind: str) -> None:
    rng = np.random.default_rng(4)
    d, n = 2, 4
    A, V, c = rng.standard_normal((d, d)), rng.standard_normal((d, d)), rng.standard_normal(d)
    attention = {
        "softmax": SoftmaxAttention(A, V),
        "softmax-bias": SoftmaxAttention(A, V, bias=c, value_bias=[0.3, -0.7]),
        "l2": L2Attention(A, V.T, V),
        "masked": MaskedAttention(SoftmaxAttention(A, V)),
        "masked-l2": MaskedAttention(L2Attention(A, V.T, V)),
    }[kind]
    mu = DiscreteMeasure.normalized(rng.standard_normal((n, d)), 0.2 + rng.random(n))
    if attention.causal:
        mu = SpaceTimeMeasure(np.arange(n) / n, mu.points, mu.weights)
    field = twisted_field(attention, mu)
    assert field is not None
    J = field.jacobian()

    def twisted(X: np.ndarray) -> np.ndarray:
        moved = mu._with_points(X)
        logs = twisted_field(attention, moved).log_normaliser
        return np.exp(logs)[:, None] * attention(moved.points, moved)

    h = 1e-6
    numeric = np.empty((n, d, n, d))
    for j, k in np.ndindex(n, d):
        step = np.zeros((n, d))
        step[j, k] = h
        numeric[:, :, j, k] = (twisted(mu.points + step) - twisted(mu.points - step)) / (2 * h)
    scale = np.sqrt(mu.weights) * np.exp(-0.5 * field.log_normaliser)
    numeric *= scale[:, None, None, None] * (scale / mu.weights)[None, None, :, None] * np.exp(-field.top)
    dense = J.to_dense()
    assert np.allclose(dense, numeric.reshape(n * d, n * d), atol=1e-8 * np.abs(dense).max())
    for v in rng.standard_normal((3, n * d)):
        assert np.allclose(J.matvec(v), dense @ v, rtol=1e-12, atol=1e-13)
        assert np.allclose(J.rmatvec(v), dense.T @ v, rtol=1e-12, atol=1e-13)


def test_probes_agree_with_the_exact_defect() -> None:
    rng = np.random.default_rng(6)
    A, X = _sym(rng, 3), rng.standard_normal((40, 3))
    exact = check_gradient_flow(SoftmaxAttention(A, A), X, rng=7, displaced=0)
    probed = check_gradient_flow(SoftmaxAttention(A, A), X, rng=7, dense_size=1, probes=200)
    assert set(probed.errors) == {"wasserstein", "twisted"}
    assert exact.errors == {}
    assert probed.errors["wasserstein"] < 0.1 * exact.wasserstein_defect
    assert abs(probed.wasserstein_defect - exact.wasserstein_defect) < 5.0 * probed.errors["wasserstein"]
    assert probed.verdict == exact.verdict == "gradient flow with mobility 1/Z"
    assert probed.mobility_defect is None


def test_probes_of_entries_near_the_ends_of_float64() -> None:
    rng = np.random.default_rng(8)
    M = rng.standard_normal((20, 20))
    expected = np.linalg.norm(M - M.T) / np.linalg.norm(M + M.T)
    for size in (1e-200, 1.0, 1e200):
        J = JacobianOperator(10, 2, 2, jvp=lambda v, s=size: (s * M @ v.ravel()).reshape(10, 2),
                             vjp=lambda g, s=size: (s * M.T @ g.ravel()).reshape(10, 2))  # fmt: skip
        assert dense_asymmetry(size * M) == pytest.approx(expected, rel=1e-12)
        estimate = operator_asymmetry(J, rng=np.random.default_rng(9), probes=400, dense_size=1)
        assert abs(estimate.value - expected) < 5.0 * estimate.error
    zero = JacobianOperator(10, 2, 2, jvp=lambda v: 0.0 * v, vjp=lambda g: 0.0 * g)
    assert operator_asymmetry(zero, rng=np.random.default_rng(9), dense_size=1).value == 0.0


def test_a_large_measure() -> None:
    rng = np.random.default_rng(10)
    A = _sym(rng, 3)
    report = check_gradient_flow(SoftmaxAttention(A, A), rng.standard_normal((600, 3)), rng=11, probes=4)
    assert report.verdict == "gradient flow with mobility 1/Z"
    assert report.wasserstein_defect > NO
    assert report.dissipation is not None
    assert report.dissipation.mu.n == 256


def test_special_configurations_do_not_hide_a_defect() -> None:
    """On collapsed tokens softmax has a symmetric Jacobian; the displaced clouds tell."""
    A = np.array([[1.0, 0.5], [0.5, -1.0]])
    X = np.ones((4, 2))
    attention = SoftmaxAttention(A, A)
    assert check_gradient_flow(attention, X, rng=0, displaced=0).wasserstein_defect < YES
    assert check_gradient_flow(attention, X, rng=0).wasserstein_defect > 1e-4
    assert check_gradient_flow(attention, np.zeros((3, 2)), rng=0).verdict == "gradient flow with mobility 1/Z"


def test_more_maps() -> None:
    rng = np.random.default_rng(12)
    d = 3
    A, c, X = _sym(rng, d), rng.standard_normal(d), rng.standard_normal((7, d))
    eye = np.eye(d)
    heads = MultiHeadAttention([SinkhornAttention(A, A), ReLUAttention(-A, A)], [eye, -2.0 * eye])
    verdicts = {
        "sum of gradient heads": (heads, "Wasserstein gradient flow"),
        "two softmax heads": (
            MultiHeadAttention([SoftmaxAttention(A, A), SoftmaxAttention(A @ A, A @ A)]),
            "gradient flow on centred Gaussians",
        ),
        "one softmax head": (
            MultiHeadAttention([SoftmaxAttention(A, eye)], [A]),
            "gradient flow with mobility 1/Z",
        ),
        "bias and value bias": (SoftmaxAttention(A, A, bias=c, value_bias=c), "gradient flow with mobility 1/Z"),
        "bias alone": (SoftmaxAttention(A, A, bias=c), "gradient flow on centred Gaussians"),
        "factors": (
            SoftmaxAttention.from_qkv(A[:2], A[:2], -A[:2].T @ A[:2], scale=1.0),
            "gradient flow with mobility 1/Z",
        ),
        "residual": (Residual(LinearAttention(A, -A), scale=0.3), "Wasserstein gradient flow"),
        "layer norm": (LayerNorm(np.ones(d)), "Wasserstein gradient flow"),
        "masked linear": (MaskedAttention(LinearAttention(A, A)), "gradient field of each measure"),
    }
    for name, (attention, verdict) in verdicts.items():
        report = check_gradient_flow(attention, X, rng=13)
        assert report.verdict == verdict, (name, report)
        if report.energy is not None:
            assert report.dissipation_defect is not None
            assert report.dissipation_defect < 1e-6


def test_mask_with_times_and_zero_weights() -> None:
    rng = np.random.default_rng(14)
    A = _sym(rng, 2)
    mu = SpaceTimeMeasure([0.0, 0.3, 0.3, 1.0, 0.1], rng.standard_normal((5, 2)), [0.2, 0.3, 0.1, 0.4, 0.0])
    report = check_gradient_flow(MaskedAttention(SoftmaxAttention(A, A)), mu, rng=15)
    assert report.verdict == "gradient field of each measure"
    assert report.mobility_defect is not None
    assert report.mobility_defect > 0.3
    # one time slice is unmasked attention
    flat = SpaceTimeMeasure(np.ones(5), mu.points, [0.2, 0.2, 0.2, 0.2, 0.2])
    assert check_gradient_flow(MaskedAttention(SoftmaxAttention(A, A)), flat, rng=15).twisted_defect < YES


def test_mobility_defect_finds_a_mobility_it_was_not_told() -> None:
    """``f_i = grad_i E / M_i`` with M_i a function of every token, E not symmetric in the tokens."""
    rng = np.random.default_rng(16)
    n, d = 5, 3
    H = rng.standard_normal((n * d, n * d))
    H = H + H.T  # the Hessian of E at the point
    g = rng.standard_normal(n * d)  # its gradient
    M = np.exp(3.0 * rng.standard_normal(n))
    dM = rng.standard_normal((n, n * d))
    K = H.reshape(n, d, n * d) / M[:, None, None]
    values = g.reshape(n, d) / M[:, None]
    K = (K - values[:, :, None] * (dM / M[:, None])[:, None, :]).reshape(n, d, n, d)
    assert mobility_defect(K, values) < 1e-11
    spoiled = K + 0.1 * np.abs(K).max() * rng.standard_normal(K.shape)
    assert mobility_defect(spoiled, values) > NO
    # negative mobilities do not count
    signed = K.copy()
    signed[0] *= -1.0
    assert mobility_defect(signed, values) > NO
    assert mobility_defect(K[:1, :, :1], values[:1]) is None
    assert mobility_defect(np.zeros((3, 2, 3, 2)), np.ones((3, 2))) is None
    triangular = K * (np.arange(n)[:, None] >= np.arange(n))[:, None, :, None]
    assert mobility_defect(triangular, values, one_sided=True) == pytest.approx(1.0, rel=1e-12)


def test_report_is_plain_and_verifies() -> None:
    A, X = np.array([[1.0, 0.5], [0.5, -1.0]]), np.random.default_rng(17).standard_normal((5, 2))
    report = check_gradient_flow(SoftmaxAttention(A, -A), X, rng=np.random.default_rng(18))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["verdict"] == report.verdict
    assert data["energy"] == "ExponentialEnergy"
    assert data["gaussian_energy"] == "GaussianSoftmaxEnergy"
    assert "gradient flow with mobility 1/Z" in repr(report)
    assert report.verify()
    object.__setattr__(report, "wasserstein_defect", 0.5 * report.wasserstein_defect)
    assert not report.verify()


def test_tolerance_follows_the_solver() -> None:
    A, X = np.array([[1.0, 0.5], [0.5, -1.0]]), np.random.default_rng(19).standard_normal((5, 2))
    rough = check_gradient_flow(SinkhornAttention(A, A, tol=1e-3), X, rng=0)
    assert rough.tol == pytest.approx(0.1)
    assert check_gradient_flow(SinkhornAttention(A, A), X, rng=0).tol == 1e-6


def test_bad_input() -> None:
    A, X = np.eye(2), np.random.default_rng(20).standard_normal((5, 2))
    with pytest.raises(ValueError, match="2 -> 1"):
        check_gradient_flow(SoftmaxAttention(A, A[:1]), X, rng=0)
    with pytest.raises(ValueError, match="tol must be finite and positive"):
        check_gradient_flow(SoftmaxAttention(A, A), X, rng=0, tol=-1.0)
    with pytest.raises(ValueError, match="probes must be at least 2"):
        check_gradient_flow(SoftmaxAttention(A, A), X, rng=0, probes=1)
    with pytest.raises(TypeError, match="rng"):
        check_gradient_flow(SoftmaxAttention(A, A), X, rng="seed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dimension"):
        check_gradient_flow(SoftmaxAttention(A, A), np.ones((3, 4)), rng=0)
    with pytest.raises(OverflowError, match="709"):
        check_gradient_flow(ExponentialAttention(1e4 * A, A), X, rng=0)
