"""What each command of the command line takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["parser"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number of at least ``least``."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, received {text}")
        return value

    return integer


_positive = _at_least(1)


def parser() -> argparse.ArgumentParser:
    """The whole line; ``name`` in what it parses is the command."""
    root = argparse.ArgumentParser(
        prog="otattn",
        description="Measure and certify how stable attention is in the geometry of optimal transport.",
    )
    root.add_argument("--version", action="version", version=f"otattn {_version()}")
    commands = root.add_subparsers(required=True, metavar="command")
    for add in (_report, _stability, _local, _bounds, _depth, _models, _flow, _gradient_flow):
        add(commands)
    return root


def _command(
    commands: Commands, name: str, text: str, *, files: str = "", of_layer: bool = True
) -> argparse.ArgumentParser:
    """A command with what nearly all take; ``files`` are written beside its numbers."""
    sub = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(name=name)
    _of_model(sub, required=name == "depth")
    if of_layer:
        sub.add_argument(
            "--tokens",
            metavar="FILE.npy",
            help="tokens (n, d) or windows (w, n, d); of a model: token indices (n,) or (w, n), in place of a text",
        )
        sub.add_argument(
            "--weights",
            metavar="FILE.npz",
            help="query_weight, key_weight, value_weight, num_heads (and biases, output), or A and V; "
            "the bundled real layer by default",
        )
    sub.add_argument("--seed", type=_at_least(0), default=0, help="seed of every random draw (default 0)")
    sub.add_argument("--quiet", action="store_true", help="no progress bar")
    sub.add_argument("--json", action="store_true", help="print the content as JSON")
    sub.add_argument("--out", required=name == "report", metavar="DIR", help=f"directory for {name}.json{files}")
    return sub


def _of_model(sub: argparse.ArgumentParser, *, required: bool = False) -> None:
    """The model of a command, and the part of it that is asked for."""
    sub.add_argument(
        "--model",
        required=required,
        metavar="PATH_OR_PACKAGE",
        help="a checkpoint (.safetensors, .gguf, .onnx, .npz), the folder of one, or an installed package that holds one",
    )
    sub.add_argument("--layer", type=int, default=None, metavar="K", help="layer of the model, from 0 (default 0)")
    sub.add_argument("--head", type=int, default=None, metavar="H", help="only this head of the layer, from 0")
    sub.add_argument(
        "--text", metavar="FILE", help="UTF-8 text that the model reads from its start (the bundled passage by default)"
    )
    sub.add_argument("--heads", type=_positive, default=None, help="number of heads where no configuration tells it")


def _report(commands: Commands) -> None:
    text = "The main job: one report on a layer, or on a model and one of its layers, with pictures."
    report = _command(commands, "report", text, files=", .html, .md and PNGs")
    report.add_argument("--pairs", type=_positive, default=24, help="pairs of measures a head and metric (default 24)")
    report.add_argument("--resume", action="store_true", help="go on with a report that was stopped in --out")
    report.add_argument("--n-jobs", type=int, default=1, help="sections at a time, -1 for all cores (default 1)")


def _stability(commands: Commands) -> None:
    text = "Stability constants W_p(F(mu), F(nu)) / W_p(mu, nu) of each head."
    stability = _command(commands, "stability", text)
    stability.add_argument("--p", type=float, default=2.0, help="order of the distance, in [1, inf] (default 2)")
    stability.add_argument("--pairs", type=_positive, default=50, help="number of pairs (default 50)")
    stability.add_argument("--n", type=_positive, default=32, help="tokens a measure (default 32)")
    stability.add_argument("--masked", action="store_true", help="causal attention in the conditional distance")


def _local(commands: Commands) -> None:
    text = "Local Lipschitz constants of each head at its tokens."
    local = _command(commands, "local", text, files=" (and local.png with --adversarial)")
    local.add_argument("--n", type=_positive, nargs="+", default=None, help="numbers of tokens (default 8 16 ... 128)")
    local.add_argument("--adversarial", action="store_true", help="also search adversarial tokens of the same norm")


def _bounds(commands: Commands) -> None:
    text = "Published and own bounds against n, with witnessed lower bounds and the ratio."
    bounds = _command(commands, "bounds", text, files=" and bounds.png")
    bounds.add_argument("--radius", type=float, default=None, help="token radius R (default: largest token norm)")
    bounds.add_argument("--n", type=_positive, nargs="+", default=[8, 64, 512], help="numbers of tokens")
    bounds.add_argument("--effort", choices=("fast", "deep"), default="fast", help="deep allows branch and bound")


def _depth(commands: Commands) -> None:
    text = "Norms of the first 1, 2, ... layers of a model at real tokens, against products of the layers' own norms."
    depth = _command(commands, "depth", text, files=" and depth.png", of_layer=False)
    depth.add_argument("--tokens", metavar="FILE.npy", help="token indices (n,) or (w, n), in place of a text")
    depth.add_argument("--other", metavar="FILE", help="a second text: distances of the two, layer by layer")
    depth.add_argument("--n", type=_positive, default=32, help="number of tokens (default 32)")
    depth.add_argument("--layers", type=_positive, default=None, help="only the first so many layers")
    depth.add_argument("--composed", action="store_true", help="leave out partial products that start later")
    depth.add_argument("--splitting", action="store_true", help="also the splitting part")


def _models(commands: Commands) -> None:
    text = "What a checkpoint holds: its family, its tensors, what is missing, and whether it can be opened."
    models = _command(commands, "models", text, of_layer=False)
    models.add_argument("path", metavar="PATH", nargs="?", help="the same as --model PATH")


def _flow(commands: Commands) -> None:
    text = "Tokens that follow the layer in depth: stability in time, radius, clusters."
    flow = _command(commands, "flow", text, files=" and flow.png")
    flow.add_argument("--n", type=_positive, default=16, help="tokens of the first window (default 16)")
    flow.add_argument("--t-end", type=float, default=1.0, help="length of the time span (default 1)")
    flow.add_argument("--size", type=float, default=1e-3, help="displacement over the largest norm (default 1e-3)")


def _gradient_flow(commands: Commands) -> None:
    text = "Which variant is a gradient flow, of which energy: defects."
    gradient = _command(commands, "gradient-flow", text, files=" and gradient-flow.png")
    gradient.add_argument("--dim", type=_positive, default=3, help="dimension of the random tokens (default 3)")
    gradient.add_argument("--n", type=_positive, default=8, help="number of random tokens (default 8)")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("otattn")
    except PackageNotFoundError:
        return "unknown"
