"""Every function draws its result, and names what draws another one."""

import inspect

import numpy as np
import pytest

import otattn as oa
from otattn import plotting
from otattn.plotting.style import DRAWN_BY

EYE = np.eye(2)
SOFTMAX = oa.SoftmaxAttention(EYE, EYE)
DRAW = [name for name in plotting.__all__ if name.startswith(("plot_", "animate_"))]


def study(attention=SOFTMAX, seed=0, p=2):
    sampler = oa.samplers.gaussian_pairs(3, 2)
    return oa.stability_study(attention, sampler, n_pairs=5, p=p, rng=seed, progress=False)


@pytest.fixture(scope="module")
def gaussian():
    return oa.gaussian_flow(oa.SoftmaxAttention(-EYE, EYE), oa.GaussianMeasure([0.0, 0.0], EYE), t_span=(0.0, 0.5))


def test_a_study_is_drawn_as_it_is():
    one = study()
    ax = plotting.plot_stability(one)
    bar, box, dot = ax.lines[:3]
    assert bar.get_ydata().tolist() == [one.ratios.min(), one.ratios.max()]
    assert box.get_ydata().tolist() == [one.quantile(0.25), one.quantile(0.75)]
    assert dot.get_ydata().tolist() == [one.best.value]
    names = [t.get_text() for t in ax.get_legend().get_texts()]
    assert names == ["$W_{2}$", "all ratios", "middle half", "largest: a lower bound of the constant"]
    assert [t.get_text() for t in ax.get_xticklabels()] == [one.labels["attention"]]


def test_several_studies_and_metrics():
    first, second = study(), study(oa.SoftmaxAttention(-EYE, EYE), 1)
    ax = plotting.plot_stability([first, second])
    assert len(ax.lines) == 6 + 3
    ax = plotting.plot_stability({"W_2": [first, second], "W_1": [study(p=1), [0.5, 1.0]]}, labels=["a", "b"])
    assert len(ax.lines) == 12 + 3
    assert [t.get_text() for t in ax.get_xticklabels()] == ["a", "b"]
    assert ax.lines[-4].get_ydata().tolist() == [1.0]


@pytest.mark.parametrize(
    ("ratios", "error", "message"),
    [
        (3.0, TypeError, "StabilityStudy"),
        ("study", TypeError, "StabilityStudy"),
        (None, TypeError, "StabilityStudy"),
        ([], ValueError, "at least one map"),
        ({}, ValueError, "1 to 4 metrics"),
        ({"W_2": [[]]}, ValueError, "at least one ratio"),
        ([[1.0, np.nan]], ValueError, "finite"),
        ([1.0, 2.0], ValueError, "dimension"),
        ([np.ma.array([1.0, 9.0], mask=[0, 1])], ValueError, "masked"),
    ],
)
def test_what_is_no_ratio_is_refused(ratios, error, message):
    with pytest.raises(error, match=message):
        plotting.plot_stability(ratios)


def test_labels_are_counted():
    with pytest.raises(ValueError, match="labels must name 1 maps, received 2"):
        plotting.plot_stability(study(), labels=["a", "b"])


def test_a_gaussian_trajectory_is_sent_to_its_pictures(gaussian):
    for draw in (plotting.plot_token_flow, plotting.plot_sphere_flow):
        with pytest.raises(
            TypeError, match="must be a Trajectory, received GaussianTrajectory; plot_covariance_ellipses"
        ):
            draw(gaussian)
    tokens = oa.flow(SOFTMAX, [[0.0, 1.0], [1.0, 0.0]], t_span=(0.0, 1.0))
    for draw in (plotting.plot_covariance_cone, plotting.plot_shape_disc, plotting.plot_covariance_ellipses):
        with pytest.raises(
            TypeError, match="received Trajectory; plot_token_flow, plot_sphere_flow and animate_flow take"
        ):
            draw(tokens)
    assert plotting.plot_covariance_ellipses(gaussian).lines
    with pytest.raises(TypeError, match="received StabilityStudy; plot_stability takes that"):
        plotting.plot_token_flow(study())


@pytest.mark.parametrize("name", [n for n in DRAW if n not in ("plot_crossover", "plot_head_enclosures")])
def test_every_function_says_what_it_takes(name, tmp_path):
    draw = getattr(plotting, name)
    needed = [p for p in inspect.signature(draw).parameters.values() if p.default is p.empty]
    kinds = [kind for kind, drawn in DRAWN_BY.items() if name in drawn]
    assert kinds, f"{name} is in no line of DRAWN_BY"
    arguments = [object()] + [tmp_path / "x.gif" if p.name == "path" else object() for p in needed[1:]]
    with pytest.raises(TypeError, match=f"must be an? ({'|'.join(kinds)})"):
        draw(*arguments)


def test_the_table_of_pictures_names_what_exists():
    for drawn in DRAWN_BY.values():
        for name in drawn.replace(" and ", ", ").split(", "):
            assert name in plotting.__all__


def test_figures_in_the_width_of_columns(tmp_path):
    """One or two columns of a paper, as a vector; other widths are refused."""
    ax = plotting.plot_stability(study())
    for columns, width in ((1, 3.35), (2, 6.9)):
        plotting.save(ax, tmp_path / "a.svg", columns=columns)
        assert ax.figure.get_size_inches()[0] == pytest.approx(width)
        assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(ValueError, match="columns must be 1, 2 or None"):
        plotting.save(ax, tmp_path / "a.svg", columns=3)


@pytest.mark.slow
def test_a_line_far_above_does_not_squash_the_others():
    """The mean-field row, e^(2a), goes to the legend when it is a hundred times above the rest."""
    table = oa.enclosure_table(oa.SoftmaxAttention(-4.0 * EYE, EYE), radius=3.0, n_values=(2, 4, None), rng=0)
    ax = plotting.plot_enclosure(table)
    assert table.enclosures[-1].upper.value > 100.0 * max(e.upper.value for e in table.enclosures[:2])
    assert ax.get_ylim()[1] < table.enclosures[-1].upper.value
    assert any("above the picture" in t.get_text() for t in ax.get_legend().get_texts())
