"""Results as tables in notebooks and as data frames; tensors as arguments."""

import functools
import sys

import numpy as np
import pytest

import otattn as oa
from otattn._tabular import html_table

ATTENTION = oa.SoftmaxAttention(-np.eye(2), np.eye(2))
X = np.random.default_rng(0).normal(size=(5, 2))
WINDOWS = np.random.default_rng(1).normal(size=(2, 8, 2))
PAIRS = oa.samplers.uniform_ball_pairs(3, 2, 1.0)


MAKERS = {
    "StabilityRatio": lambda: oa.stability_ratio(ATTENTION, X, 2 * X),
    "StabilityStudy": lambda: oa.stability_study(ATTENTION, PAIRS, n_pairs=8, rng=0, progress=False),
    "Sweep": lambda: oa.sweep(ATTENTION, n=(2, 3), n_pairs=3, progress=False),
    "LocalLipschitz": lambda: oa.local_lipschitz(ATTENTION, X),
    "LocalGrowth": lambda: oa.local_growth([ATTENTION], WINDOWS, n_values=(2, 4, 8)),
    "Bound": lambda: oa.bounds.row_bound(ATTENTION, radius=1.0, n=4),
}


@pytest.fixture(scope="module")
def made():
    return functools.cache(lambda name: MAKERS[name]())


@pytest.mark.parametrize("name", MAKERS)
def test_notebook_tables(name, made) -> None:
    text = made(name)._repr_html_()
    assert text.startswith("<table>")
    assert text.count("<tr>") == text.count("</tr>") >= 2
    assert "nan" not in text


@pytest.mark.parametrize("name", MAKERS)
def test_data_frames(name, made, monkeypatch) -> None:
    result = made(name)
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = result.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == len(result.rows())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        result.to_dataframe()


def test_html_is_escaped_and_empty_tables_are_tables() -> None:
    assert "&lt;script&gt;" in html_table([{"x": "<script>"}])
    assert html_table([]) == "<table><thead><tr></tr></thead><tbody></tbody></table>"


class Tensor:
    """What a torch tensor offers: plain conversion fails while it carries a gradient or is in bfloat16."""

    def __init__(self, data, plain=False):
        self.data, self.plain = np.asarray(data), plain

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")

    def detach(self):
        return Tensor(self.data)

    def cpu(self):
        return self

    def is_floating_point(self):
        return self.data.dtype.kind == "f"

    def double(self):
        return Tensor(self.data.astype(np.float64), plain=True)

    def numpy(self):
        return self.data


def test_tensors_are_converted() -> None:
    mu = oa.DiscreteMeasure(Tensor(X.astype(np.float32)))
    assert np.array_equal(mu.points, X.astype(np.float32).astype(np.float64))
    assert np.array_equal(ATTENTION.on_tokens(Tensor(X)), ATTENTION.on_tokens(X))
    assert oa.DiscreteMeasure(Tensor(np.arange(6).reshape(3, 2))).n == 3


def test_torch_itself() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; the test above stands for it")
    t = torch.tensor(X, requires_grad=True, dtype=torch.float32)
    assert oa.DiscreteMeasure(t).points == pytest.approx(X, abs=1e-6)
    assert oa.DiscreteMeasure(t.to(torch.bfloat16)).points == pytest.approx(X, abs=2e-2)
