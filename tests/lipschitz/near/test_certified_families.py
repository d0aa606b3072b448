"""Each model family has certified neighbourhoods of its tokens; what is not made of known parts is refused by name."""

import numpy as np
import pytest
from climbing import climbed, norm

import otattn as oa
from otattn.attention.scores import GatedAttention
from otattn.models.load import FAMILIES

SIZES = {"gpt_neox": {"dim": 16, "heads": 1}, "modernbert": {"layers": 2}}
"""Rotary turns of a quarter of a head need heads of 16; the second layer of ModernBERT has the window."""
CERTIFIED = (
    *(
        "bert",
        "roberta",
        "distilbert",
        "electra",
        "gpt2",
        "opt",
        "gpt_neox",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
    ),
    *("modernbert", "vit", "t5", "gpt_oss"),
)


def drawn(family):
    """The map of an untrained model of one layer, with weights large enough to bend it, and tokens."""
    options = {"layers": 1, "dim": 8, "heads": 2, "hidden": 8, "vocab": 8, "length": 8, "spread": 0.3}
    model = oa.models.random(family, rng=1, **options | SIZES.get(family, {}))
    return model.map(), np.random.default_rng(2).standard_normal((3, model.map().in_dim))


LIKE_OTHERS = {"roberta", "distilbert", "electra", "mistral", "qwen2"}
"""Their blocks are those of BERT and Llama."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in CERTIFIED]
)
def test_a_family_certifies(family):
    network, X = drawn(family)
    here = norm(network, X)
    tiny = oa.certify(network, X, radius=1e-12)
    assert here * (1 - 1e-10) <= tiny.value <= here * (1 + 1e-5)
    assert tiny.details["how"] == "margins"
    ball = oa.certified_radius(network, X, factor=1.5, tol=1.0)
    assert 1e-8 < ball.domain.radius < 1.0
    found = climbed(network, X, ball.domain.radius * len(X) ** 0.5, np.random.default_rng(3), starts=2, steps=5)
    assert 0.8 * here < found <= ball.value <= 1.5 * ball.details["norm"]


def test_another_part_is_refused_by_name():
    """In the middle of a family's layers."""
    network, X = drawn("gemma2")
    gated = GatedAttention(oa.SoftmaxAttention(np.eye(8), np.eye(8)), np.eye(8))
    with pytest.raises(ValueError, match="received GatedAttention"):
        oa.certify(oa.Compose(network, gated), X, radius=1e-6)


def test_no_family_is_left_out():
    kinds = {name for family in FAMILIES for name in family.model_types}
    assert set(CERTIFIED) == kinds - {"deit", "xlm-roberta"}  # the blocks of ViT and RoBERTa
