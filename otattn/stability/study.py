"""Stability ratios of many random pairs: reproducible, parallel, resumable; no worker outlives the process it works for."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from functools import partial
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from tqdm import tqdm

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention.base import AttentionMap
from otattn.errors import StoreError, WorkerError
from otattn.stability.certify import extent
from otattn.stability.fingerprint import fingerprint
from otattn.stability.ratio import StabilityRatio, image_distances, prepare_pair, stability_ratio
from otattn.stability.result import Sampler, Seed, StabilityStudy, child_seed
from otattn.stability.store import DirectoryStore, MemoryStore, Store, Terms

__all__ = ["check_key", "in_workers", "stability_study"]

RESOLUTION = 1e-12
"""Measures closer than this fraction of their size count as equal: their ratio would be rounding."""
ROUNDING = 1e-9
"""Distances of one pair agree to this fraction (and RESOLUTION of the size) everywhere; else they are another pair's."""
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
    key: str | None = None,
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
        is used in any case. Workers end with the process that started them. A killed worker is noticed by joblib's own
        backend (loky); its "multiprocessing" backend waits for it without end.
    store : path or Store, optional
        Where finished pairs are kept; a study that was interrupted goes on from there. A path is a folder. The store
        knows the study by the content of the attention and the sampler (code, closures, globals, arrays), p and the seed.
    key : str, optional
        A name of your own for the attention and the sampler, instead of their content: for those that cannot be hashed.
        You answer for it that one key is always one attention and one sampler.
    progress : bool
        A progress bar on the standard error stream.

    Returns
    -------
    StabilityStudy

    Raises
    ------
    ValueError
        Every pair consists of equal measures, the sampler's measures do not fit the attention, the sampler does not
        give one pair for one seed, or a store is asked for what cannot be hashed (give ``key=``).
    StoreError
        The store belongs to another study, is in use by another process, cannot be locked or written, or holds a best
        pair that is not what is computed here. Single records that are damaged are named in a StoreWarning and computed
        again.
    WorkerError
        A worker process was killed. What was finished is in the store, and the same call goes on from there.
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
    keep: Store = _open_store(store, attention, sampler, order, seed, check_key(key))
    try:
        found = {i: terms for i in range(total) if (terms := keep.get(i)) is not None}
        kept = frozenset(found)
        missing = [i for i in range(total) if i not in found]
        size = min(LARGEST_CHUNK, max(1, -(-total // CHUNKS)))
        chunks = [missing[k : k + size] for k in range(0, len(missing), size)]
        with tqdm(
            total=total, initial=len(found), unit="pair", desc="stability", file=sys.stderr, disable=not progress
        ) as bar:
            for indices, new in in_workers(partial(_evaluate, attention, sampler, order, seed), chunks, n_jobs):
                keep.put(indices, new)
                found.update(zip(indices, new, strict=True))
                bar.update(len(indices))
    except BrokenExecutor as exc:
        raise _killed(len(found), total, keep, store) from exc
    finally:
        keep.close()
    both = np.array([found[i] for i in range(total)])
    numerators, denominators = both[:, 0].copy(), both[:, 1].copy()
    if not denominators.any():
        raise ValueError(
            f"sampler must draw pairs of different measures, but all {total} pairs were equal (or nearer "
            f"than {RESOLUTION:g} of their size); give it a larger spread."
        )
    best = _best(attention, sampler, order, seed, numerators, denominators, kept, keep)
    labels = {"attention": _label(attention), "sampler": _label(sampler)}
    top, bottom = check.frozen(numerators), check.frozen(denominators)
    return StabilityStudy(top, bottom, best, order, seed, attention, sampler, labels)


def check_key(key: Any) -> str | None:
    """``key`` as a name; None where there is none."""
    if key is not None and (not isinstance(key, str) or not key.strip()):
        raise ValueError(
            f"key must be a name (a str with letters), received {key!r}; leave it out to hash the content."
        )
    return key


def _best(
    attention: AttentionMap,
    sampler: Sampler,
    p: float,
    seed: Seed,
    numerators: Array,
    denominators: Array,
    kept: Collection[int],
    store: Store,
) -> StabilityRatio:
    """The largest ratio with its evidence; what is computed here replaces what a worker or the store gave.

    Another processor, or BLAS with another number of threads, rounds otherwise, and where rounding is felt the evidence has
    a better numerator: another pair may then be the largest. Each round settles one pair, so this ends, and the best value
    is the largest ratio exactly.
    """
    settled: dict[int, StabilityRatio] = {}
    while True:
        with np.errstate(invalid="ignore"):
            k = int(np.nanargmax(np.where(denominators > 0.0, numerators / denominators, np.nan)))
        if k in settled:
            return settled[k]
        mu, nu = prepare_pair(attention, *sampler(np.random.default_rng(child_seed(seed, k))), p)
        new = settled[k] = stability_ratio(attention, mu, nu, p=p)
        had, have = (float(numerators[k]), float(denominators[k])), image_distances(attention, mu, nu, p)
        sizes = extent(attention.pushforward(mu)), extent(mu)
        if any(abs(x - y) > ROUNDING * y + RESOLUTION * z for x, y, z in zip(had, have, sizes, strict=True)):
            if k not in kept:
                raise ValueError(
                    f"sampler must draw the same pair from the same generator (and attention be a function of the "
                    f"measure), but pair {k} gave the distances {had}, and {have} when it was drawn again; let all "
                    "randomness come from the generator."
                )
            place = store.where(k) if isinstance(store, DirectoryStore) else f"the record of pair {k} in {store!r}"
            raise StoreError(
                f"{place} must hold the distances {have} of pair {k}, which is the largest ratio, received {had}; it was "
                "edited, or written by another version: delete it or take a new folder."
            )
        numerators[k], denominators[k] = new.numerator, new.denominator


def _killed(done: int, total: int, keep: Store, store: Any) -> WorkerError:
    if store is None:
        rest = f"{done} of {total} pairs were finished and are lost, because no store was given"
    else:
        rest = f"{done} of {total} pairs are kept in {keep!r}, and the same call goes on from there"
    return WorkerError(
        f"workers must live as long as the study, but one was killed (out of memory, or by a signal); {rest}. If memory was "
        "short, take fewer workers (n_jobs)."
    )


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


def _open_store(store: Any, attention: AttentionMap, sampler: Sampler, p: float, seed: Seed, key: str | None) -> Store:
    if store is None:
        return MemoryStore()
    keep: Store = DirectoryStore(os.fsdecode(store)) if isinstance(store, (str, bytes, os.PathLike)) else store
    if not all(callable(getattr(keep, name, None)) for name in ("open", "get", "put", "close")):
        raise TypeError(f"store must be a path or a Store (open, get, put, close), received {type(store).__name__}.")
    what = {"attention": attention, "sampler": sampler} if key is None else {"key": key}
    keep.open(fingerprint(what, p, seed))
    return keep


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


LOOK = 0.5
"""Seconds between two looks of a worker at its parent."""
ROUNDS = 8
"""Rounds in which a backend works that returns whole lists only."""
_WATCHED: set[int] = set()


def in_workers(work: Callable[[Any], Any], chunks: Sequence[Any], n_jobs: int | None) -> Iterator[Any]:
    """``work(chunk)`` of each chunk as it finishes, in any order; in rounds on backends that return whole lists only.

    Raises
    ------
    concurrent.futures.BrokenExecutor
        A worker process ended while it worked (out of memory, a signal).
    """
    if not chunks:
        return
    task, owner = delayed(_guarded), os.getpid()
    try:
        parallel = Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    except ValueError:
        parallel = Parallel(n_jobs=n_jobs)
        step = max(1, len(chunks) // ROUNDS)
        for k in range(0, len(chunks), step):
            yield from parallel(task(owner, work, chunk) for chunk in chunks[k : k + step])
        return
    yield from parallel(task(owner, work, chunk) for chunk in chunks)


def _guarded(owner: int, work: Callable[[Any], Any], chunk: Any) -> Any:
    _end_with(owner)
    return work(chunk)


def _end_with(owner: int) -> None:
    """Let this process end soon after its parent: a parent that is killed cannot say so, and joblib's workers wait on.

    Only where the process is a child of the owner (threads, clusters and the process itself are left alone). Systems that
    never change the number of a parent (Windows) end no worker.
    """
    me = os.getpid()
    if me == owner or me in _WATCHED or os.getppid() != owner:
        return
    _WATCHED.add(me)
    threading.Thread(target=_watch, args=(owner,), name="otattn-parent", daemon=True).start()


def _watch(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(LOOK)
    os._exit(1)
