"""Stability ratios of many random pairs: reproducible, parallel, resumable."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from tqdm import tqdm

from otattn import _validate as check
from otattn.attention.base import AttentionMap
from otattn.stability.fingerprint import fingerprint
from otattn.stability.ratio import image_distances, prepare_pair, stability_ratio
from otattn.stability.result import Sampler, Seed, StabilityStudy, child_seed
from otattn.stability.store import DirectoryStore, MemoryStore, Store, Terms

__all__ = ["stability_study"]

RESOLUTION = 1e-12
"""Measures closer than this fraction of their size count as equal: their ratio would be rounding."""
LARGEST_CHUNK = 256
CHUNKS = 64


def stability_study(
    attention: AttentionMap,
    sampler: Sampler,
    *,
    n_pairs: int,
    p: float = 2,
    rng: np.random.Generator | np.random.SeedSequence | int,
    n_jobs: int | None = 1,
    store: Store | str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> StabilityStudy:
    """The stability ratio of ``n_pairs`` random pairs of measures.

    Parameters
    ----------
    attention : AttentionMap
    sampler : callable ``Generator -> (mu, nu)``
        One of `otattn.stability.samplers`, or any other; it must be picklable to run in other processes.
    n_pairs : int
    p : float
        Order, ``1 <= p <= inf``; 2 for Gaussians.
    rng : int, SeedSequence or Generator
        Root of the seeds. Every pair has its own child seed, so the ratios depend neither on ``n_jobs`` nor
        on the order in which pairs are computed, and the first pairs of a longer study are those of a
        shorter one.
    n_jobs : int or None
        Workers of joblib, -1 for all cores; None takes what ``joblib.parallel_config`` says, whose backend
        is used in any case.
    store : path or Store, optional
        Where finished pairs are kept; a study that was interrupted goes on from there. A path is a folder.
    progress : bool
        A progress bar on the standard error stream.

    Returns
    -------
    StabilityStudy

    Raises
    ------
    ValueError
        Every pair consists of equal measures, or the sampler's measures do not fit the attention.
    StoreError
        The store belongs to another study, is in use by another process, or cannot be written. Single records that are
        damaged are named in a StoreWarning and computed again.
    OverflowError
        An image is not representable in float64.
    ConvergenceError
        A distance could not be certified.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> from otattn.stability import samplers
    >>> study = stability_study(SoftmaxAttention([[0.0]], [[1.0]]), samplers.uniform_ball_pairs(4, 1, 1.0),
    ...                         n_pairs=10, rng=0, progress=False)
    >>> study.ratios.shape, bool(study.best.value <= 1.0)
    ((10,), True)
    """
    order = check.check_order(p)
    total = check.count(n_pairs, "n_pairs")
    if not callable(sampler):
        raise TypeError(f"sampler must be a callable Generator -> (mu, nu), received {type(sampler).__name__}.")
    seed = _root(rng)
    keep: Store = _open_store(store, attention, sampler, order, seed)
    try:
        found = {i: terms for i in range(total) if (terms := keep.get(i)) is not None}
        missing = [i for i in range(total) if i not in found]
        size = min(LARGEST_CHUNK, max(1, -(-total // CHUNKS)))
        chunks = [missing[k : k + size] for k in range(0, len(missing), size)]
        with tqdm(
            total=total, initial=len(found), unit="pair", desc="stability", file=sys.stderr, disable=not progress
        ) as bar:
            for indices, new in _run(attention, sampler, order, seed, chunks, n_jobs):
                keep.put(indices, new)
                found.update(zip(indices, new, strict=True))
                bar.update(len(indices))
    finally:
        keep.close()
    both = np.array([found[i] for i in range(total)])
    numerators, denominators = check.frozen(both[:, 0].copy()), check.frozen(both[:, 1].copy())
    if not denominators.any():
        raise ValueError(
            f"sampler must draw pairs of different measures, but all {total} pairs were equal (or nearer "
            f"than {RESOLUTION:g} of their size); give it a larger spread."
        )
    with np.errstate(invalid="ignore"):
        largest = int(np.nanargmax(np.where(denominators > 0.0, numerators / denominators, np.nan)))
    mu, nu = sampler(np.random.default_rng(child_seed(seed, largest)))
    best = stability_ratio(attention, mu, nu, p=order)
    labels = {"attention": _label(attention), "sampler": _label(sampler)}
    return StabilityStudy(numerators, denominators, best, order, seed, attention, sampler, labels)


def _root(rng: Any) -> Seed:
    """Entropy and spawn key; a Generator gives fresh entropy from its stream, and can be used again."""
    if isinstance(rng, np.random.Generator):
        return int.from_bytes(rng.bytes(16), "little"), ()
    if isinstance(rng, np.random.SeedSequence):
        entropy = rng.entropy
        if not isinstance(entropy, int):
            raise TypeError(f"rng must be a SeedSequence of one integer, received {type(entropy).__name__} entropy.")
        return entropy, tuple(int(k) for k in rng.spawn_key)
    if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool) and rng >= 0:
        return int(rng), ()
    raise TypeError(f"rng must be a non-negative integer seed, a SeedSequence or a Generator, received {rng!r}.")


def _open_store(store: Any, attention: AttentionMap, sampler: Sampler, p: float, seed: Seed) -> Store:
    if store is None:
        return MemoryStore()
    keep: Store = DirectoryStore(store) if isinstance(store, (str, os.PathLike)) else store
    keep.open(fingerprint(attention, sampler, p, seed))
    return keep


def _run(
    attention: AttentionMap,
    sampler: Sampler,
    p: float,
    seed: Seed,
    chunks: Sequence[list[int]],
    n_jobs: int | None,
) -> Iterator[tuple[list[int], list[Terms]]]:
    """Chunks as they finish; in rounds on backends of joblib that return whole lists only."""
    if not chunks:
        return
    task = delayed(_evaluate)
    try:
        parallel = Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    except ValueError:
        parallel = Parallel(n_jobs=n_jobs)
        step = max(1, len(chunks) // 8)
        for k in range(0, len(chunks), step):
            yield from parallel(task(attention, sampler, p, seed, chunk) for chunk in chunks[k : k + step])
        return
    yield from parallel(task(attention, sampler, p, seed, chunk) for chunk in chunks)


def _evaluate(
    attention: AttentionMap, sampler: Sampler, p: float, seed: Seed, indices: list[int]
) -> tuple[list[int], list[Terms]]:
    """The two distances of each pair of a chunk."""
    out: list[Terms] = []
    for i in indices:
        try:
            mu, nu = prepare_pair(attention, *sampler(np.random.default_rng(child_seed(seed, i))), p)
            terms = image_distances(attention, mu, nu, p, resolution=RESOLUTION)
        except Exception as exc:
            exc.add_note(f"This was pair {i} of the study.")
            raise
        if not np.isfinite(terms).all():
            raise ValueError(f"distances must be finite, received {terms} for pair {i}; rescale the points.")
        out.append(terms)
    return indices, out


def _label(value: Any) -> str:
    """A one-line name without arrays or addresses."""
    if isinstance(value, AttentionMap):
        return f"{type(value).__name__}({value.in_dim} -> {value.out_dim})"
    if type(value).__module__.startswith("otattn."):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__name__))
