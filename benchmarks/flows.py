"""Flows of Gaussians and of tokens against explicit Euler with a fixed step, at equal time.

Run: ``python -m benchmarks.flows [--quick]``; writes ``benchmarks/results/flows.md`` and ``flows.png``.

Euler is what the published scripts do, written in plain numpy: ``Sigma + h (G Sigma + Sigma G^T)``, ``G = V Sigma A``; for
tokens ``X + h softmax(X A^T X^T) X V^T``, followed on the sphere by a normalisation. Its number of steps is chosen so that
it takes as long as otattn at each tolerance; both are then timed in the same rounds. Errors are relative, in the Frobenius
norm, at the final time: against the closed form of Gaussian flows where there is one, else against scipy's DOP853 on
our own plain right-hand side at a relative tolerance of 1e-13.

Last, the ranks of limits under the published law of random draws, where the rank is known: how many flows are followed to
rest, how many of those have the right rank, and the time it takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.integrate import solve_ivp

import otattn as oa
from benchmarks.common import arguments, interleaved, machine, panels, table, write
from otattn.plotting.style import COLORS

Array = np.ndarray
TOLERANCES = (1e-4, 1e-6, 1e-8, 1e-11)
EULER = (10, 100, 1_000, 10_000, 100_000)


@dataclass(frozen=True, eq=False)
class Problem:
    """``euler(steps)`` and ``ours(rtol)`` give the state at the end, ``truth`` what it is."""

    name: str
    note: str
    truth: Array
    euler: Callable[[int], Array]
    ours: Callable[[float], Array]

    def error(self, state: Array) -> float:
        if not (np.abs(state) < 1e100).all():
            return float("inf")
        return float(np.linalg.norm(state - self.truth) / np.linalg.norm(self.truth))


def unit(M: Array) -> Array:
    return M / np.linalg.norm(M, 2)


def covariance_rate(A: Array, V: Array, S: Array) -> Array:
    """``G Sigma + Sigma G^T`` with ``G = V Sigma A``, of one covariance or a stack."""
    M = V @ S @ A @ S
    return M + np.swapaxes(M, -1, -2)


def euler_covariance(A: Array, V: Array, S: Array, duration: float, steps: int) -> Array:
    h = duration / steps
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(steps):
            S = S + h * covariance_rate(A, V, S)
    return S


def softmax_rate(A: Array, V: Array, X: Array) -> Array:
    logits = X @ A.T @ X.T
    P = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (P / P.sum(axis=1, keepdims=True)) @ X @ V.T


def euler_tokens(A: Array, V: Array, X: Array, duration: float, steps: int, sphere: bool) -> Array:
    h = duration / steps
    for _ in range(steps):
        X = X + h * softmax_rate(A, V, X)
        if sphere:
            X = X / np.linalg.norm(X, axis=1, keepdims=True)
    return X


def gaussian_problem(name: str, A: Array, V: Array, S: Array, duration: float, note: str) -> Problem:
    attention, gaussian = oa.SoftmaxAttention(A, V), oa.GaussianMeasure(np.zeros(len(S)), S)
    form = oa.covariance_closed_form(attention, gaussian)
    if form is not None:
        truth = form(duration)
    else:
        solution = solve_ivp(
            lambda _, y: covariance_rate(A, V, y.reshape(S.shape)).ravel(),
            (0.0, duration),
            S.ravel(),
            method="DOP853",
            rtol=1e-13,
            atol=1e-14,
        )
        truth = solution.y[:, -1].reshape(S.shape)

    def ours(rtol: float) -> Array:
        run = oa.gaussian_flow(
            attention, gaussian, t_span=(0.0, duration), t_eval=[duration], rtol=rtol, atol=rtol * 1e-2
        )
        return run.covs[-1]

    return Problem(name, note, truth, lambda steps: euler_covariance(A, V, S, duration, steps), ours)


def stack_problem(count: int) -> Problem:
    """Many covariances at once, as for a histogram of limit ranks; Euler runs on the whole stack too."""
    rng = np.random.default_rng(3)
    d, duration = 3, 5.0
    A = unit(rng.standard_normal((d, d)))
    A, V = A + A.T, -np.eye(d)
    L = rng.standard_normal((count, d, d))
    S = L @ np.swapaxes(L, -1, -2) / d
    attention = oa.SoftmaxAttention(A @ A, V)
    forms = [oa.covariance_closed_form(attention, oa.GaussianMeasure(np.zeros(d), s)) for s in S]
    truth = np.stack([form(duration) for form in forms if form is not None])

    def ours(rtol: float) -> Array:
        run = oa.gaussian_flow_batch(
            attention, S, t_span=(0.0, duration), t_eval=[duration], rtol=rtol, atol=rtol * 1e-2
        )
        return np.stack([t.covs[-1] for t in run])

    note = f"{count} covariances in dimension {d}, V = -I, A symmetric PSD, t = 5; closed form"
    return Problem(
        f"{count} Gaussians", note, truth, lambda steps: euler_covariance(A @ A, V, S, duration, steps), ours
    )


def token_problem(name: str, A: Array, V: Array, X: Array, duration: float, sphere: bool, note: str) -> Problem:
    attention = oa.SoftmaxAttention(A, V)

    def rate(_: float, y: Array) -> Array:
        Y = y.reshape(X.shape)
        F = softmax_rate(A, V, Y)
        if sphere:
            F = F - (F * Y).sum(axis=1, keepdims=True) / (Y * Y).sum(axis=1, keepdims=True) * Y
        return F.ravel()

    solution = solve_ivp(rate, (0.0, duration), X.ravel(), method="DOP853", rtol=1e-13, atol=1e-14)
    truth = solution.y[:, -1].reshape(X.shape)

    def ours(rtol: float) -> Array:
        run = oa.flow(
            attention,
            X,
            t_span=(0.0, duration),
            normalization="sphere" if sphere else None,
            t_eval=[duration],
            rtol=rtol,
            atol=rtol * 1e-2,
            dense=False,
        )
        return run.points[-1]

    return Problem(name, note, truth, lambda steps: euler_tokens(A, V, X, duration, steps, sphere), ours)


def problems(quick: bool) -> list[Problem]:
    rng = np.random.default_rng(0)
    d = 4
    L = rng.standard_normal((d, d))
    S = L @ L.T / d
    A = unit(rng.standard_normal((d, d)))
    top = float(np.linalg.eigvalsh(S @ S)[-1])
    last = 1.0 / np.sqrt(top) / 2.0  # A = V = I: Sigma' = 2 Sigma^2 blows up at 1 / (2 lambda_max(Sigma))
    B = unit(rng.standard_normal((d, d)))
    X = rng.standard_normal((64, 3))
    Y = X / np.linalg.norm(X, axis=1, keepdims=True)
    skew = unit(rng.standard_normal((3, 3)))
    out = [
        gaussian_problem("decay", A @ A.T, -np.eye(d), S, 10.0, "d = 4, V = -I, A symmetric PSD, t = 10; closed form"),
        gaussian_problem(
            "near blow-up", np.eye(d), np.eye(d), S, 0.99 * last, "d = 4, A = V = I, t = 0.99 t*; closed form"
        ),
        gaussian_problem(
            "no closed form", A @ A.T, -np.eye(d) + 0.3 * (B - B.T), S, 5.0, "d = 4, V does not commute, t = 5; DOP853"
        ),
        stack_problem(50 if quick else 500),
        token_problem(
            "tokens", skew, -np.eye(3) + 0.5 * (skew - skew.T), X, 5.0, False, "n = 64, d = 3, t = 5; DOP853"
        ),
        token_problem(
            "tokens on the sphere", 4.0 * np.eye(3), np.eye(3), Y, 5.0, True, "n = 64, d = 3, A = 4 I, t = 5; DOP853"
        ),
    ]
    return [out[0], out[1], out[3], out[4]] if quick else out


def quickest(run: Callable[[], Array]) -> float:
    """Least of three wall times."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def equal_steps(problem: Problem, rtol: float) -> int:
    """Euler steps that take as long as otattn at this tolerance."""
    seconds, trial = quickest(lambda: problem.ours(rtol)), 50
    for _ in range(2):  # the second trial is as long as the run itself
        trial = max(1, round(seconds * trial / quickest(lambda steps=trial: problem.euler(steps))))
    return trial


def measure(problem: Problem, rounds: int) -> tuple[list[list[str]], list[tuple[float, float]]]:
    """Rows of the table, and (seconds, error) of ours."""
    methods: dict[str, Callable[[], Array]] = {}
    steps: dict[float, int] = {}
    for rtol in TOLERANCES:
        steps[rtol] = equal_steps(problem, rtol)
        methods[f"ours {rtol:g}"] = lambda rtol=rtol: problem.ours(rtol)  # type: ignore[misc]
        methods[f"euler {rtol:g}"] = lambda rtol=rtol: problem.euler(steps[rtol])  # type: ignore[misc]
    times = interleaved(methods, rounds)
    rows, points = [], []
    for rtol in TOLERANCES:
        a, b = times[f"ours {rtol:g}"], times[f"euler {rtol:g}"]
        mine, theirs = problem.error(problem.ours(rtol)), problem.error(problem.euler(steps[rtol]))
        points.append((statistics.median(a), mine))
        equal = statistics.median(x / y for x, y in zip(b, a, strict=True))
        better = f"{theirs / mine:.1e}" if np.isfinite(theirs) and mine > 0 else "-"
        rows.append(
            [
                f"{rtol:g}",
                f"{1e3 * points[-1][0]:.3g} ms",
                f"{mine:.1e}",
                str(steps[rtol]),
                f"{equal:.2f}",
                f"{theirs:.1e}",
                better,
            ]
        )
    return rows, points


def blow_up() -> list[str]:
    """The time of a blow-up, which fixed steps can only bracket."""
    rng = np.random.default_rng(4)
    L = rng.standard_normal((4, 4))
    S = L @ L.T / 4
    attention, gaussian = oa.SoftmaxAttention(np.eye(4), np.eye(4)), oa.GaussianMeasure(np.zeros(4), S)
    exact = 1.0 / (2.0 * np.linalg.eigvalsh(S)[-1])
    # a time-dependent layer has no closed form, so the time below comes from the integration alone
    run = oa.gaussian_flow(lambda t: attention, gaussian, t_span=(0.0, 2 * exact))
    rows = [("otattn", "adaptive", f"{abs(run.blow_up_time / exact - 1):.1e}")]
    for steps in (100, 1_000, 10_000, 100_000):
        h, T, t = 2 * exact / steps, S, 0.0
        while np.linalg.norm(T, 2) < 1e6:
            T, t = T + h * covariance_rate(np.eye(4), np.eye(4), T), t + h
        rows.append(("Euler, norm above 1e6", f"{steps}", f"{abs(t / exact - 1):.1e}"))
    head = ["## Time of a blow-up", "", "A = V = I, d = 4, t in [0, 2 t*]; relative error of the time found.", ""]
    return head + table(("method", "steps", "error"), rows)


def limit_ranks(draws: int) -> list[str]:
    """Ranks of limits under the published law, for which a theorem gives ``ceil(d/2)``."""
    rows = []
    for d in (3, 4, 5):
        start = time.perf_counter()
        study = oa.limit_rank_histogram(dim=d, draws=draws, value="gram", semidefinite=True, rng=d)
        spent = time.perf_counter() - start
        settled = study.settled
        wrong = int((study.ranks[settled] != (d + 1) // 2).sum())
        latest = max(limit.time for limit in study.limits)
        rows.append([str(d), str(draws), f"{spent:.3g} s", f"{1 - settled.mean():.1%}", str(wrong), f"{latest:.1e}"])
    head = [
        "## Ranks of limits",
        "",
        "A = -Q^T Q / sqrt(d), Q of rank floor(d/2), V = F^T F, Sigma_0 = G G^T, all entries normal: every limit has rank "
        "ceil(d/2). A flow has settled when each eigenvalue was seen to stay or to vanish over decades of time.",
        "",
    ]
    columns = ("d", "draws", "time", "not settled", "settled with another rank", "latest time followed to")
    return head + table(columns, rows)


def main() -> None:
    options = arguments(__doc__)
    rounds = 2 if options.quick else 5
    lines = [
        "# Flows against explicit Euler at equal time",
        "",
        f"Relative error at the final time; {rounds} interleaved rounds, medians. The number of Euler steps was calibrated to the "
        "time of otattn at that tolerance; `time Euler / otattn` is what it came to, round by round.",
        "",
    ]
    axes = panels(2)
    colors = ("blue", "red", "green", "orange", "purple", "grey")
    for problem, color in zip(problems(options.quick), colors, strict=False):
        rows, points = measure(problem, rounds)
        head = ("rtol", "time", "error", "Euler steps", "time Euler / otattn", "Euler error", "error Euler / otattn")
        lines += [f"## {problem.name}", "", f"{problem.note}.", "", *table(head, rows)]
        ax = axes["token" in problem.name]
        x, y = zip(*points, strict=True)
        ax.loglog(x, y, marker="o", color=COLORS[color], label=f"{problem.name}, otattn")
        euler = []
        for count in EULER[:3] if options.quick else EULER:
            start = time.perf_counter()
            state = problem.euler(count)
            euler.append((time.perf_counter() - start, problem.error(state)))
            if euler[-1][0] > 3.0:
                break
        finite = [(s, e) for s, e in euler if e < 10.0]
        ax.loglog(*zip(*finite, strict=True), marker="s", ls="--", color=COLORS[color], label=f"{problem.name}, Euler")
    lines += blow_up()
    lines += limit_ranks(20 if options.quick else 100)
    lines += machine(seeds="0, 3, 4 and 5")
    for ax, title in zip(axes, ("Gaussians", "tokens"), strict=True):
        ax.set_title(title)
        ax.set_xlabel("seconds")
        ax.set_ylabel("relative error at the final time")
        ax.legend(fontsize=7, frameon=False)
    write("flows", lines, options.out, axes[0])


if __name__ == "__main__":
    main()
