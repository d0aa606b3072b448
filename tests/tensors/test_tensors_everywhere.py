"""Every public function that takes arrays takes torch tensors: with a gradient, on strides, in any float; or says what to do."""

import inspect
from dataclasses import fields, is_dataclass

import numpy as np
import pytest

import otattn as oa
from otattn import _validate as check

torch = pytest.importorskip("torch", reason="torch is not installed")
EYE = np.eye(2)
HEAD = oa.SoftmaxAttention(EYE, EYE)
X = np.array([[0.5, 1.0], [1.0, -0.5], [-0.25, 0.75]])
Y = X + np.array([[0.25, 0.0], [0.0, 0.5], [0.125, 0.0]])
W = np.array([0.5, 0.25, 0.25])
T = np.array([0.5, 0.75, 1.0])
COV = np.array([[2.0, 0.5], [0.5, 1.0]])
GAUSS = oa.GaussianMeasure([0.0, 0.0], COV)
ENERGY = oa.energies.known_structure(HEAD).energy
MASKED = oa.MaskedAttention(HEAD)
SPAN = (0.0, 0.25)

# every entry is called with t = identity and with t = a way to make tensors
CALLS = {
    "Box": lambda t: oa.Box(t(-np.ones(2)), t(np.ones(2))),
    "DiscreteMeasure": lambda t: oa.DiscreteMeasure(t(X), t(W)),
    "DiscreteMeasure.normalized": lambda t: oa.DiscreteMeasure.normalized(t(X), t(2.0 * W)),
    "DiscreteMeasure.radius": lambda t: oa.DiscreteMeasure(X).radius(t(np.ones(2))),
    "Ellipsoid": lambda t: oa.Ellipsoid(t(COV), t(np.ones(2))),
    "ExponentialAttention": lambda t: oa.ExponentialAttention(t(EYE), t(COV)),
    "GaussianMeasure": lambda t: oa.GaussianMeasure(t(np.ones(2)), t(COV)),
    "L2Attention": lambda t: oa.L2Attention(t(EYE), t(COV), t(EYE)),
    "LayerNorm": lambda t: oa.LayerNorm(t(np.ones(2)), t(W[:2]), eps=t(np.array(0.125))),
    "LayerNormDomain": lambda t: oa.LayerNormDomain(t(np.ones(2)), t(W[:2])),
    "LinearAttention": lambda t: oa.LinearAttention(t(EYE), t(COV)),
    "MLP": lambda t: oa.MLP(t(X), t(W), t(X.T), output_bias=t(W[:2])),
    "MultiHeadAttention": lambda t: oa.MultiHeadAttention([HEAD], [t(COV)], output_bias=t(np.ones(2))),
    "PointSet": lambda t: oa.PointSet(t(X)),
    "RMSNorm": lambda t: oa.RMSNorm(t(np.ones(2))),
    "ReLUAttention": lambda t: oa.ReLUAttention(t(EYE), t(COV)),
    "RotaryAttention": lambda t: oa.RotaryAttention(
        t(EYE), t(COV), t(EYE), query_bias=t(np.ones(2)), scale=t(np.array(0.5))
    ),
    "SigmoidAttention": lambda t: oa.SigmoidAttention(t(EYE), t(COV)),
    "SinkhornAttention": lambda t: oa.SinkhornAttention(t(EYE), t(COV)),
    "SoftmaxAttention": lambda t: oa.SoftmaxAttention(t(EYE), t(COV), bias=t(np.ones(2)), value_bias=t(np.ones(2))),
    "SoftmaxAttention.from_qkv": lambda t: oa.SoftmaxAttention.from_qkv(
        t(EYE), t(COV), t(EYE), query_bias=t(np.ones(2))
    ),
    "SpaceTimeMeasure": lambda t: oa.SpaceTimeMeasure(t(T), t(X), t(W)),
    "SpaceTimeMeasure.from_sequence": lambda t: oa.SpaceTimeMeasure.from_sequence(t(X)),
    "call": lambda t: HEAD(t(X), t(Y)),
    "call, times": lambda t: MASKED(t(X), t(Y), times=t(T)),
    "on_tokens": lambda t: HEAD.on_tokens(t(X)),
    "on_batch": lambda t: HEAD.on_batch(t(np.stack([X, Y]))),
    "pushforward": lambda t: HEAD.pushforward(t(X)),
    "field_jacobian": lambda t: HEAD.field_jacobian(t(X), t(Y)),
    "jvp": lambda t: HEAD.jacobian(t(X)).jvp(t(Y)),
    "vjp": lambda t: HEAD.jacobian(t(X)).vjp(t(Y)),
    "reweighted": lambda t: HEAD.jacobian(t(X)).reweighted(t(W)).to_dense(),
    "project": lambda t: oa.Ball(0.5, 2).project(t(X)),
    "at_measure_bound": lambda t: oa.at_measure_bound(HEAD, t(X)),
    "bures_closedness": lambda t: oa.bures_closedness(HEAD, t(COV), rng=0),
    "certified_radius": lambda t: oa.certified_radius(HEAD, t(X), tol=0.25),
    "certify": lambda t: oa.certify(HEAD, t(X), radius=t(np.array(0.125))),
    "check_gradient_flow": lambda t: oa.check_gradient_flow(HEAD, t(X), rng=0),
    "conditional_transport": lambda t: oa.conditional_transport(t(X), t(Y)),
    "conditional_wasserstein": lambda t: oa.conditional_wasserstein(t(X), t(Y)),
    "covariance_distance": lambda t: oa.covariance_distance(t(COV), t(EYE)),
    "covariance_tangent": lambda t: oa.covariance_tangent(HEAD, t(COV)),
    "depth_convergence": lambda t: oa.depth_convergence(HEAD, t(X), depths=[2, 4], t_span=SPAN),
    "depth_profile": lambda t: oa.depth_profile(oa.Compose(HEAD, HEAD), t(X), other=t(Y)),
    "displacement_convexity": lambda t: oa.displacement_convexity(ENERGY, t(X), t(Y), n_times=3),
    "edit_stability": lambda t: oa.edit_stability(oa.Compose(HEAD, HEAD), t(X), {"one": t(Y)}),
    "energy_dissipation": lambda t: oa.energy_dissipation(HEAD, t(X), t_span=SPAN),
    "flow": lambda t: oa.flow(HEAD, t(X), t_span=SPAN, t_eval=t(np.array([0.0, 0.125, 0.25]))),
    "flow_radius_bound": lambda t: oa.flow_radius_bound(HEAD, t(np.array(1.0)), t(T)),
    "flow_stability": lambda t: oa.flow_stability(HEAD, t(X), t(Y), t_span=(0.0, 0.0625), bounds=False),
    "gaussian_flow": lambda t: oa.gaussian_flow(HEAD, GAUSS, t_span=SPAN, t_eval=t(np.array([0.0, 0.25]))),
    "gaussian_flow_batch": lambda t: oa.gaussian_flow_batch(HEAD, t(COV[None]), t_span=SPAN, means=t(np.ones((1, 2)))),
    "isotropic_dimension": lambda t: oa.isotropic_dimension(t(COV)),
    "local_growth": lambda t: oa.local_growth([HEAD], t(np.stack([X, Y])), n_values=[2, 3]),
    "local_lipschitz": lambda t: oa.local_lipschitz(HEAD, t(X), tol=t(np.array(1e-3))),
    "real_against_adversarial": lambda t: oa.real_against_adversarial([HEAD], t(np.stack([X, Y])), n_values=[2, 3]),
    "residual_steps": lambda t: oa.residual_steps(HEAD, t(X), depth=2, t_span=SPAN),
    "stability_ratio": lambda t: oa.stability_ratio(HEAD, t(X), t(Y)),
    "transport": lambda t: oa.transport(t(X), t(Y)),
    "transport_from_cost": lambda t: oa.transport_from_cost(
        t(W), t(W), t(np.abs(X) @ np.array([[1.0, 2.0, 0.5], [0.5, 0.25, 1.0]]))
    ),
    "wasserstein": lambda t: oa.wasserstein(t(X), t(Y), p=t(np.array(1.5))),
    "wasserstein_batch": lambda t: oa.wasserstein_batch(t(np.stack([X, Y])), t(np.stack([Y, X]))),
    "samplers.perturbation_pairs": lambda t: oa.samplers.perturbation_pairs(t(X), 0.125)(np.random.default_rng(0))[0],
    "bounds": lambda t: oa.bounds.castin2024_discrete(HEAD, radius=t(np.array(1.5)), n=4),
    "Ball": lambda t: oa.Ball(t(np.array(1.5)), dim=2),
    "GatedAttention": lambda t: oa.GatedAttention(HEAD, t(COV), t(np.ones(2))),
    "Mask": lambda t: oa.Mask(allowed=t(np.tri(3, dtype=bool))),
    "PositionBias": lambda t: oa.PositionBias(table=t(T)),
    "Rotation": lambda t: oa.Rotation(t(np.ones(1))),
    "ScoreAttention": lambda t: oa.ScoreAttention(
        t(EYE), t(COV), t(EYE), query_bias=t(np.ones(2)), cap=t(np.array(2.0))
    ),
    "grouped_queries": lambda t: oa.grouped_queries(
        t(COV), t(COV[:1]), t(EYE[:1]), t(EYE), num_heads=2, num_kv_heads=1
    ),
    "Residual": lambda t: oa.Residual(HEAD, scale=t(np.array(0.5))),
}
ELSEWHERE = {"measure_layers", "mean_field_limit"}
"""These take token numbers and times of a model, and laws: integers, no arrays of points."""


def takes_arrays(name):
    value = getattr(oa, name)
    if not callable(value) or (inspect.isclass(value) and issubclass(value, Exception)):
        return False
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return False
    kinds = ("ArrayLike",) if inspect.isclass(value) else ("ArrayLike", "MeasureLike", "AnyMeasure")
    names = () if inspect.isclass(value) else ("mu", "nu", "tokens", "windows")
    return any(any(kind in str(p.annotation) for kind in kinds) or p.name in names for p in parameters)


def test_every_function_is_here():
    missing = {name for name in oa.__all__ if takes_arrays(name)} - set(CALLS) - ELSEWHERE
    assert missing == set()


def numbers(value, depth=0):
    """All floats and arrays of a result, in order."""
    if isinstance(value, (bool, str, type(None))) or depth > 4:
        return []
    if isinstance(value, (int, float, np.number)):
        return [np.asarray(float(value))]
    if isinstance(value, np.ndarray):
        return [value.astype(float)] if value.dtype.kind in "bfiu" else []
    if isinstance(value, (tuple, list)):
        return [n for part in value for n in numbers(part, depth + 1)]
    if is_dataclass(value):
        return [n for f in fields(value) for n in numbers(getattr(value, f.name), depth + 1)]
    return []


def strided(x):
    """Every second entry of a larger tensor, as a part of a graph."""
    big = torch.zeros(*x.shape, 2, dtype=torch.float64)
    big[..., 0] = torch.tensor(x)
    return (1.0 * big.requires_grad_())[..., 0]


def whole(x, make):
    return torch.tensor(x) if x.dtype.kind in "biu" else make(x)


KINDS = {
    "with a gradient": strided,
    "bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16).requires_grad_(),
    "float32 parameter": lambda x: torch.nn.Parameter(torch.tensor(x, dtype=torch.float32)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_tensors_are_read_as_their_numbers(name, kind):
    make = KINDS[kind]
    same = (
        (lambda x: x)
        if kind == "with a gradient"
        else lambda x: make(x).detach().double().numpy() if x.dtype.kind == "f" else x
    )
    expected, found = numbers(CALLS[name](same)), numbers(CALLS[name](lambda x: whole(x, make)))
    assert expected
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: torch.eye(2).to_sparse(), r"to_dense\(\)"),
        (lambda: torch.eye(2, device="meta"), "meta device"),
        (lambda: torch.eye(2) + 1j, "real numbers"),
        (lambda: torch.quantize_per_tensor(torch.eye(2), 0.5, 0, torch.qint8), r"dequantize\(\)"),
        (lambda: torch.tensor([[1.0, torch.nan]]), "finite"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_holds_no_numbers_is_refused_in_one_line(tensor, message):
    with pytest.raises(ValueError, match=message) as found:
        oa.DiscreteMeasure(tensor())
    assert "\n" not in str(found.value)


def test_bits_and_small_floats():
    z = torch.tensor([[1.0 + 2.0j, 3.0]]).conj()
    assert check.points(z.imag).tolist() == [[-2.0, 0.0]]
    assert check.points(torch.eye(2).to(torch.float8_e4m3fn)).tolist() == EYE.tolist()
    assert check.points([torch.ones(2), [2.0, 3.0]]).tolist() == [[1.0, 1.0], [2.0, 3.0]]
    assert check.count(torch.tensor(3), "n") == 3
    for wrong in (torch.tensor(3.0), torch.ones(1, dtype=torch.int64)):
        with pytest.raises(ValueError, match="must be an integer"):
            check.count(wrong, "n")
    with pytest.raises(ValueError, match="must be a number"):
        check.positive(torch.ones(2, requires_grad=True), "radius")


@pytest.mark.parametrize(
    "call",
    [
        lambda m: oa.local_lipschitz(m, X),
        lambda m: oa.stability_ratio(m, X, Y),
        lambda m: oa.lipschitz_lower_bound(m, radius=1.0, n=2),
        lambda m: oa.lipschitz_upper_bound(m, radius=1.0, n=2),
        lambda m: oa.flow(m, X, t_span=SPAN),
        lambda m: oa.check_gradient_flow(m, X, rng=0),
        lambda m: oa.at_measure_bound(m, X),
        lambda m: oa.theorems(m, radius=1.0, n=2),
        lambda m: oa.stability_study(m, oa.samplers.uniform_ball_pairs(3, 2, 1.0), n_pairs=2, rng=0, progress=False),
        lambda m: oa.residual_steps(m, X, depth=2),
        lambda m: oa.Residual(m),
        lambda m: oa.MaskedAttention(m),
    ],
)
def test_modules_and_functions_are_told_what_to_do(call):
    for module in (torch.nn.MultiheadAttention(2, 1), lambda X, mu: X):
        with pytest.raises((TypeError, ValueError), match=r"from_torch|FunctionAttention"):
            call(module)
