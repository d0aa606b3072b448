"""Keys of configurations and metadata: each is used, compared with the tensors, neutral, harmless, or refused by name.

A key that nobody here knows may change the map: it is refused, unless its value says that it is off (None, False, empty).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "COMMON",
    "HARMLESS",
    "Facts",
    "Field",
    "Keys",
    "Rule",
    "every",
    "frequencies",
    "has_biases",
    "minus_infinity",
    "neutral",
    "number",
    "numbered",
    "ones",
    "plain_activation",
    "same",
    "short",
    "sizes",
    "triangle",
    "whole",
    "zeros",
]

Facts = Mapping[str, Any]
"""Numbers that the tensors tell, by name (``dim``, ``layers``, ``hidden``, ...)."""
Rule = Callable[[Any, Facts], str | None]
"""Of a value and the facts: what the value must be, when it is not that."""

_WITHOUT_INFLUENCE = {
    "names, versions and ways to compute the same": """
        _name_or_path name_or_path _commit_hash transformers_version transformers.js_config tokenizer_class
        model_max_length attn_implementation _attn_implementation _attn_implementation_internal
        _attn_implementation_autoset torchscript tf_legacy_loss use_cache chunk_size_feed_forward
        gradient_checkpointing pretraining_tp reorder_and_upcast_attn""",
    "precision, which is float64 here": "torch_dtype dtype use_bfloat16",
    "which outputs there are": """
        return_dict return_dict_in_generate output_attentions output_hidden_states output_past output_scores""",
    "initial values": "initializer_range initializer_factor init_std initializer_cutoff_factor",
    "dropout, off in evaluation": """
        attention_dropout attention_probs_dropout_prob hidden_dropout hidden_dropout_prob classifier_dropout
        resid_pdrop embd_pdrop attn_pdrop summary_first_dropout summary_last_dropout qa_dropout seq_classif_dropout
        layerdrop embedding_dropout mlp_dropout""",
    "tokens": """
        bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id
        decoder_start_token_id forced_bos_token_id forced_eos_token_id bos_token eos_token pad_token unk_token prefix""",
    "what comes after the last layer": """
        tie_word_embeddings id2label label2id num_labels problem_type task_specific_params finetuning_task
        summary_activation summary_proj_to_labels summary_type summary_use_proj pooler_fc_size
        pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type pooler_output_size pooler_act
        classifier_activation classifier_bias classifier_pooling decoder_bias final_logit_softcapping""",
    "generation": """
        max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
        exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""",
}
HARMLESS = frozenset(key for keys in _WITHOUT_INFLUENCE.values() for key in keys.split())
"""Keys on which the hidden states of a window do not depend."""


@dataclass(frozen=True)
class Field:
    """A number that is read from the configuration: its spellings, and the value when none is there.

    A default may be a function of the facts. ``off`` says that None in the configuration means that there is no such thing.
    """

    keys: tuple[str, ...]
    default: Any = None
    off: bool = False


@dataclass(frozen=True)
class Keys:
    """What a family does with each key.

    Attributes
    ----------
    fields : dict of Field
        Read into the model.
    rules : dict of Rule
        Checked.
    harmless : set of str
        Without influence on the hidden states.
    namespaces : tuple of str
        Prefixes whose keys are all harmless (GGUF: "tokenizer.").
    """

    fields: Mapping[str, Field]
    rules: Mapping[str, Rule] = field(default_factory=dict)
    harmless: frozenset[str] = HARMLESS
    namespaces: tuple[str, ...] = ()

    def but(
        self, *, fields: Mapping[str, Field] | None = None, rules: Mapping[str, Rule] | None = None, harmless: str = ""
    ) -> Keys:
        """The same with other fields and rules under these names, and more keys without influence."""
        return replace(
            self,
            fields={**self.fields, **(fields or {})},
            rules={**self.rules, **(rules or {})},
            harmless=self.harmless | frozenset(harmless.split()),
        )

    def check(self, given: Mapping[str, Any], facts: Facts, origin: str, read: Collection[str] = ()) -> None:
        """A ValueError that names the first key which changes the map, or contradicts the tensors.

        ``read`` are further keys that are used: of positions and windows.
        """
        used = {key for entry in self.fields.values() for key in entry.keys} | set(read)
        for key, value in given.items():
            rule = self.rules.get(key)
            if rule is not None:
                required = rule(value, facts)
                if required is not None:
                    raise ValueError(
                        f"{key} in the configuration of {origin} must be {required}, received {short(value)}: "
                        "anything else is another map than is computed here, or the configuration of another model."
                    )
            elif not (key in used or key in self.harmless or str(key).startswith(self.namespaces) or _off(value)):
                raise ValueError(
                    f"the key {key!r} in the configuration of {origin} is not known here, received {short(value)}; it may "
                    "change the map: remove it from the configuration (config=) if the hidden states do not depend on it."
                )

    def read(self, given: Mapping[str, Any], name: str, origin: str) -> Any:
        """The value of a field; all spellings that are there must agree."""
        entry = self.fields[name]
        found = {key: given[key] for key in entry.keys if given.get(key) is not None}
        values = list(found.values())
        off = [key for key in entry.keys if key in given and given[key] is None]
        if off and not values and entry.off:
            return None
        if off and not values and entry.default is not None:
            raise ValueError(
                f"{off[0]} in the configuration of {origin} must have a value, received None; leave it out."
            )
        if any(value != values[0] for value in values[1:]):
            raise ValueError(f"the configuration of {origin} must give one value for {name}, received {short(found)}.")
        return values[0] if values else entry.default


def _off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def short(value: Any) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def same(fact: str, *, beyond: int = 0) -> Rule:
    """The number that the tensors tell under this name, less ``beyond``; None counts as not given."""

    def rule(value: Any, facts: Facts) -> str | None:
        known = facts.get(fact)
        known = known if known is None else known - beyond
        if value is None or (not isinstance(value, bool) and isinstance(value, (int, np.integer)) and value == known):
            return None
        return f"{known}, as the tensors have it" if known is not None else "absent: no tensor tells it"

    return rule


def sizes(**keys: str) -> dict[str, Rule]:
    """Rules that keys tell what the tensors tell: ``sizes(d="hidden_size n_embd")``."""
    return {key: same(fact) for fact, names in keys.items() for key in names.split()}


def has_biases(part: str) -> Rule:
    """True when all linear maps of the part ("attention", "mlp", "qkv", "linear") have biases, False when none has."""

    def rule(value: Any, facts: Facts) -> str | None:
        held = facts["biases"][part]
        if value is None or (isinstance(value, bool) and held == {value}):
            return None
        return f"{held == {True}}, as there are {'' if True in held else 'no '}biases of this part among the tensors"

    return rule


def plain_activation(name: Any) -> Any:
    """Without the "gated-" of T5, whose gated GELU is the approximate one."""
    if isinstance(name, str) and name.startswith("gated-"):
        return "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    return name


def _equal(a: Any, b: Any) -> bool:
    """1 is 1.0, but not True."""
    return isinstance(a, bool) == isinstance(b, bool) and type(a == b) is bool and a == b


def neutral(*values: Any) -> Rule:
    """One of these values. None is one, too, unless the key must be on: what reads it takes None as off."""
    allowed = values if any(v is True for v in values) else (*values, None)

    def rule(value: Any, _: Facts) -> str | None:
        if any(_equal(value, v) for v in allowed):
            return None
        return " or ".join(repr(v) for v in allowed)

    return rule


def every(pattern: str) -> Rule:
    """A text, or a list of texts, that match a regular expression."""

    def rule(value: Any, _: Facts) -> str | None:
        items = value if isinstance(value, list) else [value]
        if value is None or all(isinstance(item, str) and re.fullmatch(pattern, item) for item in items):
            return None
        return f"of the form {pattern}"

    return rule


COMMON: dict[str, Rule] = {
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size"), neutral(False)),
    # off would change what the hidden states are
    **dict.fromkeys(("use_rope", "rope"), neutral(True)),
    "tie_last_hidden_states": neutral(True, None),
    "pruned_heads": neutral({}),
    "quantization_config": neutral(),
}
"""Rules of every configuration file."""


def whole(value: Any, name: str, *, most: int = 1 << 30) -> int:
    """A positive integer from a configuration."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= most:
        raise ValueError(f"{name} must be an integer from 1 to {most}, received {value!r}; check the configuration.")
    return int(value)


def number(value: Any, name: str, *, least: float = 0.0, most: float = 1e12) -> float:
    """A finite number from a configuration."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not least <= value <= most:
        raise ValueError(
            f"{name} must be a number from {least:g} to {most:g}, received {value!r}; check the configuration."
        )
    return float(value)


_STORED_DIGITS = 2.0**-6
"""Relative: frequencies that were stored in half precision (bfloat16: 2^-8); any scaling is off by far more."""


def triangle(values: NDArray[np.float64], _: Facts) -> str | None:
    """The causal mask."""
    n = values.shape[-1] if values.ndim else 0
    square = values.ndim >= 2 and values.size == n * n
    return None if square and np.array_equal(values.reshape(n, n), np.tri(n)) else "ones up to the diagonal"


def minus_infinity(values: NDArray[np.float64], _: Facts) -> str | None:
    """What masked logits are set to."""
    return None if values.size == 1 and values.item() <= -1e4 else "one number of at most -1e4"


def frequencies(values: NDArray[np.float64], facts: Facts) -> str | None:
    """Rotary frequencies."""
    expected = np.array(facts["rotary"].frequencies)
    close = values.shape == expected.shape and np.allclose(values, expected, rtol=_STORED_DIGITS, atol=1e-7)
    return None if close else "the frequencies base^(-2t/r), scaled as the configuration says"


def ones(values: NDArray[np.float64], _: Facts) -> str | None:
    """Factors of frequencies that change none."""
    return None if (values == 1.0).all() else "ones (no scaled frequencies)"


def numbered(values: NDArray[np.float64], _: Facts) -> str | None:
    """Positions."""
    return None if np.array_equal(values.ravel(), np.arange(values.size)) else "0, 1, 2, ..."


def zeros(values: NDArray[np.float64], _: Facts) -> str | None:
    """Types of tokens."""
    return "zeros" if values.any() else None
