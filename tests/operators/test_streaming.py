"""Panels, tiles and masks; the process-wide limit of BLAS threads."""

from __future__ import annotations

import numpy as np
import pytest

from otattn.operators import threads
from otattn.operators.streaming import KernelTiles, Tiling


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 1500])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("itemsize", [4, 8])
def test_tiles_cover_the_square_once(n, workers, itemsize):
    tiling = Tiling(n, itemsize, workers=workers)
    count = np.zeros((n, n), np.int64)
    for worker in range(workers):
        for panel in tiling.share(worker, workers):
            for a, b in panel.tiles:
                count[panel.start : panel.stop, a:b] += 1
                assert (b - a) * len(panel) * itemsize <= 2**20
    assert (count == 1).all()
    assert tiling.entries == n * n


def test_masked_tiles_skip_what_no_row_sees():
    n = 2000
    visible = np.arange(1, n + 1)
    tiling = Tiling(n, 4, visible=visible)
    seen = np.zeros((n, n), bool)
    for panel in tiling.panels:
        for tile in panel.tiles:
            hidden = tiling.hidden(panel, tile)
            block = np.ones((len(panel), tile[1] - tile[0]), bool) if hidden is None else ~hidden
            seen[panel.start : panel.stop, tile[0] : tile[1]] = block
    np.testing.assert_array_equal(seen, np.tril(np.ones((n, n), bool)))
    assert tiling.entries < 0.6 * n * n


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_recomputed_tiles_are_the_stored_ones(dtype, masked):
    rng = np.random.default_rng(0)
    n, k = 300, 3
    Q, K = (rng.normal(size=(n, k)).astype(dtype) for _ in range(2))
    column = rng.normal(size=n)
    visible = np.sort(rng.integers(1, n + 1, size=n)) if masked else None
    tiling = Tiling(n, np.dtype(dtype).itemsize, visible=visible, max_rows=100)
    kept, streamed = (KernelTiles(Q, K, column, tiling, keep=keep) for keep in (True, False))
    scratch = np.empty(tiling.rows * n, dtype)
    P = np.zeros((n, n))
    for panel in tiling.panels:
        kept.prepare(panel, None)
        streamed.prepare(panel, scratch)
        for t, (a, b) in enumerate(panel.tiles):
            stored = kept.tile(panel, t, None)
            np.testing.assert_array_equal(streamed.tile(panel, t, panel.view(scratch, t)), stored)
            P[panel.start : panel.stop, a:b] = stored * kept.inverse[panel.start : panel.stop, None]
    logits = Q.astype(float) @ K.astype(float).T + column
    if visible is not None:
        logits[np.arange(n) >= visible[:, None]] = -np.inf
    truth = np.exp(logits - logits.max(axis=1, keepdims=True))
    truth /= truth.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(P, truth, rtol=0, atol=1e-14 if dtype == np.float64 else 2e-6)


def test_the_limit_is_lifted_by_the_last_block():
    before = threads.blas_threads()
    first, second = threads.single_blas_thread(), threads.single_blas_thread()
    first.__enter__()
    second.__enter__()
    assert threads.blas_threads() == before  # what the user allows, not what we hold it to
    first.__exit__(None, None, None)
    assert threads._LIMIT.holders == 1
    second.__exit__(None, None, None)
    assert threads._LIMIT.holders == 0
    assert threads.blas_threads() == before


def test_an_exception_of_any_thread_arrives_and_lifts_the_limit():
    def work(worker):
        if worker == 1:
            raise ValueError("from thread 1")

    with pytest.raises(ValueError, match="from thread 1"):
        threads.run(work, 3)
    assert threads._LIMIT.holders == 0


def test_without_threadpoolctl(monkeypatch):
    monkeypatch.setattr(threads, "_controller", lambda: None)
    assert threads.blas_threads() == 1
    done = []
    threads.run(done.append, 2)
    assert sorted(done) == [0, 1]
