"""Which attention climbs or descends an energy, and in which geometry."""

import functools

import numpy as np
from seed import BKKRW25, CACP25, GLPR24, SABP22, TALKS, seed

import otattn as oa

RNG = np.random.default_rng
A = np.array([[1.0, 0.5], [0.5, -0.8]])
X = RNG(0).standard_normal((5, 2))
STORY = "plot_gradient_flow_table.py"


@functools.cache
def table() -> oa.StructureTable:
    return oa.structure_table(dim=3, n=6, rng=0)


def defect(variant: str, kind: str, values: str = "V = A") -> float:
    return table().report(variant, values).defects[kind]


def wasserstein_gradient(variant: str) -> None:
    """For V = A and V = -A, with the energy balance along a flow; for V = I there is no structure."""
    for values in ("V = A", "V = -A"):
        assert table().report(variant, values).verdict == "Wasserstein gradient flow"
        assert defect(variant, "wasserstein", values) < 1e-8
        assert defect(variant, "dissipation", values) < 1e-8
    assert defect(variant, "wasserstein", "V = I") > 0.1


@seed(SABP22, "agrees", "otattn.check_gradient_flow", "otattn.gradient_flow.energies.SinkhornEnergy", story=STORY)
def test_sinkhorn_is_a_wasserstein_gradient_flow() -> None:
    """``V = A`` symmetric: Sinkhorn attention is a Wasserstein gradient flow."""
    wasserstein_gradient("Sinkhorn")


@seed(f"{SABP22}; {CACP25}", "agrees", "otattn.gradient_flow.energies.SinkhornEnergy")
def test_energy_of_sinkhorn_attention() -> None:
    """Its energy is entropic transport of mu with itself, ``(1/2) sup_pi int <Ax, y> dpi - KL(pi | mu x mu)`` over
    couplings pi of (mu, mu).
    """
    K = np.exp(X @ A @ X.T)
    u = np.ones(5)
    for _ in range(2000):  # a symmetric coupling u_i K_ij u_j of uniform marginals
        u = np.sqrt(u / (K @ u) / 25 * 5)
    plan = u[:, None] * K * u[None]
    np.testing.assert_allclose(plan.sum(axis=0), 0.2, rtol=1e-10)
    value = (plan * (X @ A @ X.T)).sum() - (plan * np.log(plan * 25)).sum()
    np.testing.assert_allclose(oa.energies.SinkhornEnergy(A)(X), value / 2, rtol=1e-8)


@seed(f"{SABP22}; {CACP25}", "agrees", "otattn.check_gradient_flow", story=STORY)
def test_softmax_is_no_wasserstein_gradient_flow() -> None:
    """Softmax attention is no Wasserstein gradient flow, not even for ``V = A`` symmetric."""
    assert defect("softmax", "wasserstein") > 0.05
    assert defect("softmax", "field") < 1e-10  # though its field is a gradient for each measure


@seed(
    f"{CACP25}; {GLPR24}; {BKKRW25}", "agrees", "otattn.check_gradient_flow", "otattn.energy_dissipation", story=STORY
)
def test_softmax_is_a_twisted_gradient_flow() -> None:
    """For ``V = A`` symmetric it is one for a twisted metric: ``Gamma_mu = (1 / Z_mu) grad`` of the first variation of the
    exponential energy.
    """
    for values in ("V = A", "V = -A"):
        report = table().report("softmax", values)
        assert report.verdict == "gradient flow with mobility 1/Z"
        assert report.defects["twisted"] < 1e-10
        assert report.defects["dissipation"] < 1e-8
        assert isinstance(report.energy, oa.energies.ExponentialEnergy)


@seed(f"{CACP25}; {GLPR24}", "agrees", "otattn.check_gradient_flow", story=STORY)
def test_exponential_is_a_wasserstein_gradient_flow() -> None:
    """Unnormalised exponential attention is the Wasserstein gradient flow of ``(1/2) int int e^{<Ax, y>} dmu dmu``."""
    wasserstein_gradient("exponential")
    np.testing.assert_allclose(oa.energies.ExponentialEnergy(A)(X), np.exp(X @ A @ X.T).mean() / 2, rtol=1e-12)


@seed(TALKS, "agrees", "otattn.check_gradient_flow", story=STORY)
def test_other_kernels_are_wasserstein_gradient_flows() -> None:
    """So are linear, ReLU and sigmoid attention, of ``(1/2) int int H(<Ax, y>) dmu dmu``, H' = h."""
    for variant in ("linear", "ReLU", "sigmoid"):
        wasserstein_gradient(variant)


@seed(CACP25, "open", "otattn.check_gradient_flow", "otattn.bures_closedness", story=STORY)
def test_l2_and_gradient_flows() -> None:
    """Is L2 attention a gradient flow?

    We know of no statement. In general it is none, twisted or not; with tied queries and keys and ``V = Q^T K`` it is
    one on centred Gaussians only.
    """
    report = table().report("L2, Q = K", "V = Q^T K")
    assert report.verdict == "gradient flow on centred Gaussians"
    assert report.defects["bures"] < 1e-10 < 0.01 < min(report.defects["wasserstein"], report.defects["mobility"])
    assert table().report("L2", "V = I").verdict == "no gradient structure"


@seed(CACP25, "agrees", "otattn.bures_closedness", "otattn.gradient_flow.energies.GaussianSoftmaxEnergy", story=STORY)
def test_softmax_on_gaussians_is_a_bures_wasserstein_gradient_flow() -> None:
    """On centred Gaussians softmax attention with ``V = A`` symmetric is a Bures-Wasserstein gradient flow, of ``tr(A
    Sigma A Sigma) / 4``, though it is no Wasserstein gradient flow on measures.
    """
    cov = np.array([[2.0, 0.3], [0.3, 1.0]])
    assert oa.bures_closedness(oa.SoftmaxAttention(A, A), cov).value < 1e-12
    assert defect("softmax", "bures", "V = I") > 0.1
    energy, gaussian = oa.energies.GaussianSoftmaxEnergy(A), oa.GaussianMeasure([0.0, 0.0], cov)
    np.testing.assert_allclose(energy(gaussian), np.trace(A @ cov @ A @ cov) / 4, rtol=1e-12)
    _, tangent = energy.gradient(gaussian)  # Sigma' = T Sigma + Sigma T is the flow
    G = A @ cov @ A
    np.testing.assert_allclose(tangent @ cov + cov @ tangent, G @ cov + cov @ G.T, rtol=1e-10)


@seed(CACP25, "agrees", "otattn.bures_closedness", "otattn.gradient_flow.energies.GaussianSinkhornEnergy", story=STORY)
def test_sinkhorn_on_gaussians_is_a_bures_wasserstein_gradient_flow() -> None:
    """So is Sinkhorn attention, of entropic transport between Gaussians."""
    cov = np.array([[2.0, 0.3], [0.3, 1.0]])
    attention, gaussian = oa.SinkhornAttention(A, A), oa.GaussianMeasure([0.0, 0.0], cov)
    assert oa.bures_closedness(attention, cov).value < 1e-9
    _, tangent = oa.energies.GaussianSinkhornEnergy(A).gradient(gaussian)
    G, _ = attention.gaussian_affine(gaussian)
    np.testing.assert_allclose(tangent @ cov + cov @ tangent, G @ cov + cov @ G.T, rtol=1e-9)


@seed(CACP25, "agrees", "otattn.check_gradient_flow", story=STORY)
def test_the_form_must_fit_the_values() -> None:
    """All this needs ``V = c A``, A symmetric: with ``V = A^T`` the field is a gradient for each measure and no more, with
    ``V = I`` not even that.
    """
    for variant in ("softmax", "Sinkhorn", "exponential"):
        assert table().report(variant, "V = A^T, A not symmetric").verdict == "gradient field of each measure"
        assert table().report(variant, "V = I").verdict == "no gradient structure"


@seed(f"{CACP25}; {BKKRW25}", "agrees", "otattn.energy_dissipation", story=STORY)
def test_energy_dissipation() -> None:
    """Along such a flow ``dE/dt = +-int |Gamma|^2 dmu``, weighted by Z for softmax."""
    for attention in (oa.SoftmaxAttention(A, -A), oa.SinkhornAttention(A, A), oa.ExponentialAttention(A, -A)):
        balance = oa.energy_dissipation(attention, 0.5 * X)
        assert balance.defect < 1e-7
        assert (np.sign(np.diff(balance.energies)) == np.sign(balance.coefficient)).all()


@seed(CACP25, "agrees", "otattn.displacement_convexity", story="plot_displacement_convexity.py", value="down to -3.00")
def test_energies_are_not_displacement_convex() -> float:
    """The energies of attention are not displacement convex in general.

    Value: the second derivative along a geodesic in units of W_2^2, Sinkhorn energy of ``A = diag(1, -3)``. All seven
    energies bend down somewhere for ``A = diag(1, -1)`` (the story).
    """
    energy = oa.energies.SinkhornEnergy(np.diag([1.0, -3.0]))
    return oa.displacement_convexity(energy, [[0.0, 0.0]], [[0.0, 2.0]]).least


@seed(CACP25, "open", "otattn.displacement_convexity_study", story="plot_displacement_convexity.py")
def test_energies_of_positive_forms_are_convex() -> None:
    """Are the energies displacement convex for A positive semidefinite?

    We know of no statement. The exponential and the linear energy are, along every path of weighted atoms, and so is
    the Gaussian energy of ``A = I``, the fourth power of a Schatten norm (proofs in the story).
    """
    pairs = oa.samplers.uniform_ball_pairs(4, 2, 1.5)
    for energy in (oa.energies.ExponentialEnergy(np.eye(2)), oa.energies.LinearEnergy(np.diag([1.0, 0.0]))):
        assert oa.displacement_convexity_study(energy, pairs, n_pairs=10, rng=0).least > -1e-9
    gaussians = oa.samplers.gaussian_measure_pairs(2)
    study = oa.displacement_convexity_study(oa.energies.GaussianSoftmaxEnergy(np.eye(2)), gaussians, n_pairs=10, rng=0)
    assert study.least > -1e-9
