"""Sweeps on dask workers: throughput and efficiency at 1, 2 and 4 local workers, against one process without a cluster.

    pip install -e ".[cluster]"
    OPENBLAS_NUM_THREADS=1 python -m benchmarks.cluster [--quick] [--out benchmarks/results]

The sweep has two seeds: two stability studies, each of whose pairs is two images and two exact transports of 192 atoms in three
dimensions. Workers are processes of one thread on this machine, started before the clock; the first
sweep of each cluster, in which they import what they need, is not counted. Rounds are interleaved, and the medians of the rounds'
ratios are given. Efficiency is throughput over the number of workers times that of one process; more workers than free cores cannot
be faster than the cores. The share of work is the processor time of one process over that of all processes together (scheduler,
client and workers), which other load on the machine hardly touches: what distribution leaves. Every sweep must give the ratios of
the first, to the last bit.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

import joblib
import numpy as np
from dask.distributed import Client, LocalCluster

import otattn as oa
from benchmarks.common import arguments, machine, table, write

WORKERS = (1, 2, 4)


def grid(n_pairs: int, n_jobs: int) -> Any:
    """The sweep."""
    rng = np.random.default_rng(0)
    head = oa.SoftmaxAttention(rng.normal(size=(3, 3)), np.eye(3))
    return oa.sweep(head, n=192, rng=(0, 1), n_pairs=n_pairs, n_jobs=n_jobs, progress=False)


def on_cluster(client: Client | None, n_pairs: int) -> tuple[float, float, np.ndarray]:
    """Wall time, processor time of all processes, and the ratios of one sweep, in this process without a cluster."""

    def processors() -> float:
        return time.process_time() + (0.0 if client is None else sum(client.run(time.process_time).values()))

    cpu, begun = processors(), time.perf_counter()
    if client is None:
        found = grid(n_pairs, 1)
    else:
        with client.as_current(), joblib.parallel_config(backend="dask", wait_for_workers_timeout=120):
            found = grid(n_pairs, -1)
    wall = time.perf_counter() - begun
    return wall, processors() - cpu, np.concatenate([study.ratios for study in found.studies])


def main() -> None:
    options = arguments(__doc__)
    n_pairs, rounds = (100, 2) if options.quick else (400, 3)
    times: dict[int, list[tuple[float, float]]] = {0: []}
    with ExitStack() as stack:
        clients: dict[int, Client | None] = {0: None}
        for count in WORKERS:
            cluster = LocalCluster(n_workers=count, threads_per_worker=1, processes=True, dashboard_address=None)
            clients[count], times[count] = stack.enter_context(Client(stack.enter_context(cluster))), []
        expected = on_cluster(None, n_pairs)[2]
        for client in clients.values():
            on_cluster(client, n_pairs)
        for _ in range(rounds):
            for count, client in clients.items():
                wall, cpu, ratios = on_cluster(client, n_pairs)
                assert np.array_equal(ratios, expected)
                times[count].append((wall, cpu))
    rows = []
    for count, found in times.items():
        pairs = list(zip(times[0], found, strict=True))
        efficiency = statistics.median(a[0] / b[0] / max(count, 1) for a, b in pairs)
        share = statistics.median(a[1] / b[1] for a, b in pairs)
        wall, cpu = (statistics.median(x) for x in zip(*found, strict=True))
        name = "one process, no cluster" if count == 0 else f"{count} worker{'s' * (count > 1)}"
        rows.append([name, f"{wall:.3g} s", f"{cpu:.3g} s", f"{len(expected) / wall:.0f}"])
        rows[-1] += [f"{100 * efficiency:.0f} %", f"{100 * share:.0f} %"]
    lines = ["# Sweeps on dask workers", ""]
    lines += ["Written by `python -m benchmarks.cluster`, whose docstring says what is measured.", ""]
    lines += machine("joblib", "dask", "distributed", seeds="0 and 1")
    lines += [f"{len(expected):,} pairs a sweep, {rounds} rounds.", ""]
    lines += table(["where", "wall", "CPU", "pairs a second", "efficiency", "share of work"], rows)
    write("cluster", lines, options.out)


if __name__ == "__main__":
    main()
