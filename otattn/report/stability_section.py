"""Stability constants of each head, measured on pairs of real token windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.attention import AttentionMap, MaskedAttention
from otattn.data import SampleLayer
from otattn.plotting import plot_stability
from otattn.plotting.style import finished, metric
from otattn.report.section import Section, number, table
from otattn.stability import StabilityStudy, stability_study

__all__ = ["LayerPairs", "stability_section"]


@dataclass(frozen=True, eq=False)
class LayerPairs:
    """Pairs of runs of ``n`` real tokens: with equal chances two different runs, or one and a small perturbation of it.

    ``size`` is the root mean square displacement of a token over the largest token norm.
    """

    windows: NDArray[np.float64]
    n: int
    size: float = 1e-2

    @classmethod
    def of(cls, layer: SampleLayer, n: int) -> LayerPairs:
        """Runs of n tokens of the layer's windows, fewer where those are shorter."""
        return cls(layer.hidden_states, min(n, layer.hidden_states.shape[1]))

    def __call__(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        first = self._run(rng)
        second = self._run(rng)
        if rng.random() < 0.5 and not np.array_equal(first, second):
            return first, second
        scale = self.size * np.linalg.norm(self.windows, axis=2).max() / np.sqrt(first.shape[1])
        return first, first + scale * rng.standard_normal(first.shape)

    def _run(self, rng: np.random.Generator) -> NDArray[np.float64]:
        windows, length, _ = self.windows.shape
        start = int(rng.integers(length - self.n + 1))
        return np.asarray(self.windows[int(rng.integers(windows)), start : start + self.n])

    def study(
        self, attention: AttentionMap, *, n_pairs: int, p: float, seed: np.random.SeedSequence
    ) -> tuple[StabilityStudy, dict[str, float]]:
        """The study of a map on such pairs, and its numbers by name."""
        rng = np.random.default_rng(seed)
        study = stability_study(attention, self, n_pairs=n_pairs, p=p, rng=rng, progress=False)
        best, median = study.best, study.quantile(0.5)
        return study, {"largest": best.value, "certified_lower": best.certified_lower, "median": median}


def stability_section(layer: SampleLayer, *, seed: int, n_pairs: int, n: int, advance: Any) -> Section:
    """Largest ratio, its certified lower value and a bootstrap interval, for W_1, W_2 and the conditional W_2."""
    sampler = LayerPairs.of(layer, n)
    rows, records = [], []
    ratios: dict[str, list[Any]] = {"W_1": [], "W_2": [], "conditional W_2, masked": []}
    children = np.random.SeedSequence(seed).spawn(3 * len(layer.heads))
    for h, head in enumerate(layer.heads):
        record: dict[str, Any] = {"head": layer.first_head + h}
        cells = [str(layer.first_head + h)]
        cases = (("W_1", head, 1), ("W_2", head, 2), ("conditional W_2, masked", MaskedAttention(head), 2))
        for k, (name, attention, p) in enumerate(cases):
            study, values = sampler.study(attention, n_pairs=n_pairs, p=p, seed=children[3 * h + k])
            low, high = study.confidence_interval(statistic="median")
            ratios[name].append(study.ratios)
            record[name] = {**values, "interval_of_the_median": [low, high]}
            cells += [number(values["certified_lower"]), number(values["median"]), f"[{low:.3f}, {high:.3f}]"]
            advance()
        rows.append(cells)
        records.append(record)
    header = ["head"]
    for name in ratios:
        header += [f"{name}: largest (certified)", "median", "95% of the median"]
    drawn = {name.replace("W_1", metric(1)).replace("W_2", metric(2)): values for name, values in ratios.items()}
    lines = [
        f"Ratios W_p(F(mu), F(nu)) / W_p(mu, nu) over {n_pairs} pairs of runs of {sampler.n} real tokens: two different "
        "runs, or a run and a small random perturbation of it (one percent of the largest token norm), with equal "
        "chances. The largest ratio is a lower value of the Lipschitz constant; *certified* means the dual value of the "
        "numerator over the primal value of the denominator. Values are in the head's value space (before the output "
        "matrix).",
        "",
        *table(header, rows),
    ]
    return Section(
        "Stability constants",
        lines,
        {"n": sampler.n, "n_pairs": n_pairs, "heads": records},
        {"stability.png": lambda: finished(plot_stability(drawn, labels=[r[0] for r in rows]), xlabel="head")},
    )
