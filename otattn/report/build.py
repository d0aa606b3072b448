"""Assemble the sections and write ``report.html``, ``report.md``, ``report.json`` and the pictures."""

from __future__ import annotations

import io
import pathlib
import time
from collections.abc import Callable
from typing import Any

from joblib import Parallel, delayed, effective_n_jobs
from tqdm.auto import tqdm

from otattn import _validate as check
from otattn.data import SampleLayer
from otattn.report.bounds_section import bounds_section
from otattn.report.enclosure_section import enclosure_section
from otattn.report.flow_section import flow_section
from otattn.report.gradient_flow_section import gradient_flow_section
from otattn.report.local_section import local_section
from otattn.report.output import draw, prepare_folder, to_json, write_text
from otattn.report.page import html_page
from otattn.report.section import Section
from otattn.report.stability_section import stability_section
from otattn.report.summary import summarised

__all__ = ["build_report", "write_report"]


def build_report(
    layer: SampleLayer,
    out: str | pathlib.Path,
    *,
    seed: int = 0,
    n_pairs: int = 24,
    n_tokens: int = 32,
    progress: bool = True,
    n_jobs: int = 1,
) -> dict[str, Any]:
    """Measure and bound one layer; write ``report.html`` (one file, with everything in it), ``report.md``, ``report.json``
    and the pictures into ``out``.

    Parameters
    ----------
    layer : SampleLayer
        Heads and windows of tokens, from :func:`otattn.load_sample` or :func:`otattn.load_layer`.
    out : path
        A directory, made if needed; checked before the work.
    seed : int
        Every random draw descends from it.
    n_pairs : int
        Pairs of measures for each head and metric.
    n_tokens : int
        Tokens a measure in the stability study.
    progress : bool
        Show a bar on stderr.
    n_jobs : int
        Sections, and heads in the enclosures, at a time, through joblib; -1 for as many as there are cores. The content
        does not depend on it.

    Returns
    -------
    dict
        The content of ``report.json``. It and the text are written before the pictures; a picture that cannot be
        drawn is a warning.

    Raises
    ------
    ValueError
        ``out`` cannot be written, a count is out of range, or heads are no plain softmax attention.
    """
    check.count(seed, "seed", least=0)
    check.count(n_pairs, "n_pairs", least=2)
    check.count(n_tokens, "n_tokens", least=2)
    layer.softmax_heads("a report")
    folder = prepare_folder(out, ("report.html", "report.md", "report.json"))
    start = time.perf_counter()
    heads = len(layer.heads)
    with tqdm(total=6 * heads + 4, desc="report", unit="step", disable=not progress) as bar:
        tasks = [
            (gradient_flow_section, {"seed": seed}),
            (local_section, {}),
            (stability_section, {"seed": seed, "n_pairs": n_pairs, "n": n_tokens}),
            (flow_section, {"seed": seed}),
        ]
        alone = effective_n_jobs(n_jobs) == 1
        calls = (delayed(_counted)(f, layer, bar.update if alone else None, options) for f, options in tasks)
        done = []
        for found, steps in Parallel(n_jobs=n_jobs, return_as="generator")(calls):
            done.append(found)
            bar.update(0 if alone else steps)
        structure, (local, growth), stability, depth = done
        enclosure = enclosure_section(layer, growth, seed=seed, advance=bar.update, n_jobs=n_jobs)
        crossing = bounds_section(layer, radius=float(growth.radii.max()), advance=bar.update)
    sections = summarised([enclosure, stability, local, crossing, depth, structure])
    head = {
        "layer": _name(layer),
        "heads": heads,
        "windows": int(layer.hidden_states.shape[0]),
        "tokens_per_window": int(layer.hidden_states.shape[1]),
        "dimension": int(layer.hidden_states.shape[2]),
        "seed": seed,
    }
    return write_report(folder, head, sections, seconds=time.perf_counter() - start)


def _counted(section: Any, layer: SampleLayer, advance: Any, options: dict[str, Any]) -> tuple[Any, int]:
    """A section and its steps; ``advance`` is None in another process, where there is no bar."""
    steps = 0

    def tick() -> None:
        nonlocal steps
        steps += 1
        if advance is not None:
            advance()

    return section(layer, advance=tick, **options), steps


def _name(layer: SampleLayer) -> str:
    """The origin in one line; the bundled layer's is a page."""
    if "\n" not in layer.origin:
        return layer.origin
    return "The bundled layer, layer 3 of all-MiniLM-L6-v2 on the opening of a public-domain novel"


def write_report(out: pathlib.Path, head: dict[str, Any], sections: list[Section], *, seconds: float) -> dict[str, Any]:
    """Write all kinds of files, numbers first; returns the JSON content."""
    title = "Attention stability report"
    about = (
        f"{head['layer']}: {head['heads']} heads, {head['windows']} windows of {head['tokens_per_window']} tokens in "
        f"dimension {head['dimension']}; seed {head['seed']}; {seconds:.0f} s."
    )
    lines = [f"# {title}", "", about, ""]
    data: dict[str, Any] = {**head, "seconds": round(seconds, 1), "sections": {}}
    for section in sections:
        lines += [f"## {section.title}", "", *section.lines]
        for name in section.pictures:
            lines += [_link(section, name), ""]
        data["sections"][section.title] = section.data
    drawn: dict[str, bytes | str] = {}
    write_text(out, "report.json", to_json(data))
    write_text(out, "report.md", "\n".join(lines))
    write_text(out, "report.html", html_page(title, about, sections, drawn))
    missing = {}
    for section in sections:
        for name, picture in section.pictures.items():
            reason = draw(_keeping(picture, name, drawn), out / name)
            if reason is not None:
                drawn[name] = reason
                missing[_link(section, name)] = f"({name} was not drawn: {reason})"
    if missing:
        write_text(out, "report.md", "\n".join(missing.get(line, line) for line in lines))
    write_text(out, "report.html", html_page(title, about, sections, drawn))
    return data


def _keeping(picture: Callable[[], Any], name: str, drawn: dict[str, bytes | str]) -> Callable[[], Any]:
    """The picture, which leaves its SVG in ``drawn``."""

    def draw_both() -> Any:
        axes = picture()
        buffer = io.BytesIO()
        axes.figure.savefig(buffer, format="svg")
        drawn[name] = buffer.getvalue()
        return axes

    return draw_both


def _link(section: Section, name: str) -> str:
    return f"![{section.title}]({name})"
