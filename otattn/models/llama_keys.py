"""Rules of the Llama family for rotary frequencies, scales and biases."""

from __future__ import annotations

from typing import Any

from otattn.models.keys import Facts, Rule, neutral

__all__ = ["attention_scale", "gguf_scaling", "has_biases", "one_base", "rotary_options"]

_PLAIN = "of the plain kind (rope_type 'default', or 'linear' with factor 1)"


def rotary_options(value: Any, facts: Facts) -> str | None:
    """Rotary options in all their spellings: neutral ones pass."""
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        return _PLAIN
    kinds = {value[key] for key in ("rope_type", "type") if isinstance(value.get(key), str)}
    named = [key for key in ("rope_type", "type") if value.get(key) is not None]
    if len(kinds) > 1 or (named and not kinds) or not kinds <= {"default", "linear"}:
        return _PLAIN
    if kinds == {"linear"} and value.get("factor") is None:
        return _PLAIN
    rules = {
        "factor": neutral(1.0),
        "partial_rotary_factor": neutral(1.0),
        "attention_factor": neutral(1.0),
        "rope_theta": one_base,
    }
    for key, inner in value.items():
        # the length of training only counts where something is scaled
        if key in ("rope_type", "type", "original_max_position_embeddings") or inner is None or inner is False:
            continue
        required = rules[key](inner, facts) if key in rules else "absent"
        if required is not None:
            return f"{_PLAIN}, and its {key} {required}"
    return None


def one_base(value: Any, facts: Facts) -> str | None:
    """The base, which may stand in three places, must be the same everywhere."""
    given = facts["given"]
    inner = [given.get(key) for key in ("rope_parameters", "rope_scaling")]
    others = [given.get("rope_theta"), *(part.get("rope_theta") for part in inner if isinstance(part, dict))]
    others = [other for other in others if other is not None]
    return None if value is None or all(other == value for other in others) else f"one value, not {others}"


def has_biases(part: str) -> Rule:
    """True when all linear maps of the part have biases, False when none has."""

    def rule(value: Any, facts: Facts) -> str | None:
        held = facts[f"{part}_biases"]
        if value is None or (isinstance(value, bool) and held == {value}):
            return None
        return f"{held == {True}}, as there are {'' if True in held else 'no '}biases of this part among the tensors"

    return rule


def gguf_scaling(value: Any, facts: Facts) -> str | None:
    """No scaling; "linear" is none when its factor is 1."""
    factor = facts["given"].get("llama.rope.scaling.factor", facts["given"].get("llama.rope.scale_linear"))
    return None if value in (None, "", "none") or (value == "linear" and factor == 1.0) else "'none' (not scaled)"


def attention_scale(value: Any, facts: Facts) -> str | None:
    """0 and 1 / sqrt(k) are the plain scale."""
    plain = facts["width"] ** -0.5
    close = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value - plain) <= 1e-6 * plain
    return None if value is None or value == 0.0 or close else f"1 / sqrt({facts['width']})"
