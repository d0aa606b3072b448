"""Enclosures: witnessed from below, proven from above, never crossed; the comparison of real and adversarial tokens."""

import json
import math

import numpy as np
import pytest

import otattn as oa
from otattn.cli import main
from otattn.lipschitz.comparison import adversarial_head_tokens, reduced_head
from otattn.lipschitz.enclosure import published_upper
from otattn.lipschitz.upper_bound import upper_bounds


def unit(M: np.ndarray) -> np.ndarray:
    return M / np.linalg.norm(M, 2)


@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 8, None))])
@pytest.mark.parametrize("kind", ["identity", "minus", "generic", "low rank", "zero"])
def test_lower_never_exceeds_upper(kind: str, n: int | None) -> None:
    rng = np.random.default_rng(3)
    A = {
        "identity": np.eye(3),
        "minus": -np.eye(3),
        "generic": unit(rng.normal(size=(3, 3))),
        "low rank": np.outer(rng.normal(size=3), rng.normal(size=3)),
        "zero": np.zeros((3, 3)),
    }[kind]
    V = rng.normal(size=(2, 3))
    enclosure = oa.enclose_lipschitz(oa.SoftmaxAttention(A, V), radius=1.5, n=n, rng=0)
    lower, upper = enclosure.lower, enclosure.upper
    assert (lower.kind, upper.kind) == ("lower", "upper")
    assert 0 < lower.value <= upper.value * (1 + 1e-9)
    # the witness gives its value again
    assert lower.witness.radius() <= 1.5 * (1 + 1e-9)
    if n is not None:
        J = oa.SoftmaxAttention(A, V).jacobian(lower.witness.tokens(n)).to_dense()
        assert np.linalg.norm(J, 2) == pytest.approx(lower.value, rel=1e-6)
    else:
        local = oa.local_lipschitz(oa.SoftmaxAttention(A, V), lower.witness, domain=oa.Ball(1.5, 3))
        assert local.value >= lower.value * (1 - 1e-6)
    paper = published_upper(oa.SoftmaxAttention(A, V), radius=1.5, n=n)
    assert paper is not None
    assert upper.value <= paper.value * (1 + 1e-9)


def test_w_inf_knows_no_n() -> None:
    attention = oa.SoftmaxAttention(np.eye(3), np.eye(3))
    for n in (2, 50, None):
        bound = oa.lipschitz_upper_bound(attention, radius=2.0, n=n, p=np.inf)
        assert bound.value == pytest.approx(4 + math.sqrt(17), rel=1e-9)


@pytest.mark.slow
def test_best_is_the_least_and_methods_select() -> None:
    attention = oa.SoftmaxAttention(-np.eye(3), np.eye(3))
    every = upper_bounds(attention, radius=2.0, n=8)
    best = oa.lipschitz_upper_bound(attention, radius=2.0, n=8)
    assert best.value == min(b.value for b in every)
    assert best.details["candidates"] == len(every) >= 3
    row = oa.lipschitz_upper_bound(attention, radius=2.0, n=8, theorem="row_bound")
    assert row.theorem == "row_bound"
    assert row.value >= best.value
    with pytest.raises(ValueError, match=r"theorem must be one of .*received 'nothing'"):
        oa.lipschitz_upper_bound(attention, radius=2.0, n=8, theorem="nothing")
    with pytest.raises(ValueError, match="effort must be"):
        oa.lipschitz_upper_bound(attention, radius=2.0, n=8, effort="huge")
    with pytest.raises(ValueError, match="applies to MaskedAttention"):
        oa.lipschitz_upper_bound(oa.MaskedAttention(attention), radius=2.0, p=1)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_scaling_case_l1(scale: float) -> None:
    rng = np.random.default_rng(0)
    A, V = unit(rng.normal(size=(3, 3))), unit(rng.normal(size=(3, 3)))
    one = oa.lipschitz_upper_bound(oa.SoftmaxAttention(A, V), radius=1.5, n=6)
    # x -> scale x turns (A, V, R) into (A / scale^2, V, scale R); the constant stays
    moved = oa.lipschitz_upper_bound(oa.SoftmaxAttention(A / scale**2, V), radius=1.5 * scale, n=6)
    assert moved.value == pytest.approx(one.value, rel=1e-6)
    values = oa.lipschitz_upper_bound(oa.SoftmaxAttention(A, scale * V), radius=1.5, n=6)
    # a branch and bound ends elsewhere
    assert values.value == pytest.approx(scale * one.value, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_ratios_of_random_pairs_stay_below_the_upper_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    d, n, R = int(rng.integers(1, 4)), int(rng.integers(1, 9)), float(rng.uniform(0.3, 2.5))
    A, V = rng.normal(size=(d, d)), rng.normal(size=(int(rng.integers(1, 4)), d))
    head = oa.SoftmaxAttention(A, V, bias=0.3 * rng.normal(size=d))
    maps = [head, oa.MaskedAttention(oa.SoftmaxAttention(A, V)), oa.MultiHeadAttention([head, head])]
    for attention in maps:
        upper = oa.lipschitz_upper_bound(attention, radius=R, n=n).value
        for _ in range(60):
            X = oa.Ball(R, d).sample(n, rng)
            Y = X if rng.random() < 0.5 else oa.Ball(R, d).sample(n, rng)
            Y = oa.Ball(R, d).project(Y + 10.0 ** rng.uniform(-4, 0) * rng.normal(size=Y.shape))
            ratio = np.linalg.norm(attention.on_tokens(X) - attention.on_tokens(Y)) / np.linalg.norm(X - Y)
            assert ratio <= upper * (1 + 1e-9)


@pytest.mark.slow
def test_enclosure_table_and_its_views() -> None:
    attention = oa.SoftmaxAttention(-np.eye(2), np.eye(2))
    table = oa.enclosure_table(attention, radius=1.0, n_values=[4, None])
    assert [row["n"] for row in table.rows()] == [4, None]
    assert all(row["lower"] <= row["upper"] <= row["published"] for row in table.rows())
    assert "any" in str(table)
    assert table._repr_html_().count("<tr>") == 3
    assert 1.0 <= table.geometric_mean_ratio() < 3.0
    by_radius = oa.enclosure_table(attention, radius=1.0, n_values=[4], radii=[0.5, 1.0])
    assert by_radius.rows()[0]["radius"] == 0.5
    assert by_radius.rows()[1]["upper"] == pytest.approx(table.rows()[0]["upper"], rel=1e-9)
    ax = oa.plotting.plot_enclosure(table)
    assert ax.get_xscale() == "log"
    assert len(ax.get_legend().get_texts()) >= 5


def test_reduced_head_keeps_the_constants() -> None:
    layer = oa.load_sample()
    head = layer.heads[3]
    reduced, basis = reduced_head(head)
    assert basis is not None
    assert basis.shape == (384, 96)
    X = layer.tokens(0, 12)
    full = oa.local_lipschitz(head, X)
    small = oa.local_lipschitz(reduced, X @ basis)
    assert small.particle == pytest.approx(full.particle, rel=1e-9)
    assert small.splitting == pytest.approx(full.splitting, rel=1e-9)


@pytest.mark.slow
def test_real_against_adversarial() -> None:
    layer = oa.load_sample()
    result = oa.real_against_adversarial(layer.heads[:1], layer.hidden_states[:2], n_values=[8, 32])
    tokens = adversarial_head_tokens(layer.heads[0], 8, result.radius, rng=0)
    assert tokens.radius() <= result.radius * (1 + 1e-9)
    assert np.abs(tokens.weights * 8 - np.rint(tokens.weights * 8)).max() < 1e-9
    record = result.rows()[0]
    # real tokens are far from the worst case, which grows like sqrt(n)
    assert record["ratio"] > 20
    assert record["adversarial_exponent"] > record["real_exponent"] + 0.1
    assert result.adversarial_exponent(0).exponent == pytest.approx(0.5, abs=0.15)
    bound = oa.bounds.row_bound(layer.heads[0], radius=result.radius, n=32).value
    assert result.adversarial[0, -1] <= bound
    assert len(oa.plotting.plot_real_against_adversarial(result).lines) == 4


@pytest.mark.slow
def test_bounds_command(tmp_path, capsys: pytest.CaptureFixture) -> None:
    np.savez(tmp_path / "layer.npz", A=-np.eye(1), V=np.eye(1))
    arguments = ["bounds", "--weights", str(tmp_path / "layer.npz"), "--radius", "1.5", "--n", "4", "--quiet"]
    assert main([*arguments, "--json", "--out", str(tmp_path / "out")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["n"] for row in data["rows"]] == [4, None]
    assert data["log10_crossover_n"]["ours"] < data["log10_crossover_n"]["published"]
    assert (tmp_path / "out" / "bounds.png").stat().st_size > 5000
    assert main(arguments) == 0
    assert "mean-field bound the smaller one" in capsys.readouterr().out
    assert main([*arguments, "--head", "3"]) == 2
    assert "head must be from 0 to 0" in capsys.readouterr().err


def test_two_tokens_are_compared_without_two_anchors() -> None:
    rng = np.random.default_rng(0)
    heads = [oa.SoftmaxAttention(rng.normal(size=(3, 3)), np.eye(3))]
    found = oa.real_against_adversarial(heads, rng.normal(size=(2, 4, 3)), n_values=(2, 3))
    assert found.adversarial.shape == (1, 2)
    assert (found.adversarial > 0.0).all()


@pytest.mark.slow
def test_a_head_without_two_anchors_gets_its_tokens_by_ascent() -> None:
    seed = np.random.SeedSequence(3)
    rng = np.random.default_rng(5)
    cases = (
        (rng.standard_normal((2, 2)), np.eye(2), 6, "two-anchor"),
        (-np.eye(1), np.eye(1), 6, "ascent"),
        (-np.eye(2), np.eye(2), 2, "ascent"),
    )
    for A, V, n, method in cases:
        head = oa.SoftmaxAttention(A, V)
        chosen = adversarial_head_tokens(head, n, 2.0, rng=seed)
        asked = adversarial_head_tokens(head, n, 2.0, method=method, rng=seed)
        assert np.array_equal(chosen.points, asked.points)
        assert np.array_equal(chosen.weights, asked.weights)
        if method == "ascent":
            with pytest.raises(ValueError, match="two anchors"):
                adversarial_head_tokens(head, n, 2.0, method="two-anchor", rng=seed)
