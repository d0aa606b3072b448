"""Make the sections of a report, and write them as they are finished."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from joblib import Parallel, delayed, effective_n_jobs
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from otattn import _validate as check
from otattn.data import SampleLayer
from otattn.models.transformer import Transformer
from otattn.report.bounds_section import bounds_section
from otattn.report.draft import Draft
from otattn.report.enclosure_section import enclosure_section
from otattn.report.flow_section import flow_section
from otattn.report.gradient_flow_section import gradient_flow_section
from otattn.report.local_section import growth_of, local_section
from otattn.report.network_section import network_section
from otattn.report.output import prepare_folder
from otattn.report.section import Section
from otattn.report.stability_section import stability_section
from otattn.report.summary import summarised
from otattn.stability.fingerprint import fingerprint

__all__ = ["build_report"]


def build_report(
    layer: SampleLayer,
    out: str | pathlib.Path,
    *,
    seed: int = 0,
    n_pairs: int = 24,
    n_tokens: int = 32,
    network: tuple[Transformer, ArrayLike] | None = None,
    resume: bool = False,
    progress: bool = True,
    n_jobs: int = 1,
) -> dict[str, Any]:
    """Measure and bound one layer; write ``report.html`` (one file, with everything in it), ``report.md``, ``report.json``
    and the pictures into ``out``.

    Each section is written when it is finished: a report that is stopped leaves what it had.

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
    network : (Transformer, array_like (n,)), optional
        A model, of which ``layer`` is one, and the tokens that it reads: a first section then goes through its layers.
    resume : bool
        Go on with the report that was stopped in ``out``: its finished sections are taken, if they are of the same layer,
        seed, counts and version of the package.
    progress : bool
        Show a bar on stderr, with the time that is left.
    n_jobs : int
        Sections, and heads in the enclosures, at a time, through joblib; -1 for as many as there are cores. The content
        does not depend on it.

    Returns
    -------
    dict
        The content of ``report.json``. The numbers of a section are written before its pictures; a picture that cannot be
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
    heads = len(layer.heads)
    parts: dict[str, _Part] = {
        "network": _Part(network_section, {"network": network, "seed": seed}, 1, 20.0),
        "enclosure": _Part(enclosure_section, {"seed": seed, "n_jobs": n_jobs}, heads, 2.0),
        "stability": _Part(stability_section, {"seed": seed, "n_pairs": n_pairs, "n": n_tokens}, 3 * heads, 0.05),
        "local": _Part(local_section, {}, heads, 1.0),
        "bounds": _Part(bounds_section, {}, heads, 0.2),
        "flow": _Part(flow_section, {"seed": seed}, 3, 2.0),
        "structure": _Part(gradient_flow_section, {"seed": seed}, 2, 4.0),
    }
    if network is None:
        del parts["network"]
    head = {
        "layer": _name(layer),
        "heads": heads,
        "windows": int(layer.hidden_states.shape[0]),
        "tokens_per_window": int(layer.hidden_states.shape[1]),
        "dimension": int(layer.hidden_states.shape[2]),
        "seed": seed,
    }
    told = None if network is None else (network[0].checkpoint.origin, network[0].num_layers, np.asarray(network[1]))
    key = fingerprint(
        version("otattn"), layer.origin, layer.attention, layer.hidden_states, seed, n_pairs, n_tokens, told
    )
    draft = Draft(folder, head, list(parts), key=key, resume=resume)
    with tqdm(
        total=sum(part.steps * part.cost for part in parts.values()), desc="report", disable=not progress,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
    ) as bar:  # fmt: skip
        for name in draft.sections:
            bar.update(parts[name].steps * parts[name].cost)
        alone = effective_n_jobs(n_jobs) == 1
        # the enclosures run their heads in parallel themselves, and take the local constants with the bounds
        apart = [name for name in parts if name not in draft.sections and name not in ("enclosure", "bounds")]
        calls = (delayed(_counted)(parts[name], layer, bar.update if alone else None) for name in apart)
        for name, section in zip(apart, Parallel(n_jobs=n_jobs, return_as="generator")(calls), strict=True):
            draft.add(name, section)
            bar.update(0 if alone else parts[name].steps * parts[name].cost)
        for name in ("enclosure", "bounds"):
            if name not in draft.sections:
                parts[name].options["growth"] = growth_of(draft.sections["local"])
                draft.add(name, _counted(parts[name], layer, bar.update))
    return draft.finish(summarised([draft.sections[name] for name in parts]))


@dataclass(frozen=True)
class _Part:
    """One section: how it is made, its steps, and the seconds that one of them takes (for the bar)."""

    section: Callable[..., Section]
    options: dict[str, Any]
    steps: int
    cost: float


def _counted(part: _Part, layer: SampleLayer, advance: Any) -> Section:
    """A section; ``advance`` is None in another process, where there is no bar."""

    def tick() -> None:
        if advance is not None:
            advance(part.cost)

    return part.section(layer, advance=tick, **part.options)


def _name(layer: SampleLayer) -> str:
    """The origin in one line; the bundled layer's is a page."""
    if "\n" not in layer.origin:
        return layer.origin
    return "The bundled layer, layer 3 of all-MiniLM-L6-v2 on the opening of a public-domain novel"
