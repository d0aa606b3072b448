"""What every result can do: plain values, tables, one line in print, a file that holds it to the last bit."""

import copy
import dataclasses
import importlib
import inspect
import json
import math
import struct
import sys
import typing
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from attention_maps import MAPS
from scipy.integrate import DenseOutput, OdeSolution

import otattn as oa
from otattn._files.saved import Saved
from otattn._tabular import Result
from otattn.dynamics import residual_steps
from otattn.gradient_flow.energies import known_structure
from otattn.lipschitz.containment import NearTokens
from otattn.operators import top_singular

sys.path.append(str(Path(__file__).parent / "models"))
import synthetic

ROOMS = (
    "attention",
    "data",
    "distances",
    "dynamics",
    "gradient_flow",
    "gradient_flow.energies",
    "lipschitz",
    "lipschitz.bounds",
    "lipschitz.relaxations",
    "measures",
    "models",
    "operators",
    "stability",
)
HEAD = oa.SoftmaxAttention([[0.5, 0.2], [-0.1, 0.4]], [[1.0, 0.3], [0.0, -0.7]])
SYMMETRIC = oa.SoftmaxAttention([[1.0, 0.5], [0.5, -1.0]], [[1.0, 0.5], [0.5, -1.0]])
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(5, 2)), RNG.normal(size=(4, 2))
WINDOWS = RNG.normal(size=(2, 8, 2))
GAUSSIAN = oa.GaussianMeasure([0.0, 1.0], [[1.0, 0.2], [0.2, 0.5]])
PAIRS = oa.samplers.uniform_ball_pairs(3, 2, 1.0)
LINE = oa.SoftmaxAttention([[0.0]], [[1.0]])
FLOW = oa.flow(HEAD, X, t_span=(0.0, 1.0))


def layers() -> oa.LayerMeasurements:
    model = oa.models.load_model(synthetic.bert_weights(np.random.default_rng(0)), num_heads=3)
    ids = np.random.default_rng(1).integers(0, 17, (2, 6))
    return oa.measure_layers(model, ids, n_values=(3, 6), n_pairs=2, progress=False)


# one builder a class of results
BUILDERS = {
    "Asymmetry": lambda: oa.bures_closedness(HEAD, GAUSSIAN.cov),
    "Bound": lambda: oa.bounds.row_bound(HEAD, radius=1.0, n=4),
    "BoundTable": lambda: oa.bounds.table(oa.MaskedAttention(HEAD), radius=1.0, n=4),
    "Catalogue": lambda: oa.theorems(HEAD, radius=1.0, n=4),
    "Certificate": lambda: oa.relaxations.column_exponent(HEAD, domain=oa.Ball(1.0)),
    "ClusterHistory": lambda: oa.token_clusters(FLOW),
    "CompressionBound": lambda: oa.compression_bound(HEAD, X, oa.compress(X, 3, attention=HEAD)),
    "ConditionalTransport": lambda: oa.conditional_transport(X, 2.0 * X),
    "CovarianceClosedForm": lambda: oa.covariance_closed_form(SYMMETRIC, oa.GaussianMeasure([0.0, 0.0], np.eye(2))),
    "Crossover": lambda: oa.bounds.crossover(HEAD, 1.0),
    "DepthConvergence": lambda: oa.depth_convergence(HEAD, X, depths=(2, 4)),
    "DepthProfile": lambda: oa.depth_profile([HEAD, oa.Residual(HEAD)], X),
    "DisplacementConvexity": lambda: oa.displacement_convexity(known_structure(SYMMETRIC).energy, X, 1.0 + X),
    "EditStability": lambda: oa.edit_stability([HEAD, oa.Residual(HEAD)], X, {"moved": 1.1 * X, "cut": X[:-1]}),
    "Enclosure": lambda: oa.enclose_lipschitz(LINE, radius=1.0, n=2),
    "EnclosureTable": lambda: oa.enclosure_table(LINE, radius=1.0, n_values=(2, None)),
    "EnergyDissipation": lambda: oa.energy_dissipation(SYMMETRIC, X),
    "Estimates": lambda: oa.estimates(oa.MaskedAttention(HEAD), radius=1.0, n=4),
    "Exponent": lambda: oa.lipschitz.fit_exponent([1, 4], [1.0, 2.0]),
    "FlowStability": lambda: oa.flow_stability(HEAD, X, 1.1 * X, t_span=(0.0, 0.5), t_eval=[0.25, 0.5]),
    "GaussianFlowBatch": lambda: oa.gaussian_flow_batch(HEAD, [GAUSSIAN, GAUSSIAN], t_span=(0.0, 1.0)),
    "GaussianLimit": lambda: oa.gaussian_limit(oa.SoftmaxAttention(-np.eye(2), np.eye(2)), GAUSSIAN),
    "GaussianTrajectory": lambda: oa.gaussian_flow(SYMMETRIC, GAUSSIAN, t_span=(0.0, 1.0)),
    "GradientFlowReport": lambda: oa.check_gradient_flow(SYMMETRIC, X, rng=0),
    "KnownStructure": lambda: known_structure(oa.MultiHeadAttention([oa.LinearAttention(np.eye(2), np.eye(2))] * 2)),
    "LayerMeasurements": layers,
    "Leaders": lambda: oa.token_leaders(FLOW),
    "LimitPolytope": lambda: oa.limit_polytope(FLOW),
    "LocalGrowth": lambda: oa.local_growth([HEAD], WINDOWS, n_values=(2, 4)),
    "LocalLipschitz": lambda: oa.local_lipschitz(HEAD, X),
    "MeanFieldLimit": lambda: oa.mean_field_limit(HEAD, GAUSSIAN, n_values=[4, 8], samples=2, t_span=(0.0, 0.1), rng=0),
    "CostTransport": lambda: oa.transport_from_cost([0.5, 0.5], [0.25, 0.75], [[1.0, -2.0], [0.0, 1e9]]),
    "Plateau": lambda: oa.token_clusters(FLOW).plateaus()[0],
    "RankHistogram": lambda: oa.limit_rank_histogram(dim=2, draws=3, rng=0),
    "RealAgainstAdversarial": lambda: oa.real_against_adversarial([HEAD], WINDOWS, n_values=(3, 4)),
    "SampleComplexity": lambda: oa.sample_complexity(HEAD, GAUSSIAN, [4, 8], radius=[1.0, 2.0], samples=2, rng=0),
    "StabilityRatio": lambda: oa.stability_ratio(HEAD, X, 2.0 * X),
    "StabilityStudy": lambda: oa.stability_study(HEAD, PAIRS, n_pairs=25, rng=0, progress=False),
    "StructureTable": lambda: oa.structure_table(dim=2, n=4, rng=0),
    "Sweep": lambda: oa.sweep(HEAD, n=(2, 3), p=(1, math.inf), n_pairs=3, progress=False),
    "TopSingular": lambda: top_singular(HEAD.jacobian(X), rng=0),
    "Trajectory": lambda: FLOW,
    "TransportResult": lambda: oa.transport(X, Y),
}
# other values that the classes take: of other kinds, infinite, nested
FURTHER = {
    "Bound, infinite": lambda: oa.bounds.column_bound(oa.SoftmaxAttention([[900.0]], [[1.0]]), radius=1.0, n=None),
    "Bound, witness": lambda: oa.lipschitz_lower_bound(HEAD, radius=1.0, n=3),
    "Bound, tokens": lambda: oa.local_lipschitz(HEAD, X).bound(),
    "Certificate, nested": lambda: oa.relaxations.rows_and_columns(HEAD, radius=1.0, n=3),
    "Certificate, near a measure": lambda: oa.certify(HEAD, X, radius=1e-3),
    "Certificate, near": lambda: oa.relaxations.near_tokens(HEAD, X, 0.1),
    "Estimates, unknown": lambda: oa.estimates(oa.RotaryAttention(np.eye(2), np.eye(2), np.eye(2)), oa.PointSet(X)),
    "CompressionBound, queries": lambda: oa.compression_bound(HEAD, X, Y, p=math.inf, queries=Y, labels=[0, 1, 1, 3, 0]),
    "FlowStability, Gaussian": lambda: oa.flow_stability(HEAD, GAUSSIAN, oa.GaussianMeasure([0.0, 0.0], np.eye(2)),
                                                         t_span=(0.0, 0.5)),
    "SampleComplexity, text": lambda: oa.sample_complexity(HEAD, oa.DiscreteMeasure(X), [4, 8], radius=1.0, samples=1, rng=0),
    "StabilityRatio, causal": lambda: oa.stability_ratio(oa.MaskedAttention(HEAD), X, 2.0 * X),
    "StabilityRatio, Gaussian": lambda: oa.stability_ratio(HEAD, GAUSSIAN, oa.GaussianMeasure([0.0, 0.0], np.eye(2))),
    "Trajectory, causal": lambda: oa.flow(oa.MaskedAttention(HEAD), X, t_span=(0.0, 1.0), method="BDF"),
    "Trajectory, sphere": lambda: oa.flow(HEAD, X, t_span=(0.0, 1.0), normalization="sphere", method="Radau"),
    "Trajectory, rescaled": lambda: oa.flow(HEAD, X, t_span=(0.0, 1.0), normalization="rescaled", method="RK45"),
    "Trajectory, layers": lambda: residual_steps(HEAD, X, depth=3),
    "TransportResult, inf": lambda: oa.transport(X, Y, p=math.inf),
}  # fmt: skip
ALL = {**BUILDERS, **FURTHER}


@pytest.fixture(scope="module")
def built() -> dict[str, Result]:
    return {}


@pytest.fixture(params=ALL)
def result(request, built) -> Result:
    name = request.param
    if name not in built:
        built[name] = ALL[name]()
    return built[name]


def modules() -> list:
    return [oa, *(importlib.import_module(f"otattn.{name}") for name in ROOMS)]


def returned(hint) -> set:
    """The classes in a type."""
    if inspect.isclass(hint) and not typing.get_args(hint):
        return {hint}
    return {cls for part in typing.get_args(hint) for cls in returned(part)}


def test_every_public_result_has_a_builder() -> None:
    """Classes that are exported, and those that public functions, methods and properties return."""
    public = [getattr(module, name) for module in modules() for name in module.__all__]
    found = {value for value in public if inspect.isclass(value)}
    functions = [value for value in public if inspect.isfunction(value)]
    for cls in [value for value in public if inspect.isclass(value)]:
        for key, member in vars(cls).items():
            function = member.fget if isinstance(member, property) else getattr(member, "func", member)
            function = getattr(function, "__func__", function)
            if not key.startswith("_") and inspect.isfunction(function):
                functions.append(function)
    for function in functions:
        found |= returned(typing.get_type_hints(function).get("return"))
    assert {cls.__name__ for cls in found if issubclass(cls, Result)} - {"Result"} == set(BUILDERS)
    # what is a dataclass and no result: maps, measures, domains, energies, and what the models room opens
    rest = {c for c in found if dataclasses.is_dataclass(c) and not issubclass(c, Saved)}
    assert {c.__name__ for c in rest} == {"ModelConfig", "ModelLayer", "Projections", "SampleLayer"}


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_build_what_they_say(name, built) -> None:
    if name not in built:
        built[name] = BUILDERS[name]()
    assert type(built[name]).__name__ == name


def test_plain_values(result) -> None:
    json.dumps(result.to_dict(), allow_nan=False)


UNDEFINED = (oa.DepthProfile, oa.lipschitz.Exponent, oa.RealAgainstAdversarial)
"""Results with numbers that two points do not determine, such as the deviation of a slope, or that no layer before has."""


def test_tables(result) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    rows = result.rows()
    assert rows
    assert len({tuple(row) for row in rows}) == 1
    for value in (value for row in rows for value in row.values()):
        assert value is None or type(value) in (bool, int, float, str, list)
    frame = result.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == len(rows)
    html = result._repr_html_()
    assert html.startswith("<table>")
    assert 2 <= html.count("<tr>") == html.count("</tr>") <= 22
    assert "nan" not in html or type(result) in UNDEFINED


def test_one_line(result) -> None:
    text = repr(result)
    assert text.startswith(type(result).__name__)
    assert len(text) < 200
    assert "\n" not in text


def identical(a, b, where: str = "") -> None:
    """Types, bits of numbers, shapes and orders of arrays, all the way down."""
    assert type(a) is type(b), where
    if isinstance(a, Saved) and dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            identical(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    elif isinstance(a, (Saved, OdeSolution, DenseOutput)):
        identical(vars(a), vars(b), where)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert a.tobytes() == b.tobytes(), where
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            identical(x, y, f"{where}[{k}]")
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            identical(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b), where
    elif type(a).__name__ == "csr_array":
        for name in ("data", "indices", "indptr", "shape"):
            identical(getattr(a, name), getattr(b, name), f"{where}.{name}")
    elif inspect.isfunction(a):
        assert a is b, where
    else:
        assert a == b, where


def test_a_file_holds_every_bit(result, tmp_path) -> None:
    path = tmp_path / "result.npz"
    result.save(path)
    found = type(result).load(path)
    identical(result, found)
    assert repr(found) == repr(result)
    assert [p.name for p in tmp_path.iterdir()] == ["result.npz"]
    if isinstance(result, oa.operators.TopSingular):
        assert found.verify(HEAD.jacobian(X))
    elif hasattr(result, "verify") and getattr(result, "kind", "upper") in ("upper", "estimate"):
        assert found.verify()
    found.save(path)
    identical(type(result).load(path), result)


@pytest.mark.parametrize("name", MAPS)
def test_every_map_is_one_line_and_fits_in_a_file(name, tmp_path) -> None:
    attention = MAPS[name](np.random.default_rng(1))
    identical(*kept(attention, tmp_path))


DOMAINS = (
    oa.Ball(2.0),
    oa.Ball(0.1, 3),
    oa.Ellipsoid([[1.0, 0.3], [0.0, 0.0]], [0.1, 0.7]),
    oa.LayerNormDomain([1.0, 0.0, -3.0], [0.1, 0.2, 0.3]),
    oa.Box([0.0, -1.0], [0.1, 1e9]),
    oa.PointSet(X),
    NearTokens(X, 0.1),
    oa.DiscreteMeasure(X, [0.1, 0.2, 0.3, 0.4, 0.0]),
    oa.DiscreteMeasure.normalized(X, [1.0, 3.0, 1e-9, 7.0, 0.3]),
    oa.SpaceTimeMeasure.from_sequence(X),
    GAUSSIAN,
)


@pytest.mark.parametrize("value", DOMAINS, ids=repr)
def test_domains_and_measures(value, tmp_path) -> None:
    identical(*kept(value, tmp_path))


def kept(value, folder: Path) -> tuple:
    """A value and what a file gives back, in the place of a bound's witness."""
    assert len(repr(value)) < 200
    assert "\n" not in repr(value)
    oa.Bound(1.0, "lower", witness=value).save(folder / "x.npz")
    return value, oa.Bound.load(folder / "x.npz").witness


def test_large_maps_print_one_line() -> None:
    rng = np.random.default_rng(0)
    heads = [oa.SoftmaxAttention.from_qkv(*rng.normal(size=(3, 8, 96))) for _ in range(12)]
    layer = oa.MultiHeadAttention(heads, [rng.normal(size=(96, 8)) for _ in heads])
    mlp = oa.MLP(rng.normal(size=(200, 96)), np.zeros(200), rng.normal(size=(96, 200)))
    block = oa.TransformerBlock(layer, mlp, attention_norm=oa.LayerNorm(np.ones(96)))
    for value in (heads[0], layer, mlp, block, oa.Residual(block), oa.DiscreteMeasure(rng.normal(size=(500, 96)))):
        assert len(repr(value)) < 200
        assert "\n" not in repr(value)
    assert "96x96" in repr(heads[0])


VALUES = {
    "numbers": (0, -1, 2**200, True, None, 0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324),
    "scalars": [np.float64(0.1), np.float32(0.1), np.int64(-3), np.bool_(True), np.float64("nan"), np.str_("a")],
    "text": "\u00e9\n\"' \ud800",
    "containers": {"a": [1, (2, [])], 3: {}, (1, "x"): (), None: {"b": np.eye(2)}},
    "arrays": [np.zeros(0), np.zeros((0, 3)), np.array(1.5), np.asfortranarray(np.arange(6.0).reshape(2, 3)),
               np.arange(5)[::2], np.array([True, False]), np.arange(3, dtype=np.float32), np.array(["ab", "c"])],
    "results": {"inner": oa.Bound(2.0, "lower"), "resolution": oa.Resolution.ROUNDING},
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values(name, tmp_path) -> None:
    oa.Bound(1.0, "lower", details={"it": VALUES[name]}).save(tmp_path / "x.npz")
    identical(oa.Bound.load(tmp_path / "x.npz").details["it"], VALUES[name])


def test_what_occurs_twice_is_kept_once(tmp_path) -> None:
    big = oa.SoftmaxAttention(np.random.default_rng(0).normal(size=(100, 100)), np.eye(100))
    bound = oa.Bound(1.0, "lower", attention=big)
    table = oa.bounds.BoundTable((bound, dataclasses.replace(bound, value=2.0)))
    table.save(tmp_path / "x.npz")
    found = oa.bounds.BoundTable.load(tmp_path / "x.npz")
    assert found[0].attention is found[1].attention
    assert (tmp_path / "x.npz").stat().st_size < 2.2 * 8 * 100 * 100


class Scaled:
    """Not a value of the package."""


@dataclasses.dataclass(frozen=True)
class Toy(oa.attention.SoftmaxAttention):
    """A map of a user: a dataclass in a module."""

    extra: float = 0.5

    def __init__(self, A, V, extra=0.5):
        super().__init__(A, V)
        object.__setattr__(self, "extra", extra)


def test_what_no_file_can_hold_is_named(tmp_path) -> None:
    path = tmp_path / "x.npz"
    for value, word in ((lambda x: x, "<lambda>"), (Scaled(), "Scaled"), (np.array([None]), "ndarray"), ({1}, "set")):
        with pytest.raises(TypeError, match=rf"Bound\.details\.it\.0 must be made of .*{word}.*to_dict"):
            oa.Bound(1.0, "lower", details={"it": [value]}).save(path)
    function = oa.FunctionAttention(lambda x, mu: 2.0 * x)
    with pytest.raises(TypeError, match=r"StabilityRatio\.attention\.function"):
        oa.stability_ratio(function, X, 2.0 * X).save(path)
    with pytest.raises(TypeError, match=r"velocity\.attention.*lambda"):
        oa.flow(lambda t: HEAD, X, t_span=(0.0, 0.1)).save(path)

    class Local(oa.Bound):
        pass

    class Other:
        class Local(oa.Bound):
            pass

    Other.Local.__qualname__ = Local.__qualname__
    type("Local", (oa.Bound,), {"__qualname__": Local.__qualname__, "__module__": __name__})
    with pytest.raises(TypeError, match="cannot be found by its name"):
        Local(1.0, "lower").save(path)
    assert list(tmp_path.iterdir()) == []


def test_maps_of_a_user(tmp_path) -> None:
    identical(*kept(Toy([[1.0]], [[2.0]], 0.25), tmp_path))


def test_functions_of_a_study_are_left_out(tmp_path) -> None:
    function = oa.FunctionAttention(lambda x, mu: 2.0 * x)
    study = oa.stability_study(function, lambda rng: PAIRS(rng), n_pairs=3, rng=0, progress=False, key="a")
    study.save(tmp_path / "x.npz")
    bare = oa.StabilityStudy.load(tmp_path / "x.npz")
    assert (bare.attention, bare.sampler, bare.best.attention) == (None, None, None)
    assert study.attention is function
    full = oa.StabilityStudy.load(tmp_path / "x.npz", attention=function, sampler=PAIRS)
    identical(full.pair(1), study.pair(1))
    assert full.best.verify()


def change(path: Path, edit) -> None:
    """A file with another text or other arrays."""
    with np.load(path) as stored:
        arrays = dict(stored)
    meta = json.loads(arrays.pop("meta").tobytes())
    edit(meta, arrays)
    np.savez(path, meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8), **arrays)


def of(meta, name: str) -> dict:
    """The fields of the last object of a class."""
    return next(node["fields"] for node in reversed(meta["objects"]) if node["class"].endswith(f":{name}"))


def put(name: str, field: str, value):
    return lambda meta, arrays: of(meta, name).update({field: value})


DAMAGE = {
    "unknown field": (put("Bound", "more", 1), "'more' is unknown"),
    "missing field": (lambda meta, arrays: of(meta, "Bound").pop("theorem"), "'theorem' is missing"),
    "unknown key": (lambda meta, arrays: meta.update(more=1), "must have the keys"),
    "missing key": (lambda meta, arrays: meta.pop("root"), "must have the keys"),
    "format": (lambda meta, arrays: meta.update(format=7), "format is 7"),
    "unknown array": (lambda meta, arrays: arrays.update(more=np.eye(2)), "nothing uses its arrays"),
    "missing array": (lambda meta, arrays: arrays.pop("attention.A"), "'attention.A' is missing"),
    "type": (put("Bound", "value", "a"), "'value' must not be of type str"),
    "kind": (put("Bound", "kind", "exact"), "'kind'"),
    "count": (put("Bound", "n", 1.5), "'n'"),
    "value": (put("Bound", "value", {"code": 1}), "'code' is no kind of value"),
    "class": (lambda meta, arrays: meta["objects"][0].update({"class": "os:system"}), "there is no class"),
    "module": (lambda meta, arrays: meta["objects"][0].update({"class": "otattn.none:X"}), "otattn.none"),
    "main": (lambda meta, arrays: meta["objects"][0].update({"class": "otattn.__main__:X"}), "there is no class"),
    "function": (lambda meta, arrays: meta["objects"][0].update({"class": "otattn.cli:main"}), "there is no class"),
    "other class": (lambda meta, arrays: meta["objects"][0].update({"class": "otattn.stability.certify:Resolution"}), ""),
    "later object": (lambda meta, arrays: meta["objects"][0]["fields"].update(A={"object": 1}), ""),
    "negative object": (lambda meta, arrays: meta.update(root={"object": -1}), "no kind of value"),
    "shape": (lambda meta, arrays: arrays.update({"attention.V": np.eye(3)}), ""),
    "nan": (lambda meta, arrays: arrays.update({"attention.V": np.full((2, 2), np.nan)}), "must be finite"),
    "integers": (lambda meta, arrays: arrays.update({"attention.V": np.eye(2, dtype=np.int64)}), "'V'"),
    "list": (lambda meta, arrays: meta.update(objects=3), ""),
    "radius": (put("Ball", "radius", -1.0), "radius must be"),
    "no radius": (put("Ball", "radius", {"float": "inf"}), "radius must be"),
    "float": (put("Ball", "radius", {"float": "x"}), "'x' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_by_name(name, tmp_path) -> None:
    path = tmp_path / "x.npz"
    oa.bounds.row_bound(HEAD, radius=1.0, n=4).save(path)
    edit, words = DAMAGE[name]
    change(path, edit)
    with pytest.raises(ValueError, match=r"x\.npz must be a file written by Bound\.save") as error:
        oa.Bound.load(path)
    assert words in str(error.value)


INVALID = {
    "weights": (oa.DiscreteMeasure(X), {"weights": np.ones(5)}),
    "rounded weights": (oa.DiscreteMeasure(X), {"weights": np.full(5, 0.2 + 1e-8)}),
    "times": (oa.SpaceTimeMeasure.from_sequence(X), {"times": np.full(5, 2.0)}),
    "covariance": (GAUSSIAN, {"cov": -np.eye(2)}),
    "gain": (oa.LayerNormDomain([1.0, 2.0]), {"gain": np.ones(2)}),
    "box": (oa.Box([0.0], [1.0]), {"lower": np.array([2.0])}),
    "factors": (oa.SoftmaxAttention.from_qkv([[1.0, 2.0]], [[1.0, 3.0]], np.eye(2)), {"A": np.eye(2)}),
    "norm": (oa.RMSNorm([1.0, 2.0]), {"gain": np.ones((2, 2))}),
}


@pytest.mark.parametrize("name", INVALID)
def test_values_that_no_constructor_makes_are_refused(name, tmp_path) -> None:
    value, edit = INVALID[name]
    path = tmp_path / "x.npz"
    oa.Bound(1.0, "lower", witness=value).save(path)
    change(path, lambda meta, arrays: arrays.update({f"witness.{name}": value for name, value in edit.items()}))
    with pytest.raises(ValueError, match=r"must be a file written by Bound\.save"):
        oa.Bound.load(path)


def test_no_pickles_no_links_no_other_files(tmp_path) -> None:
    path = tmp_path / "x.npz"
    bound = oa.bounds.row_bound(HEAD, radius=1.0, n=4)
    bound.save(path)
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="must be"):
            oa.Bound.load(path)
    np.savez(path, meta=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="pickled objects, which are never loaded"):
        oa.Bound.load(path)
    np.savez(path, numerators=np.ones(3))
    with pytest.raises(ValueError, match="'meta' is missing"):
        oa.Bound.load(path)
    path.write_bytes(whole)
    (tmp_path / "link.npz").symlink_to(path)
    for call in (bound.save, oa.Bound.load):
        with pytest.raises(ValueError, match="symbolic link"):
            call(tmp_path / "link.npz")
        with pytest.raises(ValueError, match="a folder or a device"):
            call(tmp_path)
        with pytest.raises(ValueError, match="must be"):
            call("\0")
    with pytest.raises(FileNotFoundError):
        oa.Bound.load(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="in a folder that exists"):
        bound.save(tmp_path / "none" / "x.npz")
    with pytest.raises(
        ValueError, match=r"must hold an object of Enclosure, received one of Bound; read it with Bound\.load"
    ):
        oa.Enclosure.load(path)
    assert isinstance(oa.Bound.load(path), oa.Bound)


def test_one_damaged_byte_is_noticed(tmp_path) -> None:
    """The archive carries checksums: whatever byte of the data is changed, nothing else is read."""
    path = tmp_path / "x.npz"
    bound = oa.bounds.row_bound(HEAD, radius=1.0, n=4)
    bound.save(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 29):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with suppress(ValueError):
            identical(oa.Bound.load(path), bound)


def test_a_killed_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "x.npz"
    oa.Bound(1.0, "lower").save(path)

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        oa.Bound(2.0, "lower").save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]
    assert oa.Bound.load(path).value == 1.0


TAMPERED = {
    "CompressionBound": put("CompressionBound", "value", 1e-3),
    "Bound": put("Bound", "value", 1.0),
    "Certificate": lambda meta, arrays: of(meta, "Certificate").update(value=0.1),
    "LocalLipschitz": put("LocalLipschitz", "particle", 0.5),
    "StabilityRatio": put("StabilityRatio", "value", 9.0),
    "TransportResult": put("TransportResult", "lower", 9.0),
    "CostTransport": lambda meta, arrays: arrays.update({"plan.data": arrays["plan.data"][::-1]}),
    "ConditionalTransport": put("ConditionalTransport", "value", 0.1),
    "FlowStability": lambda meta, arrays: arrays.update(distances=0.5 * arrays["distances"]),
    "EnergyDissipation": lambda meta, arrays: arrays.update(work=2.0 * arrays["work"]),
    "GradientFlowReport": put("GradientFlowReport", "verdict", "no gradient structure"),
    "DisplacementConvexity": put("DisplacementConvexity", "least", 77.0),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_file_does_not_verify(name, built, tmp_path) -> None:
    if name not in built:
        built[name] = BUILDERS[name]()
    path = tmp_path / "x.npz"
    built[name].save(path)
    assert type(built[name]).load(path).verify()
    change(path, TAMPERED[name])
    assert not type(built[name]).load(path).verify()


def test_a_bound_of_another_map_does_not_cover(tmp_path) -> None:
    """Whoever edits the map in a file has a bound of that map, not of the caller's."""
    path = tmp_path / "x.npz"
    bound = oa.bounds.row_bound(HEAD, radius=1.0, n=4)
    bound.save(path)
    assert oa.Bound.load(path).verify(HEAD, domain=oa.Ball(1.0), n=4, p=2.0)
    change(path, lambda meta, arrays: arrays.update({"attention.V": 0.1 * arrays["attention.V"]}))
    assert not oa.Bound.load(path).verify(HEAD, domain=oa.Ball(1.0), n=4, p=2.0)


def test_loaded_arrays_cannot_be_written(tmp_path) -> None:
    local = copy.copy(oa.local_lipschitz(HEAD, X))
    local.save(tmp_path / "x.npz")
    found = oa.LocalLipschitz.load(tmp_path / "x.npz")
    with pytest.raises(ValueError, match="read-only"):
        found.right[0] = 0.0
