"""Bootstrap intervals and end-point estimates on laws whose answers are known."""

import numpy as np
import pytest

from otattn.errors import ConvergenceError
from otattn.stability.result import bootstrap_interval, endpoint


@pytest.mark.parametrize("statistic", ["mean", "median", 0.9, np.std])
def test_interval_holds_its_statistic_and_shrinks(statistic: object) -> None:
    rng = np.random.default_rng(0)
    own = {"mean": np.mean, "median": np.median}.get(statistic, statistic) if isinstance(statistic, str) else statistic
    widths = []
    for n in (50, 800):
        x = rng.normal(size=n)
        low, high = bootstrap_interval(x, statistic, level=0.95, n_resamples=500, rng=np.random.default_rng(1))
        value = np.quantile(x, own) if isinstance(own, float) else own(x)
        assert low <= value <= high
        widths.append(high - low)
    assert widths[1] < 0.5 * widths[0]  # 1/4 in the limit


def test_interval_of_a_mean_is_the_normal_one() -> None:
    x = np.random.default_rng(2).exponential(size=2000)
    low, high = bootstrap_interval(x, "mean", level=0.95, n_resamples=4000, rng=np.random.default_rng(3))
    half = 1.96 * x.std() / np.sqrt(len(x))
    # 4000 resamples leave 3 percent of noise in the ends of the interval
    assert (high - low) / 2 == pytest.approx(half, rel=0.08)


def test_interval_does_not_depend_on_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(4).random(30)
    whole = bootstrap_interval(x, "mean", level=0.9, n_resamples=100, rng=np.random.default_rng(5))
    monkeypatch.setattr("otattn.stability.result._BATCH", 90)
    assert bootstrap_interval(x, "mean", level=0.9, n_resamples=100, rng=np.random.default_rng(5)) == whole


@pytest.mark.parametrize("bad", ["max", -0.1, 1.5, None, True])
def test_unknown_statistics(bad: object) -> None:
    with pytest.raises(ValueError, match="statistic must be"):
        bootstrap_interval(np.ones(5), bad, level=0.9, n_resamples=10, rng=np.random.default_rng(0))  # type: ignore[arg-type]


def test_a_statistic_that_is_not_finite_raises() -> None:
    with pytest.raises(ConvergenceError, match="must be finite"):
        bootstrap_interval(np.ones(5), lambda _: np.nan, level=0.9, n_resamples=10, rng=np.random.default_rng(0))


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (2.0, 2.0), (1.0, 3.0)])
def test_end_of_a_bounded_law(a: float, b: float) -> None:
    rng = np.random.default_rng(6)
    ends = [endpoint(3.0 * rng.beta(a, b, size=5000)) for _ in range(21)]
    values = np.array([value for value, _ in ends])
    assert (values >= [about["largest"] for _, about in ends]).all()
    # the end is 3; single estimates scatter by 10 percent when few values come near it
    assert np.median(values) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("name", ["exponential", "pareto", "constant", "two values", "ties", "zeros"])
def test_the_estimate_is_finite_and_not_below_the_sample(name: str) -> None:
    rng = np.random.default_rng(7)
    x = {
        "exponential": rng.exponential(size=500),
        "pareto": rng.pareto(1.0, size=500),
        "constant": np.full(100, 0.7),
        "two values": np.r_[np.zeros(99), 1.0],
        "ties": rng.integers(0, 3, size=200).astype(float),
        "zeros": np.zeros(50),
    }[name]
    value, about = endpoint(x)
    assert np.isfinite(value)
    assert value >= x.max()
    assert about["method"] in {"generalised Pareto", "order statistics", "constant tail"}
    if name in {"constant", "ties", "zeros"}:
        assert value == x.max()
        assert about["method"] == "constant tail"


def test_scale_equivariance() -> None:
    x = np.random.default_rng(8).random(300)
    assert endpoint(1e-9 * x)[0] == pytest.approx(1e-9 * endpoint(x)[0], rel=1e-9)


def test_too_few_values() -> None:
    with pytest.raises(ConvergenceError, match="at least 20 ratios, received 19"):
        endpoint(np.arange(19.0))
    for tail in (1, 11):
        with pytest.raises(ValueError, match="tail must"):
            endpoint(np.arange(20.0), tail)
