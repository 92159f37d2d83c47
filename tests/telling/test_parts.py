"""Kinds and layers from names: real architectures by transformers, and names nobody has seen before."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from ram_trl.telling.parts import ORDER, kinds, layers

SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 32}

SEPARATE = {"attention q", "attention k", "attention v", "attention o"}
GATED = {"mlp gate", "mlp up", "mlp down"}


def names_of(architecture: str, **sizes: int) -> list[str]:
    config = AutoConfig.for_model(architecture, **sizes)
    auto = {"bert": AutoModel, "t5": AutoModelForSeq2SeqLM}.get(architecture, AutoModelForCausalLM)
    with torch.device("meta"):
        return [name for name, _ in auto.from_config(config).named_parameters(remove_duplicate=False)]


@pytest.mark.parametrize(
    ("architecture", "sizes", "expected"),
    [
        ("qwen3", SMALL, {"embeddings", "lm_head", "norms"} | SEPARATE | GATED),
        ("qwen2", SMALL, {"embeddings", "lm_head", "norms", "biases"} | SEPARATE | GATED),
        ("llama", SMALL, {"embeddings", "lm_head", "norms"} | SEPARATE | GATED),
        ("phi3", SMALL | {"pad_token_id": 0},
         {"embeddings", "lm_head", "norms", "attention qkv", "attention o", "mlp gate+up", "mlp down"}),
        ("qwen3_moe", SMALL | EXPERTS,
         {"embeddings", "lm_head", "norms", "router", "expert gate+up", "expert down"} | SEPARATE),
        ("gpt2", GPT2,
         {"embeddings", "lm_head", "norms", "biases", "attention qkv", "attention o", "mlp up", "mlp down"}),
        ("gpt_neox", SMALL,
         {"embeddings", "lm_head", "norms", "biases", "attention qkv", "attention o", "mlp up", "mlp down"}),
        ("bert", SMALL, {"embeddings", "norms", "biases", "mlp up", "mlp down", "pooler.dense"} | SEPARATE),
        ("t5", T5, {"embeddings", "lm_head", "norms", "biases", "mlp up", "mlp down"} | SEPARATE),
    ],
)  # fmt: skip
def test_every_tensor_of_a_known_architecture_has_its_kind(architecture, sizes, expected):
    names = names_of(architecture, **sizes)
    found = kinds(names)
    assert set(found.values()) == expected
    assert found.keys() == set(names)
    assert [kind for kind in ORDER if kind in found.values()] == [
        k for k in dict.fromkeys(found.values()) if k in ORDER
    ]


@pytest.mark.parametrize(
    ("architecture", "sizes", "expected"),
    [
        ("qwen3", SMALL, ["0", "1"]),
        ("qwen3_moe", SMALL | EXPERTS, ["0", "1"]),
        ("gpt2", GPT2, ["0", "1"]),
        ("bert", SMALL, ["0", "1"]),
        ("t5", T5, ["decoder.block.0", "decoder.block.1", "encoder.block.0", "encoder.block.1"]),
    ],
)
def test_every_tensor_of_a_layer_is_in_it_and_no_other(architecture, sizes, expected):
    names = names_of(architecture, **sizes)
    found = layers(names)
    assert list(dict.fromkeys(found.values())) == expected
    outside = {kind for name, kind in kinds(names).items() if name not in found}
    assert outside <= {"embeddings", "lm_head", "norms", "biases", "pooler.dense"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.mlp.experts.5.gate_proj.weight", "expert gate"),
        ("model.layers.3.block_sparse_moe.experts.5.w2.weight", "expert down"),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", "shared expert up"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "router"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "router"),
        ("model.layers.3.mlp.router.bias", "router"),
        ("model.layers.3.self_attn.q_norm.weight", "norms"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "attention kv"),
        ("model.layers.3.linear_attn.A_log", "linear_attn.A_log"),
        ("model.layers.3.mixer.conv1d.weight", "mixer.conv1d"),
        ("a.7.b.8.weight", "a.b"),
        ("weight", "weight"),
        ("bias", "biases"),
        ("7", "other"),
        ("", "other"),
        ("x.²", "x.²"),
        ("..weight", "."),
    ],
)
def test_the_kind_of_a_name(name: str, kind: str):
    assert kinds([name]) == {name: kind}


def test_layers_are_in_the_order_of_their_numbers():
    names = [f"model.layers.{n}.x.{i}.weight" for n in (10, 2, 0) for i in (1, 0)]
    assert list(dict.fromkeys(layers(names).values())) == ["0", "2", "10"]


def test_several_lists_of_layers_are_told_apart_by_what_differs_in_their_names():
    names = ["model.visual.blocks.1.x", "model.text.layers.1.x", "model.text.norm"]
    assert layers(names) == {"model.text.layers.1.x": "text.layers.1", "model.visual.blocks.1.x": "visual.blocks.1"}


def test_without_a_list_of_layers_the_first_number_is_the_layer():
    assert layers(["net.0.a.5", "net.2.a.5", "out"]) == {"net.0.a.5": "0", "net.2.a.5": "2"}
    # In a model with one, other numbers are not layers.
    assert layers(["merger.mlp.0.weight", "h.3.x"]) == {"h.3.x": "3"}


def test_a_model_without_numbers_has_no_layers():
    assert layers(["w", "v"]) == {}
    assert layers([]) == {}


def test_a_dozen_unknown_kinds_are_told_apart_and_more_are_not():
    dozen = [f"layers.{n}.{letter}.weight" for letter in "abcdefghijkl" for n in (0, 1)]
    assert set(kinds([*dozen, "lm_head.weight"]).values()) == {*"abcdefghijkl", "lm_head"}
    assert set(kinds([*dozen, "layers.0.m", "lm_head.weight"]).values()) == {"other", "lm_head"}
