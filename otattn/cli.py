"""The command line: ``otattn report``, ``stability``, ``local``, ``bounds``, ``depth``, ``models``, ``flow`` and ``gradient-flow``.

Exit codes: 0 when the work is done, 2 on bad input, 3 when a certificate failed.
"""

from __future__ import annotations

import os
import pathlib
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from otattn import _validate as check
from otattn._arguments import parser
from otattn._progress import watched
from otattn.attention import MaskedAttention, SoftmaxAttention
from otattn.data import SampleLayer, load_layer, load_sample
from otattn.errors import CertificateError, OtattnError
from otattn.report.output import draw, prepare_folder, say, short_warnings, to_json, write_text

__all__ = ["main"]

_REFUSALS = (ValueError, TypeError, OSError, OtattnError, ArithmeticError, MemoryError, RuntimeError, ImportError)
"""What bad input, or a machine too small for it, ends in; anything else is a fault of ours and shows its traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parser().parse_args(argv)
    try:
        # many small products: threads inside each would only wait for one another
        with threadpool_limits(limits=1, user_api="blas"), short_warnings():
            if options.out is not None:
                prepare_folder(options.out, [f"{options.name}.json"], name="--out")
            _COMMANDS[options.name](options)
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


def _progress(options: Namespace) -> bool:
    """Whether bars are shown: on a terminal, unless they are not wanted."""
    return not options.quiet and sys.stderr.isatty()


def _layer(options: Namespace, *, instead: str | None = None) -> SampleLayer:
    """The layer asked for, or one head of it."""
    from otattn.report.opened import model_layer, no_model

    no_model(options)
    layer = _of_arrays(options, instead=instead) if options.model is None else model_layer(options)
    return layer if options.head is None else layer.of_head(options.head)


def _of_arrays(options: Namespace, *, instead: str | None) -> SampleLayer:
    """The layer of ``--weights``, else the bundled one; ``instead`` is an option in whose absence only its tokens are needed."""
    spared = instead is not None and getattr(options, instead) is not None
    if options.weights is None:
        if options.tokens is not None:
            raise ValueError("--tokens needs --weights: give the layer that the tokens enter.")
        return load_sample()
    if options.tokens is None and not spared:
        other = "" if instead is None else f" (or --{instead})"
        raise ValueError(f"--weights needs --tokens{other}: give the tokens that enter the layer.")
    return load_layer(options.weights, options.tokens, with_tokens=not spared)


def _report(options: Namespace) -> None:
    from otattn.report import build_report

    layer = _layer(options)
    data = build_report(
        layer,
        options.out,
        seed=options.seed,
        n_pairs=max(2, options.pairs),
        network=_network(options),
        resume=options.resume,
        progress=_progress(options),
        n_jobs=options.n_jobs,
    )
    if options.json:
        say(to_json(data))
    else:
        say(
            f"wrote {pathlib.Path(options.out) / 'report.html'} (and report.md, report.json, PNGs) in {data['seconds']:.0f} s"
        )


def _network(options: Namespace) -> Any:
    """The model of a report and what it reads, where it was asked for a model of texts."""
    from otattn.report.opened import network_of

    return None if options.model is None else network_of(options)


def _emit(options: Namespace, data: dict[str, Any], lines: list[str], picture: Callable[[], Any] | None = None) -> None:
    """Write and print the numbers, then draw."""
    out = None if options.out is None else prepare_folder(options.out, name="--out")
    if out is not None:
        write_text(out, f"{options.name}.json", to_json(data))
    say(to_json(data) if options.json else "\n".join(lines))
    if out is not None and picture is not None:
        draw(picture, out / f"{options.name}.png")


def _stability(options: Namespace) -> None:
    from otattn.report import LayerPairs

    layer = _layer(options)
    sampler = LayerPairs.of(layer, options.n)
    lines = [f"{'head':>4} {'certified':>10} {'largest':>10} {'median':>10}"]
    records = []
    children = np.random.SeedSequence(options.seed).spawn(len(layer.heads))
    for h, head in watched(
        list(enumerate(layer.heads)), "heads", progress=_progress(options), note=lambda pair: f"{pair[0]}"
    ):
        attention = MaskedAttention(head) if options.masked and not head.causal else head
        _, record = sampler.study(attention, n_pairs=options.pairs, p=options.p, seed=children[h])
        records.append({"head": layer.first_head + h, **record})
        lines.append(
            f"{layer.first_head + h:>4} "
            + " ".join(f"{record[k]:>10.4g}" for k in ("certified_lower", "largest", "median"))
        )
    p: float | str = "inf" if options.p == float("inf") else options.p
    data = {"p": p, "n": sampler.n, "pairs": options.pairs, "masked": options.masked, "heads": records}
    _emit(options, data, lines)


def _local(options: Namespace) -> None:
    from otattn.lipschitz.local.growth import local_growth, sizes_within

    layer = _layer(options)
    sizes = options.n or sizes_within(layer.hidden_states.shape[1])
    growth = local_growth(layer.heads, layer.hidden_states, n_values=sizes, progress=_progress(options))
    heading = f"{'head':>4} " + " ".join(f"n={n:<9d}" for n in sizes)
    lines = [heading + (" exponent" if len(sizes) > 1 else "")]
    for h in range(len(layer.heads)):
        row = f"{layer.first_head + h:>4} " + " ".join(f"{v:<11.5g}" for v in growth.values[h].mean(axis=0))
        if len(sizes) > 1:
            fit = growth.exponent(h)
            row += f" {fit.exponent:.3f} ± {fit.standard_error:.3f}"
        lines.append(row)
    data: dict[str, Any] = growth.to_dict()
    picture = None
    numbers = list(range(layer.first_head, layer.first_head + len(layer.heads)))
    if options.adversarial:
        from otattn.lipschitz.comparison import real_against_adversarial

        result = real_against_adversarial(
            layer.softmax_heads("--adversarial"),
            layer.hidden_states,
            growth=growth,
            rng=options.seed,
            progress=_progress(options),
        )
        data = result.to_dict()
        lines += ["", f"adversarial tokens of norm at most {result.radius:.4g}", heading]
        rows = zip(numbers, result.adversarial, strict=True)
        lines += [f"{h:>4} " + " ".join(f"{v:<11.5g}" for v in row) for h, row in rows]
        if len(sizes) > 1:
            from otattn.plotting import plot_real_against_adversarial

            picture = partial(plot_real_against_adversarial, result)
    _emit(options, {**data, "head_numbers": numbers}, lines, picture)


def _bounds(options: Namespace) -> None:
    from otattn.lipschitz import bounds
    from otattn.lipschitz.catalogue import theorems
    from otattn.lipschitz.comparison import reduced_head
    from otattn.lipschitz.enclosure import enclosure_table
    from otattn.plotting import plot_enclosure

    layer = _layer(options, instead="radius")
    head = layer.heads[0]
    if options.radius is not None:
        radius = check.positive(options.radius, "--radius")
    else:
        radius = float(np.linalg.norm(layer.hidden_states, axis=2).max())
    inner: Any = reduced_head(head.unmasked)[0] if isinstance(head.unmasked, SoftmaxAttention) else head
    reduced = MaskedAttention(inner) if isinstance(head, MaskedAttention) and inner is not head else inner
    choices: dict[str, Any] = {"rng": options.seed, "effort": options.effort, "progress": _progress(options)}
    # a map that no theorem of any measure covers has its rows for n tokens all the same
    catalogue = theorems(reduced, radius=radius)
    pairs = zip(catalogue.records, catalogue.reasons or (), strict=True)
    covered = any(why is None and t.kind == "upper" and t.quantity == "lipschitz" for t, why in pairs)
    table = enclosure_table(reduced, radius=radius, n_values=[*options.n, *([None] if covered else [])], **choices)
    data: dict[str, Any] = {**table.to_dict(), "head": layer.first_head, "radius": radius}
    lines = [f"head {layer.first_head}, R = {radius:.4g}, W_2", *str(table).splitlines()]
    if not covered:
        lines.append(f"any measure: no theorem covers {head.kind}")
    if isinstance(reduced, SoftmaxAttention):
        crossing = data["log10_crossover_n"] = bounds.crossover(reduced, radius).log10
        lines.append(
            f"mean-field bound the smaller one from n = 10^{crossing['ours']:.1f} "
            f"(published pair: 10^{crossing['published']:.1f})"
        )
    _emit(options, data, lines, partial(plot_enclosure, table))


def _depth(options: Namespace) -> None:
    from otattn.plotting import plot_depth
    from otattn.report.depth import profile_of

    profile = profile_of(options, progress=_progress(options))
    heading = f"n = {profile.mu.n}; norms within {profile.tol:g} of their value, {profile.products} products"
    _emit(options, profile.to_dict(), [*str(profile).splitlines(), heading], partial(plot_depth, profile))


def _models(options: Namespace) -> None:
    from otattn.report.contents import contents_of, contents_text
    from otattn.report.opened import refuse

    refuse(options, "layer", "head", "text", "heads", because="must be left out: models lists a whole checkpoint")
    named = [path for path in (options.model, options.path) if path is not None]
    if len(named) != 1:
        raise ValueError(
            f"models needs one PATH (or --model PATH), received {' and '.join(named) or 'none'}; give one."
        )
    data = contents_of(named[0])
    _emit(options, data, contents_text(data))


def _flow(options: Namespace) -> None:
    from otattn.plotting import plot_flow_stability
    from otattn.report.flow_section import gaussian_rows, perturbed_flows, token_flow_rows

    layer = _layer(options)
    size = check.positive(options.size, "--size")
    end = check.positive(options.t_end, "--t-end")
    tokens = layer.tokens(0)[: options.n]
    drift = perturbed_flows(
        layer.attention, tokens, t_end=end, size=size, seed=options.seed, progress=_progress(options)
    )
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


def _gradient_flow(options: Namespace) -> None:
    from otattn.gradient_flow import check_gradient_flow, structure_table
    from otattn.plotting import plot_structure_table
    from otattn.report.opened import no_model

    no_model(options)
    variants = structure_table(dim=options.dim, n=options.n, rng=options.seed, progress=_progress(options))
    data: dict[str, Any] = variants.to_dict()
    names = ("field", "wasserstein", "twisted", "bures", "dissipation")
    lines = [f"{'variant':<15} {'parameters':<26}" + "".join(f"{name:>12}" for name in names) + "  verdict"]
    for row in variants.entries:
        cells = [row.report.defects[name] for name in names]
        shown = "".join(f"{'-' if c is None else f'{c:.1e}':>12}" for c in cells)
        lines.append(f"{row.variant:<15} {row.values:<26}{shown}  {row.report.verdict}")
    if options.weights is not None or options.model is not None:
        layer = _layer(options)
        found = check_gradient_flow(layer.attention, layer.tokens(0)[: options.n], rng=options.seed)
        data["layer"] = found.to_dict()
        lines += ["", f"the given layer on its first {options.n} tokens: {found.verdict}"]
        lines += [f"  {name} defect {value:.2e}" for name, value in found.defects.items() if value is not None]
    _emit(options, data, lines, partial(plot_structure_table, variants))


_COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "report": _report,
    "stability": _stability,
    "local": _local,
    "bounds": _bounds,
    "depth": _depth,
    "models": _models,
    "flow": _flow,
    "gradient-flow": _gradient_flow,
}


if __name__ == "__main__":
    sys.exit(main())
