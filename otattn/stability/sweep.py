"""Sweeps: one stability study for each point of a grid of maps, sizes, radii, orders and seeds."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from otattn import _validate as check
from otattn._tabular import Result, plain
from otattn.attention.base import AttentionMap
from otattn.stability.fingerprint import fingerprint
from otattn.stability.folder import folder_path
from otattn.stability.result import Sampler, StabilityStudy
from otattn.stability.samplers import sequence_pairs, uniform_ball_pairs
from otattn.stability.study import check_key, stability_study

__all__ = ["Sweep", "sweep"]

LONGEST_NAME, LONGEST_FOLDER = 40, 100
"""Characters of a map's name, and of a folder before its hash: file systems allow 255 bytes, some 143."""
SamplerFactory = Callable[[int, int, float], Sampler]
"""``(n, dim, radius) -> sampler``."""


@dataclass(frozen=True, eq=False)
class Sweep(Result):
    """The studies of a grid, in the order attention, n, radius, p, seed (the last varies fastest).

    Attributes
    ----------
    points : tuple of dict
        The coordinates of each study: ``attention`` (its name), ``n``, ``radius``, ``p``, ``seed``.
    studies : tuple of StabilityStudy
    """

    points: tuple[dict[str, Any], ...]
    studies: tuple[StabilityStudy, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One record a point: its coordinates, largest ratio, certified lower value and
        resolution, median and number of pairs."""
        out = []
        for point, study in zip(self.points, self.studies, strict=True):
            best = study.best
            out.append(
                {
                    **point,
                    "largest": best.value,
                    "certified_lower": best.certified_lower,
                    "resolution": str(best.resolution),
                    "median": study.quantile(0.5),
                    "pairs": study.n_pairs,
                }
            )
        return out

    def select(self, **coordinates: Any) -> Sweep:
        """The part of the grid with the given coordinates, for instance ``select(p=2.0, n=16)``.

        Raises
        ------
        ValueError
            No point has them.
        """
        keep = [
            k
            for k, point in enumerate(self.points)
            if all(point.get(key) == value for key, value in coordinates.items())
        ]
        if not keep:
            raise ValueError(f"coordinates must occur in the grid, received {coordinates}; see Sweep.points.")
        return Sweep(tuple(self.points[k] for k in keep), tuple(self.studies[k] for k in keep))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return {"rows": plain(self.rows())}

    def __repr__(self) -> str:
        return f"Sweep({len(self.points)} studies, largest ratio {max(s.best.value for s in self.studies):.6g})"


def sweep(
    attentions: AttentionMap | Mapping[str, AttentionMap] | Sequence[AttentionMap],
    *,
    n: int | Sequence[int],
    radius: float | Sequence[float] = 1.0,
    p: float | Sequence[float] = 2.0,
    rng: int | Sequence[int] = 0,
    n_pairs: int = 100,
    sampler: SamplerFactory | None = None,
    n_jobs: int | None = 1,
    store: str | os.PathLike[str] | None = None,
    key: str | None = None,
    progress: bool = True,
) -> Sweep:
    """A stability study at every point of a grid.

    Parameters
    ----------
    attentions : AttentionMap, or a mapping or sequence of them
        Their names in the result are the keys, or "0", "1", ...
    n, radius, p, rng : value or sequence of values
        Axes of the grid: numbers of tokens, radii of the token ball, orders, seeds.
    n_pairs : int
        Pairs a study.
    sampler : callable ``(n, dim, radius) -> sampler``, optional
        Uniform points of the ball by default, random sequences for causal maps.
    n_jobs : int or None
        As for :func:`stability_study`; the workers are kept from study to study.
    store : path, optional
        A folder with one subfolder a study, named by its coordinates and their hash: an interrupted sweep goes on from
        there.
    key : str, optional
        As for :func:`stability_study`: a name of your own for the maps and samplers of the whole sweep.
    progress : bool
        A bar over the studies on the standard error stream.

    Returns
    -------
    Sweep

    Raises
    ------
    ValueError
        An empty axis, or values that a study refuses.
    StoreError, WorkerError
        As for :func:`stability_study`.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> grid = sweep(SoftmaxAttention([[0.0]], [[1.0]]), n=(2, 4), p=(1, 2), n_pairs=5, progress=False)
    >>> len(grid.studies), max(row["largest"] for row in grid.rows()) <= 1.0 + 1e-12
    (4, True)
    """
    maps = _named(attentions)
    root = None if store is None else folder_path(store)
    own = check_key(key)
    axes = {
        "n": [check.count(v, "n") for v in _axis(n, "n")],
        "radius": [check.positive(v, "radius") for v in _axis(radius, "radius")],
        "p": [check.check_order(v) for v in _axis(p, "p")],
        "seed": [check.count(v, "rng", least=0) for v in _axis(rng, "rng")],
    }
    points, studies = [], []
    grid = list(itertools.product(maps.items(), *axes.values()))
    for (name, attention), size, r, order, seed in tqdm(
        grid, desc="sweep", unit="study", file=sys.stderr, disable=not progress
    ):
        dim = attention.in_dim
        if dim is None:
            raise ValueError(f"attentions must know their input dimension, received {type(attention).__name__}.")
        make = sampler or (sequence_pairs if attention.causal else uniform_ball_pairs)
        studies.append(
            stability_study(
                attention,
                make(size, dim, r),
                n_pairs=n_pairs,
                p=order,
                rng=seed,
                n_jobs=n_jobs,
                store=None if root is None else root / _folder_name(name, size, r, order, seed),
                key=None if own is None else repr((own, name, size, r)),
                progress=False,
            )
        )
        points.append({"attention": name, "n": size, "radius": r, "p": order, "seed": seed})
    return Sweep(tuple(points), tuple(studies))


def _named(attentions: Any) -> dict[str, AttentionMap]:
    if isinstance(attentions, AttentionMap):
        return {"0": attentions}
    named = (
        dict(attentions) if isinstance(attentions, Mapping) else {str(k): value for k, value in enumerate(attentions)}
    )
    if not named:
        raise ValueError("attentions must hold at least one map, received none.")
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, AttentionMap):
            raise TypeError(
                f"attentions must map names to attention maps, received {type(value).__name__} for {name!r}."
            )
    return named


def _axis(values: Any, name: str) -> list[Any]:
    out = list(values) if isinstance(values, (Sequence, np.ndarray)) and not isinstance(values, str) else [values]
    if not out:
        raise ValueError(f"{name} must have at least one value, received none.")
    return out


def _folder_name(name: str, n: int, radius: float, p: float, seed: int) -> str:
    """The coordinates in letters, digits and dashes, cut, and their hash: no two points share it, none leaves the folder."""
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in name[:LONGEST_NAME])
    readable = f"{plain}-n{n}-r{radius:g}-p{p:g}-s{seed}"[:LONGEST_FOLDER]
    return f"{readable}-{fingerprint(name, n, radius, p, seed)[:16]}"
