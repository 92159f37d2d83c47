"""Hints from tensor names."""

from __future__ import annotations

import pytest

from ram_trl.weights.naming import hints, mixed_experts

NAMES = ["model.embed_tokens.weight", "model.layers.0.q_proj.weight", "lm_head.weight"]
EXPERTS = ["m.experts.0.gate_proj.weight", "m.experts.0.up_proj.weight", "m.experts.1.gate_proj.weight"]
FUSED = ["m.experts.gate_up_proj", "m.experts.down_proj"]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "policy."])
def test_a_prefix_is_told_with_whose_it_is_and_how_often(prefix):
    wrapped = [prefix + name for name in NAMES]
    (told,) = hints(NAMES, wrapped)
    assert told.startswith(f"3 of the agent's names would fit without '{prefix}'")
    (told,) = hints(wrapped, NAMES)
    assert told.startswith(f"3 of the base's names would fit without '{prefix}'")


def test_wrappers_around_each_other_are_each_told():
    told = hints(NAMES, [f"module._orig_mod.{name}" for name in NAMES])
    assert [any(f"'{prefix}'" in line for line in told) for prefix in ("module.", "_orig_mod.")] == [True, True]


def test_a_text_model_and_its_vision_model_are_told():
    vision = ["model.language_model.layers.0.q_proj.weight", "model.visual.patch.weight"]
    (told,) = hints(vision, NAMES)
    assert "1 of the base's names would fit without 'language_model.'" in told


def test_names_that_fit_or_are_wrong_in_other_ways_give_no_hint():
    assert hints(NAMES, NAMES) == []
    assert hints(NAMES, NAMES[1:]) == []
    assert hints(NAMES, [*NAMES, "score.weight", "module.score.weight"]) == []
    wrapped = [f"module.{name}" for name in NAMES]
    assert hints(wrapped, wrapped) == []


def test_experts_fused_against_one_by_one_are_told_both_ways():
    assert "stored fused here, one by one in the base" in hints(EXPERTS, FUSED)[0]
    assert "stored one by one here, fused in the base" in hints(FUSED, EXPERTS)[0]
    assert hints(EXPERTS, EXPERTS[:2]) == []


@pytest.mark.parametrize("extra", ["m.experts.gate_up_proj", "m.experts.gate_proj.weight100", "m.experts.w1.weight"])
def test_both_kinds_in_one_checkpoint_are_told_by_layer(extra):
    assert mixed_experts(EXPERTS) == []
    assert mixed_experts(FUSED) == []
    (told,) = mixed_experts([*EXPERTS, extra, "n.experts.gate_up_proj", "m.shared_experts.up_proj.weight"])
    assert told.startswith("'m.experts' is stored both")
