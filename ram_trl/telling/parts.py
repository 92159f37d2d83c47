"""
The parts of a model, told from the names of its tensors: what a tensor does (its kind) and which layer it is in.

Names differ between architectures, so kinds are found by the words in them; a tensor whose words say nothing keeps its
own name, without numbers, as its kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile

LAYERS = re.compile(r"(.*_)?(layers?|blocks?|resblocks|h|blk)")
"""What a list of layers is called."""

ANYWHERE = {
    "q": "q_proj wq to_q q_lin query_proj q_a_proj q_b_proj",
    "k": "k_proj wk to_k k_lin key_proj",
    "v": "v_proj wv to_v v_lin value_proj",
    "kv": "kv_proj kv_a_proj_with_mqa kv_b_proj",
    "qkv": "qkv_proj qkv wqkv c_attn query_key_value",
    "o": "o_proj",
}
IN_ATTENTION = {
    "q": "q query attn_q",
    "k": "k key attn_k",
    "v": "v value attn_v",
    "qkv": "in_proj in_proj_weight",
    "o": "o out out_proj dense c_proj proj wo to_out out_lin output",
}
IN_MLP = {
    "gate": "gate_proj w1 wi_0",
    "up": "up_proj w3 wi_1 wi fc1 c_fc lin1 linear1 fc_in dense_h_to_4h intermediate.dense",
    "gate+up": "gate_up_proj",
    "down": "down_proj w2 wo fc2 c_proj lin2 linear2 fc_out dense_4h_to_h output.dense",
}
"""What the matrices of attention and MLP are called, by what they do."""

ATTENTION = [f"attention {role}" for role in ("q", "k", "v", "kv", "qkv", "o")]
MLP = [f"{where} {role}" for where in ("mlp", "shared expert", "expert") for role in IN_MLP]
ORDER = ["embeddings", *ATTENTION, *MLP, "router", "norms", "biases", "lm_head"]
"""All kinds that are known, in the order they are shown."""

OTHER = "other"
MOST_UNKNOWN = 12


def kinds(names: Iterable[str]) -> dict[str, str]:
    """
    The kind of every tensor.

    Args:
        names (`Iterable[str]`):
            Names of tensors.

    Returns:
        `dict[str, str]`: by name, one of `ORDER`; else the name without layer and numbers, or `other` for all of
        these if there are more than 12; in the order kinds are shown.
    """
    known = {name: known_kind(name) for name in names}
    own = {name: own_kind(name) for name, kind in known.items() if kind is None}
    if len(set(own.values())) > MOST_UNKNOWN:
        own = dict.fromkeys(own, OTHER)
    found = {name: kind or own[name] for name, kind in known.items()}
    place = {kind: at for at, kind in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda item: (place.get(item[1], len(place)), item[1], item[0])))


def layers(names: Iterable[str]) -> dict[str, str]:
    """
    The layer of every tensor that is in one.

    Args:
        names (`Iterable[str]`):
            Names of all tensors of a model.

    Returns:
        `dict[str, str]`: by name, in the order of the layers, the number; with the list's name before it where the
        model has several (`encoder.block.3`). The number is the first in the name that follows a list of layers
        (`layers`, `h`, `blocks`, …); in a model without such lists, the first number.
    """
    split = {name: name.split(".") for name in names}
    at = {name: _layer_at(words) for name, words in split.items()}
    if all(place is None for place in at.values()):
        at = {name: next((i for i, w in enumerate(words) if w.isdecimal()), None) for name, words in split.items()}
    found = {name: (split[name][:i], int(split[name][i])) for name, i in at.items() if i is not None}
    # What all lists' names begin with tells nothing; with a single list that is all of its name.
    same = (len(set(words)) == 1 for words in zip(*(stack for stack, _ in found.values()), strict=False))
    common = sum(1 for _ in takewhile(bool, same))
    return {
        name: ".".join([*stack[common:], str(number)])
        for name, (stack, number) in sorted(found.items(), key=lambda item: (item[1], item[0]))
    }


def known_kind(name: str) -> str | None:
    """One of `ORDER`, or `None` if the words in the name say nothing."""
    words = [word for word in name.lower().split(".") if not word.isdecimal()]
    ends_in_bias = bool(words) and words[-1].endswith("bias")
    if words and words[-1] in ("weight", "bias"):
        words.pop()
    if not words:
        return "biases" if ends_in_bias else None
    module, parents = words[-1], words[:-1]
    if "norm" in module or re.fullmatch(r"ln(_\w+)?", module):
        return "norms"
    if module in ("lm_head", "embed_out"):
        return "lm_head"
    if any("embed" in word for word in words) or module in ("wte", "wpe", "shared"):
        return "embeddings"
    if "router" in words or "gate" in words or module == "shared_expert_gate":
        return "router"
    if ends_in_bias or module.endswith("bias"):
        return "biases"
    in_attention = any("attn" in word or "attention" in word for word in parents)
    role = _role(words, ANYWHERE) or (_role(words, IN_ATTENTION) if in_attention else None)
    if role:
        return f"attention {role}"
    role = None if in_attention else _role(words, IN_MLP)
    return f"{_where(words)} {role}" if role else None


def own_kind(name: str) -> str:
    """A name without its layer, numbers and a final `weight`."""
    words = name.split(".")
    at = _layer_at(words)
    kept = [word for word in words[0 if at is None else at + 1 :] if not word.isdecimal()]
    if len(kept) > 1 and kept[-1] == "weight":
        kept.pop()
    return ".".join(kept) or OTHER


def _layer_at(words: Sequence[str]) -> int | None:
    """Position of the number of the layer in a name."""
    return next(
        (at + 1 for at, (of, number) in enumerate(pairwise(words)) if number.isdecimal() and LAYERS.fullmatch(of)),
        None,
    )


def _role(words: Sequence[str], roles: dict[str, str]) -> str | None:
    endings = {words[-1], ".".join(words[-2:])}
    return next((role for role, called in roles.items() if endings & set(called.split())), None)


def _where(words: Sequence[str]) -> str:
    if any("shared_expert" in word for word in words):
        return "shared expert"
    return "expert" if any(word.startswith("expert") for word in words) else "mlp"
