"""Depth as time: tokens that follow the attention of their measure."""

import numpy as np
from seed import CACP25, CAP24, GLPR23, SABP22, TALKS, seed

import otattn as oa

RNG = np.random.default_rng
A, V = np.array([[1.0, 0.5], [-0.3, -0.8]]), np.array([[0.7, 0.2], [-0.4, 1.1]])
SOFTMAX = oa.SoftmaxAttention(A, V)
X = RNG(0).standard_normal((6, 2))


@seed(f"{SABP22}; {GLPR23}; {CACP25}", "agrees", "otattn.residual_steps", "otattn.depth_convergence", value="order 1.0")
def test_residual_networks_tend_to_the_flow() -> float:
    """A residual network ``x + Gamma_mu(x) / L`` tends to ``x_i' = Gamma_mu(x_i)`` as L grows.

    Value: the order in ``1/L``.
    """
    return oa.depth_convergence(SOFTMAX, X, depths=[50, 100, 200]).order


@seed(f"{GLPR23}; {CACP25}", "agrees", "otattn.flow", "otattn.flow_radius_bound", value="0.56 of it")
def test_support_grows_at_most_exponentially() -> float:
    """For compact supports the Transformer PDE is well-posed for all times; the support stays in the ball of radius ``R_0
    e^{t ||V||}``.

    Value: the largest radius over that bound at t = 1.5 (any of the normalised variants stays below).
    """
    bound = oa.flow_radius_bound(SOFTMAX, float(np.linalg.norm(X, axis=1).max()), [1.5])[0]
    kinds = (
        SOFTMAX,
        oa.L2Attention(A, A, V),
        oa.SinkhornAttention(A, V),
        oa.MaskedAttention(SOFTMAX),
        oa.SigmoidAttention(A, V),
    )
    reached = [float(oa.flow(kind, X, t_span=(0.0, 1.5), rtol=1e-6).radii()[-1]) for kind in kinds]
    assert max(reached) <= bound
    return max(reached) / bound


@seed(CACP25, "agrees", "otattn.flow_stability", value="6e+04 times our bound")
def test_stability_in_time() -> float:
    """``W_p(mu_t, nu_t) <= C(t) W_p(mu_0, nu_0)``, C double exponential in t through the radius, for every p: Gronwall.

    Value, for p = 2: the bound from the printed constants over the one from ours, at t = 0.3, for measured ratios below
    both.
    """
    Y, found = X + 0.1 * RNG(1).standard_normal(X.shape), 0.0
    for p in (1.0, 2.0, np.inf):
        drift = oa.flow_stability(SOFTMAX, X, Y, t_span=(0.0, 0.3), t_eval=[0.15, 0.3], p=p)
        assert drift.verify()
        assert (np.log(drift.ratios) <= drift.log_bounds["ours"] + 1e-9).all()
        if p == 2.0:
            found = float(np.exp(drift.log_bounds["published"][-1] - drift.log_bounds["ours"][-1]))
    return found


@seed(
    f"{CACP25}; {TALKS}", "agrees", "otattn.flow", "otattn.flow_stability", "otattn.flow_radius_bound", value="e^1.50"
)
def test_parameters_that_depend_on_depth() -> float:
    """All of this holds for parameters ``A(t), V(t)`` that depend on time.

    Value: growth of one token under ``V(t) = 1 + t`` up to t = 1, as an exponent.
    """

    def layers(t: float) -> oa.SoftmaxAttention:
        return oa.SoftmaxAttention([[np.cos(t)]], [[1.0 + t]])

    drift = oa.flow_stability(layers, [[0.5], [-1.0]], [[0.6], [-0.8]], t_span=(0.0, 0.5), t_eval=[0.25, 0.5])
    assert drift.verify()
    growth = float(oa.flow(layers, [[1.0]], t_span=(0.0, 1.0)).points[-1, 0, 0])
    np.testing.assert_allclose(oa.flow_radius_bound(layers, 1.0, [1.0])[0], growth, rtol=0.1)
    return np.log(growth)


@seed(f"{CACP25}; {GLPR23}", "agrees", "otattn.mean_field_limit", value="rate 0.4", slow=True)
def test_mean_field_limit() -> float:
    """The PDE is the mean-field limit of the particles: flows of n tokens of a law tend to the flow of the law.

    Value: the rate in n for a Gaussian law of the line.
    """
    found = oa.mean_field_limit(
        oa.SoftmaxAttention([[1.0]], [[-1.0]]),
        oa.GaussianMeasure([0.0], [[1.0]]),
        n_values=[25, 100, 400],
        samples=32,
        t_span=(0.0, 0.5),
        rng=0,
    )
    return found.rate


@seed(CACP25, "agrees", "otattn.flow_stability")
def test_l2_flows_are_stable() -> None:
    """L2 attention is covered like softmax."""
    drift = oa.flow_stability(oa.L2Attention(A, A, V), X, X + 0.01, t_span=(0.0, 0.3), t_eval=[0.15, 0.3])
    assert drift.verify()
    assert (drift.log_bounds["ours"] >= np.log(drift.ratios)).all()


@seed(CACP25, "agrees", "otattn.flow_stability")
def test_sinkhorn_flows_are_stable() -> None:
    """So is Sinkhorn attention."""
    drift = oa.flow_stability(oa.SinkhornAttention(A, V), X, X + 0.01 * X[::-1], t_span=(0.0, 0.3), t_eval=[0.15, 0.3])
    assert drift.verify()
    assert (drift.log_bounds["ours"] >= np.log(drift.ratios)).all()


@seed(f"{GLPR23}; {CAP24}", "agrees", "otattn.flow")
def test_flows_on_the_sphere() -> None:
    """With LayerNorm as a projection, ``x_i' = P_{x_i} Gamma_mu(x_i)``, every token keeps its norm."""
    path = oa.flow(SOFTMAX, X, t_span=(0.0, 3.0), normalization="sphere", rtol=1e-8)
    np.testing.assert_allclose(
        np.linalg.norm(path.points, axis=2), np.linalg.norm(X, axis=1)[None].repeat(len(path.times), 0), rtol=1e-6
    )


@seed(f"{GLPR23}; {CACP25}", "agrees", "otattn.flow", "otattn.DiscreteMeasure")
def test_weak_solutions() -> None:
    """``d mu / dt + div(mu Gamma_mu) = 0``: in weak form, the flow of an empirical measure is that of its tokens, of any
    weights.

    Checked with the test function ``|x|^4``.
    """
    mu = oa.DiscreteMeasure(X, [0.3, 0.1, 0.1, 0.2, 0.2, 0.1])
    path = oa.flow(SOFTMAX, mu, t_span=(0.0, 0.02), t_eval=[0.0, 0.01, 0.02], rtol=1e-11, atol=1e-13)
    moments = [mu.weights @ (points**2).sum(axis=1) ** 2 for points in path.points]
    x = path.points[1]
    speed = SOFTMAX(x, oa.DiscreteMeasure(x, mu.weights))
    work = mu.weights @ (4.0 * (x**2).sum(axis=1) * (x * speed).sum(axis=1))
    np.testing.assert_allclose((moments[2] - moments[0]) / 0.02, work, rtol=1e-3)
