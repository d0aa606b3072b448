"""Our bounds of Lipschitz constants against the published formulas, auto_LiRPA and LipSDP, on the same maps.

    pip install -r benchmarks/requirements.txt
    python3.10 -m venv lirpa && lirpa/bin/pip install -r benchmarks/requirements-lirpa.txt
    lirpa/bin/pip install --no-deps auto_LiRPA==0.3
    OTATTN_LIRPA_PYTHON=lirpa/bin/python python -m benchmarks.peers [--quick]

Writes ``benchmarks/results/peers.md`` and ``peers.png``. auto_LiRPA runs in an interpreter of its own
(:mod:`benchmarks.lirpa_worker` says why); without it its sections are left out, and the notice is printed and written.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

import otattn as oa
from benchmarks.common import arguments, machine, panels, table, write
from benchmarks.lipsdp import lipsdp
from otattn.plotting.style import COLORS

Array = np.ndarray
SIZES = ((2, 2), (4, 3), (8, 4))
PYTHON = os.environ.get("OTATTN_LIRPA_PYTHON", "")
NOTICE = (
    "auto_LiRPA was not run: set OTATTN_LIRPA_PYTHON to a Python 3.10 with benchmarks/requirements-lirpa.txt "
    "installed (its last release on PyPI, 0.3, needs torch < 1.13 and numpy < 2)."
)


@dataclass(frozen=True, eq=False)
class Case:
    """A head of ``||A|| = 1`` and n tokens in the unit ball."""

    name: str
    A: Array
    V: Array
    X: Array

    @property
    def attention(self) -> oa.SoftmaxAttention:
        return oa.SoftmaxAttention(self.A, self.V)


def unit(M: Array) -> Array:
    return M / np.linalg.norm(M, 2)


def cases(quick: bool) -> list[Case]:
    out = []
    for n, d in SIZES[: 2 if quick else 3]:
        rng = np.random.default_rng(n)
        X = rng.standard_normal((n, d))
        X /= np.linalg.norm(X, axis=1).max()
        G = unit(rng.standard_normal((d, d)))
        for name, A, V in (
            ("I", np.eye(d), np.eye(d)),
            ("-I", -np.eye(d), np.eye(d)),
            ("random", G, unit(G @ G - G.T)),
        ):
            out.append(Case(name, A, V, X))
    return out


@dataclass(frozen=True, eq=False)
class Task:
    """Tokens within ``eps`` of X in the 2- or the inf-norm of all coordinates."""

    case: Case
    X: Array
    eps: float
    norm: float
    methods: tuple[str, ...] = ("CROWN",)


def lirpa(tasks: list[Task]) -> list[dict[str, tuple[float, float]]]:
    """Bound and seconds of each method of each task, by one worker.

    Entrywise bounds ``low <= J <= high`` give ``||J|| <= ||mid|| + ||rad||`` and ``|| max(|low|, |high|) ||``; the
    smaller one is taken.
    """
    with tempfile.TemporaryDirectory() as folder:
        for k, t in enumerate(tasks):
            problem = {
                "A": t.case.A,
                "V": t.case.V,
                "X": t.X,
                "eps": t.eps,
                "norm": t.norm,
                "methods": np.array(t.methods),
            }
            np.savez(Path(folder) / f"problem{k}.npz", **problem)
        worker = Path(__file__).with_name("lirpa_worker.py")
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [PYTHON, str(worker), folder, str(len(tasks))]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"auto_LiRPA failed:\n{done.stderr}")
        answers = [dict(np.load(Path(folder) / f"answer{k}.npz")) for k in range(len(tasks))]
    return [norms(task, answer) for task, answer in zip(tasks, answers, strict=True)]


def norms(task: Task, answer: dict[str, Array]) -> dict[str, tuple[float, float]]:
    J = task.case.attention.jacobian(task.X).to_dense()
    assert np.abs(answer["jacobian"] - J).max() < 1e-4, "the network is not the Jacobian"
    out = {}
    for method in task.methods:
        low, high = (answer[f"{method} {end}"].astype(np.float64) for end in ("low", "high"))
        assert (low <= J + 1e-4).all(), f"{method} misses the Jacobian"
        assert (high >= J - 1e-4).all(), f"{method} misses the Jacobian"
        split = np.linalg.norm((high + low) / 2, 2) + np.linalg.norm((high - low) / 2, 2)
        value = min(split, float(np.linalg.norm(np.maximum(np.abs(low), np.abs(high)), 2)))
        out[method] = (float(value), float(answer[f"{method} seconds"]))
    return out


def published(quick: bool, ax: object) -> list[str]:
    """Tokens in a ball: the smaller published formula against ours."""
    rows, kept = [], []
    for case in cases(quick):
        n, d = case.X.shape
        for a in (1.0, 4.0, 9.0):
            R = math.sqrt(a)
            lower = oa.lipschitz_lower_bound(case.attention, radius=R, n=n, rng=0).value
            start = time.perf_counter()
            ours = oa.lipschitz_upper_bound(case.attention, radius=R, n=n)
            seconds = time.perf_counter() - start
            castin = oa.bounds.castin2024_discrete(case.attention, radius=R, n=n).value
            field = oa.bounds.geshkovski2024_mean_field(case.attention, radius=R).value
            kept.append((ours.value / lower, min(castin, field) / lower))
            rows.append(
                (case.name, n, d, f"{a:g}", f"{lower:.3f}", f"{ours.value:.3f}", f"{castin:.4g}", f"{field:.4g}")
                + (f"{kept[-1][0]:.2f}", f"{kept[-1][1]:.2f}", f"{seconds:.2f} s")
            )
    ratios = np.array(kept)
    x = np.arange(len(ratios))
    ax.semilogy(x, ratios[:, 1], "s", color=COLORS["red"], label="published")  # type: ignore[attr-defined]
    ax.semilogy(x, ratios[:, 0], "o", color=COLORS["blue"], label="otattn")  # type: ignore[attr-defined]
    ax.set_title("n tokens in a ball")  # type: ignore[attr-defined]
    mean, worst = np.exp(np.log(ratios).mean(axis=0)), ratios.max(axis=0)
    head = ("A", "n", "d", "a", "lower", "otattn", "Castin 2024", "Geshkovski 2024")
    head += ("otattn / lower", "published / lower", "seconds")
    return [
        "## Tokens in a ball: the published formulas",
        "",
        "Constant of the map of n tokens on the ball of radius R, a = ||A|| R^2; *lower* is attained (witness "
        'found by otattn); `effort="fast"`. Castin 2024: bound for n tokens; Geshkovski 2024: for any measure. '
        "The ratio takes the smaller one.",
        "",
        *table(head, rows),
        f"Geometric mean of bound / lower: otattn {mean[0]:.2f} (worst {worst[0]:.2f}), published {mean[1]:.2f} (worst "
        f"{worst[1]:.1f}).",
        "",
    ]


def boxes(quick: bool, ax: object) -> list[str]:
    """Every token in a box around 0: the same domain for both."""
    grid = [(case, a, math.sqrt(a / len(case.A))) for case in cases(quick) for a in (0.25, 1.0, 4.0)]
    answers = lirpa([Task(c, np.zeros_like(c.X), r, math.inf, ("IBP", "CROWN-IBP", "CROWN")) for c, _, r in grid])
    rows, kept = [], []
    for (case, a, r), theirs in zip(grid, answers, strict=True):
        n, d = case.X.shape
        box = oa.Box(np.full(d, -r), np.full(d, r))
        lower = oa.lipschitz_lower_bound(case.attention, domain=box, n=n, rng=0).value
        start = time.perf_counter()
        ours = oa.lipschitz_upper_bound(case.attention, domain=box, n=n).value
        seconds = time.perf_counter() - start
        values = [ours, theirs["IBP"][0], min(theirs["CROWN-IBP"][0], theirs["CROWN"][0])]
        kept.append([v / lower for v in values])
        rows.append(
            (case.name, n, d, f"{a:g}", f"{lower:.3f}")
            + tuple(f"{v:.4g}" for v in values)
            + (f"{ours / lower:.2f}", f"{min(values[1:]) / lower:.3g}", f"{seconds:.2f} s")
            + tuple(f"{theirs[m][1]:.2f} s" for m in ("IBP", "CROWN"))
        )
        print(rows[-1], flush=True)
    ratios = np.minimum(np.array(kept), 1e8)
    for column, color, marker, label in (
        (2, "orange", "^", "CROWN"),
        (1, "red", "s", "IBP"),
        (0, "blue", "o", "otattn"),
    ):
        name = label if label == "otattn" else f"auto_LiRPA, {label}"
        ax.semilogy(np.arange(len(ratios)), ratios[:, column], marker, color=COLORS[color], label=name)  # type: ignore[attr-defined]
    ax.set_title("n tokens in a box")  # type: ignore[attr-defined]
    head = (
        "A",
        "n",
        "d",
        "a",
        "lower",
        "otattn",
        "IBP",
        "CROWN",
        "otattn / lower",
        "best of them / lower",
        "otattn takes",
    )
    head += ("IBP takes", "CROWN takes")
    return [
        "## Tokens in a box: auto_LiRPA",
        "",
        "Every coordinate of every token in [-r, r], d r^2 = a (the ball around the box has ||A|| R^2 = a). "
        "auto_LiRPA bounds the entries of the Jacobian; *CROWN* is the smaller of its CROWN and CROWN-IBP. Its "
        "seconds are of the bound computation only, one thread, single precision, not rounded outward. *lower* is "
        "attained (found by otattn).",
        "",
        *table(head, rows),
    ]


def neighbourhoods(quick: bool, ax: object) -> list[str]:
    """Around given tokens, on two sets: every token within rho, and all of them within rho together."""
    grid = [(case, rho) for case in cases(quick) for rho in (0.01, 0.1)]
    tasks = []
    for case, rho in grid:
        # every token within rho: contained in a joint ball of radius rho sqrt(n), and in a box
        wider, box = Task(case, case.X, rho * math.sqrt(len(case.X)), 2.0), Task(case, case.X, rho, math.inf)
        tasks += [Task(case, case.X, rho, 2.0), wider, box]
    answers = [answer["CROWN"] for answer in lirpa(tasks)]
    rows, kept = [], []
    for k, (case, rho) in enumerate(grid):
        n, d = case.X.shape
        here = float(np.linalg.norm(case.attention.jacobian(case.X).to_dense(), 2))
        whole = oa.lipschitz_upper_bound(case.attention, radius=1.0 + rho, n=n)
        start = time.perf_counter()
        ours = oa.relaxations.near_tokens(case.attention, case.X, rho, global_bound=whole).value
        seconds = time.perf_counter() - start
        joint, each = answers[3 * k], min(answers[3 * k + 1][0], answers[3 * k + 2][0])
        kept.append((ours / here, each / here, joint[0] / here))
        rows.append(
            (case.name, n, d, f"{rho:g}", f"{here:.4f}", f"{ours:.4f}", f"{each:.4f}", f"{joint[0]:.4f}")
            + (f"{each / ours:.3f}", f"{joint[0] / ours:.3f}", f"{seconds:.2f} s", f"{joint[1]:.2f} s")
        )
        print(rows[-1], flush=True)
    ratios = np.array(kept)
    for column, color, marker, label in (
        (1, "orange", "^", "CROWN, each token"),
        (2, "purple", "v", "CROWN, together"),
        (0, "blue", "o", "otattn"),
    ):
        name = label if label == "otattn" else f"auto_LiRPA, {label}"
        ax.plot(np.arange(len(ratios)), ratios[:, column], marker, color=COLORS[color], label=name)  # type: ignore[attr-defined]
    ax.set_title("around given tokens")  # type: ignore[attr-defined]
    head = ("A", "n", "d", "rho", "at the tokens", "otattn", "CROWN, each", "CROWN, together")
    head += ("each / otattn", "together / otattn", "otattn takes", "CROWN takes")
    return [
        "## Around given tokens: auto_LiRPA",
        "",
        "Tokens of norm at most 1. *each*: every token may move by rho (auto_LiRPA: the smaller of its bounds on "
        "the box and on the joint ball of radius rho sqrt(n), which both contain that set). *together*: the "
        "Euclidean norm of all displacements is at most rho, the natural set of auto_LiRPA; otattn's value holds "
        "there too, since it covers the larger set. otattn: `relaxations.near_tokens` with the bound of the ball "
        "around all tokens as `global_bound` (not timed). CROWN takes: one of its three sets.",
        "",
        *table(head, rows),
    ]


def attained(case: Case, Y: Array, softmax: bool) -> float:
    """``sup_x ||D_x Gamma_mu(x)||`` for the uniform measure on Y, from below."""
    attention = case.attention if softmax else oa.SigmoidAttention(case.A, case.V)

    def norm(x: Array) -> float:
        return -float(np.linalg.norm(attention.field_jacobian(x[None], Y)[0], 2))

    starts = [*np.random.default_rng(0).standard_normal((20, len(case.A))), np.zeros(len(case.A))]
    return max(max(-minimize(norm, s * z, method="Nelder-Mead").fun for s in (0.3, 3.0, 30.0)) for z in starts)


def frozen_fields(quick: bool) -> list[str]:
    """``x -> Gamma_mu(x)`` with mu fixed is a network of one hidden layer, which LipSDP covers."""
    rows = []
    for case in cases(quick):
        Y = 2.0 * case.X
        n, d = Y.shape
        inner, outer = Y @ case.A, case.V @ Y.T
        centred = np.eye(n) - 1.0 / n
        for kind in ("softmax", "sigmoid"):
            start = time.perf_counter()
            if kind == "softmax":
                sdp = lipsdp(centred @ inner, outer @ centred, 0.5, scalar=True)
                product = 0.5 * np.linalg.norm(centred @ inner, 2) * np.linalg.norm(outer @ centred, 2)
            else:
                sdp = lipsdp(inner, outer / n, 0.25)
                product = 0.25 * np.linalg.norm(inner, 2) * np.linalg.norm(outer / n, 2)
            seconds = time.perf_counter() - start
            if kind == "softmax":  # any measure on these points, any x
                ours = oa.relaxations.field_certificate(case.attention, domain=oa.PointSet(Y)).value
            else:  # slope at most 1/4 times the second moment about 0 of the points: |V y| |A^T y| at its largest
                ours = 0.25 * float((np.linalg.norm(Y @ case.V.T, axis=1) * np.linalg.norm(Y @ case.A, axis=1)).max())
            low = attained(case, Y, kind == "softmax")
            rows.append(
                (kind, case.name, n, d, f"{low:.4f}", f"{ours:.4f}", f"{sdp:.4f}", f"{product:.4f}")
                + (f"{sdp / ours:.3f}", f"{seconds:.3f} s")
            )
            print(rows[-1], flush=True)
    head = ("kernel", "A", "n", "d", "attained", "any measure on the points", "LipSDP", "product of norms")
    head += ("LipSDP / any measure", "LipSDP takes")
    return [
        "## The field of a frozen measure: LipSDP",
        "",
        "x -> Gamma_mu(x) for the uniform measure mu on n points of norm at most 2, x in all of R^d: a network W1 "
        "phi(W0 x) with W0 = Y A and W1 = V Y^T (over n for the sigmoid). *Any measure on the points* holds for "
        "every weights on them, not only the uniform ones (softmax: `relaxations.field_certificate`; sigmoid: the "
        "elementary bound max |V y| |A^T y| / 4). LipSDP: diagonal multipliers for the sigmoid, one multiplier "
        "(co-coercivity of softmax) for softmax, solved by Clarabel, value recomputed from the multipliers. For "
        "the sigmoid both are exact, each for its own question: LipSDP for the uniform measure, ours for every "
        "measure (a Dirac mass attains it).",
        "",
        *table(head, rows),
    ]


COMPARABLE = [
    "## What is comparable, and what is not",
    "",
    "- LipSDP covers networks of affine maps and activations with fixed slopes. The map of the tokens multiplies "
    "tokens by tokens before and after the softmax, so LipSDP does not apply to it; with the measure frozen it "
    "does. A value of LipSDP for a frozen measure is no bound of the constant of the token map.",
    "- auto_LiRPA 0.3 (the last release on PyPI, 2022) has no Jacobian operators (those are in later versions, on "
    "GitHub only) and needs torch < 1.13. With numpy 2 and torch 2.13 its imports fail (`numpy.lib.arraysetops`, "
    "`torch.onnx.symbolic_helper._set_opset_version`), and with those supplied its graph parser does "
    "(`torch._C.Node` has no subscripts any more). This script runs it with torch 1.12 in an interpreter of its own, on the "
    "analytic Jacobian written out as a network. CROWN on softmax attention as it is usually written fails there "
    "(reshapes of transposed tensors), hence the flat form. Its optimised bounds (alpha-CROWN) and branch and "
    "bound were not run: they can only lower its values.",
    "- Neither has a bound for any number of tokens or for any measure.",
    "",
]


def main() -> None:
    options = arguments(__doc__)
    axes = panels(3 if PYTHON else 1, height=4.4)
    lines = [
        "# Bounds against peers",
        "",
        "||A|| = ||V|| = 1 throughout (V = I for A = I and -I).",
        "",
        *published(options.quick, axes[0]),
    ]
    if PYTHON:
        lines += boxes(options.quick, axes[1])
        lines += neighbourhoods(options.quick, axes[2])
    else:
        print(NOTICE)
        lines += [NOTICE, ""]
    lines += frozen_fields(options.quick)
    lines += COMPARABLE
    lines += machine("cvxpy", seeds="weights and tokens: n; searches: 0")
    for ax in axes:
        ax.set_xlabel("case, in the order of the table")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=2)
    axes[0].set_ylabel("bound / lower bound")
    if PYTHON:
        axes[2].set_ylabel("bound / constant at the tokens")
    write("peers", lines, options.out, axes[0])


if __name__ == "__main__":
    main()
