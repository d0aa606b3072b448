"""The command line: ``otattn report``, ``stability``, ``local``, ``bounds``, ``depth``, ``models``, ``flow`` and ``gradient-flow``.

Exit codes: 0 when the work is done, 2 on bad input, 3 when a certificate failed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from otattn import _validate as check
from otattn.attention import MaskedAttention
from otattn.data import SampleLayer, load_layer, load_sample
from otattn.errors import CertificateError, OtattnError
from otattn.report.output import draw, prepare_folder, say, short_warnings, to_json, write_text

__all__ = ["main"]

_REFUSALS = (ValueError, TypeError, OSError, OtattnError, ArithmeticError, MemoryError, RuntimeError, ImportError)
"""What bad input, or a machine too small for it, ends in; anything else is a fault of ours and shows its traceback."""


_MODELS = "What a checkpoint holds: its family, its tensors, what is missing, and whether it can be opened."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        # many small products: threads inside each would only wait for one another
        with threadpool_limits(limits=1, user_api="blas"), short_warnings():
            if options.out is not None:
                prepare_folder(options.out, [f"{options.name}.json"], name="--out")
            options.run(options)
            sys.stdout.flush()
    except CertificateError as exc:
        return _fail(exc, 3)
    except BrokenPipeError:  # the reader has left; nothing more can be said, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except _REFUSALS as exc:
        return _fail(exc, 2)
    except KeyboardInterrupt:
        print("otattn: interrupted", file=sys.stderr)
        return 130
    return 0


def _fail(exc: BaseException, code: int) -> int:
    text = " ".join(str(exc).split()) or type(exc).__name__
    if isinstance(exc, (MemoryError, RecursionError)) and not isinstance(exc, OtattnError):
        text = f"the input needs more memory than there is ({type(exc).__name__}: {text}); use fewer or smaller arrays."
    print(f"otattn: {text}", file=sys.stderr)
    return code


def _at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number of at least ``least``."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, received {text}")
        return value

    return integer


_positive = _at_least(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="otattn",
        description="Measure and certify how stable attention is in the geometry of optimal transport.",
    )
    parser.add_argument("--version", action="version", version=f"otattn {_version()}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(
        name: str, run: Callable[[argparse.Namespace], None], text: str, *, files: str = "", of_model: bool = False
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run, name=name)
        if not of_model:
            sub.add_argument("--tokens", metavar="FILE.npy", help="tokens (n, d) or windows (w, n, d)")
            sub.add_argument(
                "--weights",
                metavar="FILE.npz",
                help="query_weight, key_weight, value_weight, num_heads (and biases, output), or A and V; "
                "the bundled real layer by default",
            )
        sub.add_argument("--seed", type=_at_least(0), default=0, help="seed of every random draw (default 0)")
        sub.add_argument("--quiet", action="store_true", help="no progress bar")
        sub.add_argument("--json", action="store_true", help="print the content as JSON")
        needed = name == "report"
        sub.add_argument("--out", required=needed, metavar="DIR", help=f"directory for {name}.json{files}")
        return sub

    report = command("report", _report, "The main job: one report on a layer, with pictures.", files=", .md and PNGs")
    report.add_argument("--pairs", type=_positive, default=24, help="pairs of measures a head and metric (default 24)")
    report.add_argument("--n-jobs", type=int, default=1, help="sections at a time, -1 for all cores (default 1)")

    stability = command("stability", _stability, "Stability constants W_p(F(mu), F(nu)) / W_p(mu, nu) of each head.")
    stability.add_argument("--p", type=float, default=2.0, help="order of the distance, in [1, inf] (default 2)")
    stability.add_argument("--pairs", type=_positive, default=50, help="number of pairs (default 50)")
    stability.add_argument("--n", type=_positive, default=32, help="tokens a measure (default 32)")
    stability.add_argument("--masked", action="store_true", help="causal attention in the conditional distance")

    text = "Local Lipschitz constants of each head at its tokens."
    local = command("local", _local, text, files=" (and local.png with --adversarial)")
    local.add_argument("--n", type=_positive, nargs="+", default=None, help="numbers of tokens (default 8 16 ... 128)")
    local.add_argument("--adversarial", action="store_true", help="also search adversarial tokens of the same norm")

    text = "Published and own bounds against n, with witnessed lower bounds and the ratio."
    bounds = command("bounds", _bounds, text, files=" and bounds.png")
    bounds.add_argument("--head", type=int, default=0, help="head of the layer (default 0)")
    bounds.add_argument("--radius", type=float, default=None, help="token radius R (default: largest token norm)")
    bounds.add_argument("--n", type=_positive, nargs="+", default=[8, 64, 512], help="numbers of tokens")
    bounds.add_argument("--effort", choices=("fast", "deep"), default="fast", help="deep allows branch and bound")

    text = "Norms of the first 1, 2, ... layers of a model at real tokens, against products of the layers' own norms."
    depth = command("depth", _depth, text, files=" and depth.png", of_model=True)
    depth.add_argument("--model", required=True, metavar="PATH", help="a checkpoint or the folder of one")
    depth.add_argument(
        "--text", metavar="FILE", help="UTF-8 text whose first tokens are read (the bundled passage by default)"
    )
    depth.add_argument("--tokens", metavar="FILE.npy", help="token indices (n,) or (w, n), in place of a text")
    depth.add_argument("--other", metavar="FILE", help="a second text: distances of the two, layer by layer")
    depth.add_argument("--n", type=_positive, default=32, help="number of tokens (default 32)")
    depth.add_argument("--layers", type=_positive, default=None, help="only the first so many layers")
    depth.add_argument("--composed", action="store_true", help="leave out partial products that start later")
    depth.add_argument("--splitting", action="store_true", help="also the splitting part")
    depth.add_argument("--heads", type=_positive, default=None, help="number of heads where no configuration tells it")

    models = commands.add_parser("models", help=_MODELS, description=_MODELS)
    models.set_defaults(run=_models, name="models", out=None)
    models.add_argument("path", metavar="PATH", help="a checkpoint or the folder of one")
    models.add_argument("--json", action="store_true", help="print JSON")

    text = "Tokens that follow the layer in depth: stability in time, radius, clusters."
    flow = command("flow", _flow, text, files=" and flow.png")
    flow.add_argument("--n", type=_positive, default=16, help="tokens of the first window (default 16)")
    flow.add_argument("--t-end", type=float, default=1.0, help="length of the time span (default 1)")
    flow.add_argument("--size", type=float, default=1e-3, help="displacement over the largest norm (default 1e-3)")

    text = "Which variant is a gradient flow, of which energy: defects."
    gradient = command("gradient-flow", _gradient_flow, text, files=" and gradient-flow.png")
    gradient.add_argument("--dim", type=_positive, default=3, help="dimension of the random tokens (default 3)")
    gradient.add_argument("--n", type=_positive, default=8, help="number of random tokens (default 8)")
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("otattn")
    except PackageNotFoundError:
        return "unknown"


def _layer(options: argparse.Namespace, *, instead: str | None = None) -> SampleLayer:
    """The layer asked for; ``instead`` is an option in whose absence only its tokens are needed."""
    spared = instead is not None and getattr(options, instead) is not None
    if options.weights is None:
        if options.tokens is not None:
            raise ValueError("--tokens needs --weights: give the layer that the tokens enter.")
        return load_sample()
    if options.tokens is None and not spared:
        other = "" if instead is None else f" (or --{instead})"
        raise ValueError(f"--weights needs --tokens{other}: give the tokens that enter the layer.")
    return load_layer(options.weights, options.tokens, with_tokens=not spared)


def _report(options: argparse.Namespace) -> None:
    from otattn.report import build_report

    layer = _layer(options)
    data = build_report(
        layer,
        options.out,
        seed=options.seed,
        n_pairs=max(2, options.pairs),
        progress=not options.quiet,
        n_jobs=options.n_jobs,
    )
    if options.json:
        say(to_json(data))
    else:
        say(f"wrote {pathlib.Path(options.out) / 'report.md'} (and report.json, PNGs) in {data['seconds']:.0f} s")


def _emit(
    options: argparse.Namespace, data: dict[str, Any], lines: list[str], picture: Callable[[], Any] | None = None
) -> None:
    """Write and print the numbers, then draw."""
    out = None if options.out is None else prepare_folder(options.out, name="--out")
    if out is not None:
        write_text(out, f"{options.name}.json", to_json(data))
    say(to_json(data) if options.json else "\n".join(lines))
    if out is not None and picture is not None:
        draw(picture, out / f"{options.name}.png")


def _stability(options: argparse.Namespace) -> None:
    from tqdm.auto import tqdm

    from otattn.report import LayerPairs

    layer = _layer(options)
    sampler = LayerPairs.of(layer, options.n)
    lines = [f"{'head':>4} {'certified':>10} {'largest':>10} {'median':>10}"]
    records = []
    children = np.random.SeedSequence(options.seed).spawn(len(layer.heads))
    for h, head in enumerate(tqdm(layer.heads, desc="heads", disable=options.quiet, leave=False)):
        attention = MaskedAttention(head) if options.masked else head
        _, record = sampler.study(attention, n_pairs=options.pairs, p=options.p, seed=children[h])
        records.append({"head": h, **record})
        lines.append(f"{h:>4} " + " ".join(f"{record[k]:>10.4g}" for k in ("certified_lower", "largest", "median")))
    p: float | str = "inf" if options.p == float("inf") else options.p
    data = {"p": p, "n": sampler.n, "pairs": options.pairs, "masked": options.masked, "heads": records}
    _emit(options, data, lines)


def _local(options: argparse.Namespace) -> None:
    from otattn.lipschitz.local.growth import local_growth, sizes_within

    layer = _layer(options)
    sizes = options.n or sizes_within(layer.hidden_states.shape[1])
    growth = local_growth(layer.heads, layer.hidden_states, n_values=sizes, progress=not options.quiet)
    heading = f"{'head':>4} " + " ".join(f"n={n:<9d}" for n in sizes)
    lines = [heading + (" exponent" if len(sizes) > 1 else "")]
    for h in range(len(layer.heads)):
        row = f"{h:>4} " + " ".join(f"{v:<11.5g}" for v in growth.values[h].mean(axis=0))
        if len(sizes) > 1:
            fit = growth.exponent(h)
            row += f" {fit.exponent:.3f} ± {fit.standard_error:.3f}"
        lines.append(row)
    data: dict[str, Any] = growth.to_dict()
    picture = None
    if options.adversarial:
        from otattn.lipschitz.comparison import real_against_adversarial

        result = real_against_adversarial(
            layer.heads, layer.hidden_states, growth=growth, rng=options.seed, progress=not options.quiet
        )
        data = result.to_dict()
        lines += ["", f"adversarial tokens of norm at most {result.radius:.4g}", heading]
        lines += [f"{h:>4} " + " ".join(f"{v:<11.5g}" for v in row) for h, row in enumerate(result.adversarial)]
        if len(sizes) > 1:
            from otattn.plotting import plot_real_against_adversarial

            picture = partial(plot_real_against_adversarial, result)
    _emit(options, data, lines, picture)


def _bounds(options: argparse.Namespace) -> None:
    from otattn.lipschitz import bounds
    from otattn.lipschitz.comparison import reduced_head
    from otattn.lipschitz.enclosure import enclosure_table
    from otattn.plotting import plot_enclosure

    layer = _layer(options, instead="radius")
    if not 0 <= options.head < len(layer.heads):
        raise ValueError(f"--head must be below {len(layer.heads)}, received {options.head}.")
    head = layer.heads[options.head]
    if options.radius is not None:
        radius = check.positive(options.radius, "--radius")
    else:
        radius = float(np.linalg.norm(layer.hidden_states, axis=2).max())
    reduced = reduced_head(head)[0]
    table = enclosure_table(
        reduced, radius=radius, n_values=[*options.n, None], rng=options.seed, effort=options.effort
    )
    crossing = bounds.crossover(reduced, radius).log10
    data = {**table.to_dict(), "head": options.head, "radius": radius, "log10_crossover_n": crossing}
    lines = [
        f"head {options.head}, R = {radius:.4g}, W_2",
        *str(table).splitlines(),
        f"mean-field bound the smaller one from n = 10^{crossing['ours']:.1f} "
        f"(published pair: 10^{crossing['published']:.1f})",
    ]
    _emit(options, data, lines, partial(plot_enclosure, table))


def _depth(options: argparse.Namespace) -> None:
    from otattn.plotting import plot_depth
    from otattn.report.depth import profile_of

    profile = profile_of(options)
    heading = f"n = {profile.mu.n}; norms within {profile.tol:g} of their value, {profile.products} products"
    _emit(options, profile.to_dict(), [*str(profile).splitlines(), heading], partial(plot_depth, profile))


def _models(options: argparse.Namespace) -> None:
    from otattn.report.contents import contents_of, contents_text

    data = contents_of(pathlib.Path(options.path))
    _emit(options, data, contents_text(data))


def _flow(options: argparse.Namespace) -> None:
    from otattn.plotting import plot_flow_stability
    from otattn.report.flow_section import gaussian_rows, perturbed_flows, token_flow_rows

    layer = _layer(options)
    size = check.positive(options.size, "--size")
    end = check.positive(options.t_end, "--t-end")
    drift = perturbed_flows(layer.attention, layer.tokens(0)[: options.n], t_end=end, size=size, seed=options.seed)
    rows, runs = token_flow_rows(drift), gaussian_rows(dim=3, seed=options.seed)
    names = list(rows[0])
    lines = ["the layer's flow of its tokens, and of displaced ones: W_2(mu_t, nu_t) / W_2(mu_0, nu_0)"]
    lines.append("  ".join(f"{name:>10}" for name in names))
    lines += ["  ".join(f"{row[name]:>{max(10, len(name))}.4g}" for name in names) for row in rows]
    lines += [f"status: {drift.status}", "", "Gaussian flows (random symmetric A, d = 3)"]
    lines += [
        f"{run['attention']:>8}, V = {run['V']:<2}  blow-up time {run['blow_up_time']:<10.5g} limit rank {run['limit_rank']}"
        f" ({run['limit_status']})"
        for run in runs
    ]
    data = {"n": min(options.n, layer.hidden_states.shape[1]), "status": drift.status, "rows": rows, "gaussian": runs}
    _emit(options, data, lines, partial(plot_flow_stability, drift))


def _gradient_flow(options: argparse.Namespace) -> None:
    from otattn.gradient_flow import check_gradient_flow, structure_table
    from otattn.plotting import plot_structure_table

    variants = structure_table(dim=options.dim, n=options.n, rng=options.seed)
    data: dict[str, Any] = variants.to_dict()
    names = ("field", "wasserstein", "twisted", "bures", "dissipation")
    lines = [f"{'variant':<15} {'parameters':<26}" + "".join(f"{name:>12}" for name in names) + "  verdict"]
    for row in variants.entries:
        cells = [row.report.defects[name] for name in names]
        shown = "".join(f"{'-' if c is None else f'{c:.1e}':>12}" for c in cells)
        lines.append(f"{row.variant:<15} {row.values:<26}{shown}  {row.report.verdict}")
    if options.weights is not None:
        layer = _layer(options)
        found = check_gradient_flow(layer.attention, layer.tokens(0)[: options.n], rng=options.seed)
        data["layer"] = found.to_dict()
        lines += ["", f"the given layer on its first {options.n} tokens: {found.verdict}"]
        lines += [f"  {name} defect {value:.2e}" for name, value in found.defects.items() if value is not None]
    _emit(options, data, lines, partial(plot_structure_table, variants))


if __name__ == "__main__":
    sys.exit(main())
