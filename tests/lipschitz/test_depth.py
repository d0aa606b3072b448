"""Norms of partial products: against dense matrices, in every family, with measures, masks and weights."""

import sys
from pathlib import Path

import numpy as np
import pytest

import otattn as oa
from otattn import plotting
from otattn.cli import main
from otattn.lipschitz.local.networks import network_of
from otattn.models import load_model
from otattn.operators import JacobianProduct, SingularValueError, top_singular

sys.path.append(str(Path(__file__).parents[1] / "models"))
import synthetic as syn

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
MODELS = {
    "bert": lambda: syn.bert(syn.bert_weights(np.random.default_rng(0), layers=3), num_heads=3),
    "gpt2": lambda: syn.gpt2(syn.gpt2_weights(np.random.default_rng(0), layers=3), num_heads=3),
    "llama": lambda: load_model(syn.llama_weights(np.random.default_rng(0), layers=3), config=CONFIG),
}
IDS = np.array([3, 1, 4, 1, 5, 9])


@pytest.fixture(params=MODELS, ids=str)
def model(request):
    return MODELS[request.param]()


def dense(maps, mu):
    """The derivative of maps one after another, by matrices, in L^2(mu)."""
    total = None
    for m in maps:
        J = m.jacobian(mu).reweighted(mu.weights).to_dense()
        total = J if total is None else J @ total
        mu = m.pushforward(mu)
    return total


def test_all_norms_are_those_of_dense_products(model):
    profile = oa.depth_profile(model, IDS, tol=1e-6)
    states = model.hidden_states(IDS)
    maps = profile.network.maps
    S = len(maps)
    assert model.num_layers + (model.layout.family.norms.get("final") is not None) == S
    mu = profile.mu
    for a in range(S):
        nu = mu
        for m in maps[:a]:
            nu = m.pushforward(nu)
        if a < model.num_layers:
            assert np.allclose(nu.points, states[a], atol=1e-12)
        for b in range(S):
            if b < a:
                assert np.isnan(profile.norms[a, b])
                continue
            exact = float(np.linalg.norm(dense(maps[a : b + 1], nu), 2))
            assert abs(profile.norms[a, b] - exact) <= profile.error_bars[a, b]
            assert profile.error_bars[a, b] <= 1.01e-6 * exact
            assert profile.norms[a, b] <= exact * (1 + 1e-12)
    assert (profile.composed <= profile.product * (1 + 1e-9)).all()
    assert profile.verify()
    us = [np.linalg.svd(dense([m], nu)) for m, nu in profile.network.stages(mu)]
    expected = [abs(us[s][0][:, 0] @ us[s + 1][2][0]) for s in range(S - 1)]
    assert np.allclose(profile.alignment, expected, atol=1e-4)


def test_weights_are_those_of_the_measure():
    rng = np.random.default_rng(3)
    maps = [
        oa.Residual(oa.SoftmaxAttention(rng.standard_normal((3, 3)), rng.standard_normal((3, 3)))) for _ in range(2)
    ]
    mu = oa.DiscreteMeasure(rng.standard_normal((6, 3)), [0.4, 0.1, 0.0, 0.2, 0.25, 0.05])
    profile = oa.depth_profile(maps, mu, splitting=True, tol=1e-8)
    for s in (1, 2):
        local = oa.local_lipschitz(oa.Compose(*maps[:s]), mu)
        assert np.isclose(profile.composed[s - 1], local.particle, rtol=1e-8)
        assert np.isclose(profile.splitting[s - 1], local.splitting, rtol=1e-12)


def test_the_splitting_part_and_the_local_constant_of_a_model(model):
    profile = oa.depth_profile(model, IDS, splitting=True, partial=False)
    assert np.isnan(profile.norms[1, 2])
    for s in range(1, len(profile.names) + 1):
        local = oa.local_lipschitz(oa.Compose(*profile.network.maps[:s]), profile.mu)
        assert abs(local.particle - profile.composed[s - 1]) <= profile.error_bars[0, s - 1]
        assert np.isclose(local.splitting, profile.splitting[s - 1], rtol=1e-10)


def test_two_texts_and_growth(model):
    other = np.array([2, 7, 1, 8, 2, 8])
    profile = oa.depth_profile(model, IDS, other=other, n_values=(2, 6))
    assert np.allclose(profile.growth[1], profile.composed, rtol=2e-3)
    assert np.allclose(profile.growth[0], oa.depth_profile(model, IDS[:2]).composed, rtol=2e-3)
    mu, nu = (network_of(model, ids)[1] for ids in (IDS, other))
    for s in (1, len(profile.names)):
        part = oa.Compose(*profile.network.maps[:s])
        assert np.isclose(profile.stability[s - 1], oa.stability_ratio(part, mu, nu).value, rtol=1e-9)


def test_a_slice_of_the_layers(model):
    whole, part = oa.depth_profile(model, IDS), oa.depth_profile(model, IDS, first=1, last=3)
    assert part.names[:2] == ("layer 1", "layer 2")
    assert part.names == whole.names[1:]
    assert np.allclose(part.norms, whole.norms[1:, 1:], rtol=2e-3, equal_nan=True)
    assert oa.depth_profile(model, IDS, first=1, last=2).names == ("layer 1",)
    states = model.hidden_states(IDS)
    again = oa.depth_profile(model, states[1], first=1, last=3)
    assert np.allclose(part.norms, again.norms, rtol=2e-3, equal_nan=True)
    stages = oa.depth_profile(model.map(), whole.mu, first=-1)
    assert stages.names[-1].startswith(str(len(whole.names) - 1))


def test_values_from_above(model):
    def proved(operator):
        exact = float(np.linalg.norm(operator.to_dense(), 2))
        return exact * (1 - 1e-12), exact * (1 + 1e-12), "dense"

    profile = oa.depth_profile(model, IDS, partial=False, bounds=proved)
    assert (profile.composed <= profile.upper).all()
    assert (profile.upper <= profile.composed + profile.error_bars[0]).all()
    assert set(profile.how) == {"dense"}
    assert [r["upper"] for r in profile.rows()] == profile.upper.tolist()


def test_rows_and_pictures(model):
    profile = oa.depth_profile(model, IDS, other=IDS[::-1], splitting=True)
    rows = profile.rows()
    assert [r["composed"] for r in rows] == profile.composed.tolist()
    assert [r["product"] for r in rows] == profile.product.tolist()
    assert str(profile).count("\n") == len(rows)
    data = profile.to_dict()
    assert data["norms"][1][0] is None
    assert data["norms"][0][1] == profile.norms[0, 1]
    ax = plotting.plot_depth(profile)
    drawn = [line.get_ydata().tolist() for line in ax.lines]
    for values in (profile.product, profile.blocks, profile.composed, profile.splitting, profile.stability):
        assert values.tolist() in drawn
    with pytest.raises(TypeError, match="profile"):
        plotting.plot_depth(profile.norms)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3.0, IDS), {}, "network must be a model"),
        (([], IDS), {}, "one or more attention maps"),
        ((MODELS["bert"](), IDS.reshape(2, 3)), {}, "one window"),
        ((MODELS["bert"](), IDS), {"first": 2, "last": 1}, "last must come after first"),
        ((MODELS["bert"]().map(), np.zeros((2, 12))), {"first": 5}, "leave a stage"),
        ((MODELS["bert"](), IDS), {"other": IDS}, "0 / 0"),
        ((MODELS["bert"](), IDS), {"n_values": (7,)}, "at most the number of tokens 6"),
        ((MODELS["bert"](), IDS), {"tol": 0.0}, "tol"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        oa.depth_profile(*arguments, **options)


def test_an_iteration_that_stops_early_says_so():
    with pytest.raises(SingularValueError, match="needs a relative error"):
        oa.depth_profile(MODELS["bert"](), IDS, tol=1e-12, max_iter=3)


def test_a_start_helps_and_never_misleads():
    """A start orthogonal to the top vector finds it all the same; the true vector needs the fewest products."""
    M = np.diag([4.0, 2.0, *np.linspace(1.5, 0.1, 300)])
    blind = top_singular(M, tol=1e-8, start=np.eye(302)[1])
    assert np.isclose(blind.value, 4.0, rtol=1e-8)
    good = top_singular(M, tol=1e-8, start=np.eye(302)[0])
    assert np.isclose(good.value, 4.0, rtol=1e-8)
    assert good.iterations <= blind.iterations
    assert top_singular(M, tol=1e-8, start=np.zeros(302)).converged
    with pytest.raises(ValueError, match="302 entries"):
        top_singular(M, start=[1.0])


def test_products_of_jacobians():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((5, 3))
    first, second = (oa.SoftmaxAttention(rng.standard_normal((3, 3)), rng.standard_normal((3, 3))) for _ in range(2))
    J = JacobianProduct([first.jacobian(X), second.jacobian(first.on_tokens(X))])
    whole = oa.Compose(first, second).jacobian(X)
    assert np.allclose(J.to_dense(), whole.to_dense(), rtol=1e-12, atol=1e-13)
    assert np.allclose(J.single.to_dense(), J.to_dense())  # no part of it has a float32 form


def test_the_command(tmp_path, capsys):
    weights = syn.bert_weights(np.random.default_rng(0), layers=3)
    path = tmp_path / "model.safetensors"
    syn.write_safetensors(path, weights)
    np.save(tmp_path / "ids.npy", IDS)
    call = ["depth", "--model", str(path), "--heads", "3", "--tokens", str(tmp_path / "ids.npy"), "--quiet"]
    assert main([*call, "--n", "6", "--json", "--out", str(tmp_path / "out")]) == 0
    assert '"composed"' in capsys.readouterr().out
    assert (tmp_path / "out" / "depth.png").read_bytes().startswith(b"\x89PNG")
    assert main([*call, "--n", "4", "--layers", "2", "--composed"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    for wrong, message in (
        (["--n", "9"], "at least 9"),
        (["--layers", "4"], "at most 3"),
        (["--text", "x"], "one too many"),
    ):
        assert main([*call, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_family_is_told_by_its_tensors():
    for name, make in MODELS.items():
        weights = {
            "bert": lambda: syn.bert_weights(np.random.default_rng(0), layers=3),
            "gpt2": lambda: syn.gpt2_weights(np.random.default_rng(0), layers=3),
            "llama": lambda: syn.llama_weights(np.random.default_rng(0), layers=3),
        }[name]()
        opened = load_model(weights, **({"config": CONFIG} if name == "llama" else {"num_heads": 3}))
        assert type(opened) is type(make())
        assert np.array_equal(opened.hidden_states(IDS), make().hidden_states(IDS))
