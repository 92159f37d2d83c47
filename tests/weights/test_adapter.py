"""An adapter as a store: for every variant the weights its agent computes with, or a refusal that names the reason."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ram_trl import MergeConfig, MergeInputError, merge, probe
from ram_trl.weights import Span, edits, entries
from ram_trl.weights.adapter import OpenedAdapter, live_adapter, open_adapter
from ram_trl.weights.checkpoint import open_checkpoint
from ram_trl.weights.memory import StateDict
from tests import lora, models

ALONE = MergeConfig(epsilon=0)
AVERAGE = MergeConfig(method="average")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def untied():
    return lora.qwen3(tied=False)


def biased():
    return lora.llama(bias=True)


VARIANTS = {
    "plain": (lora.qwen3, {}),
    "square": (lora.llama, {}),
    "rslora": (lora.llama, {"use_rslora": True}),
    "patterns": (
        lora.qwen3,
        {
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 7},
            "alpha_pattern": {"v_proj": 3, "layers.0.*o_proj": 16},
        },
    ),
    "rslora_patterns": (lora.qwen3, {"use_rslora": True, "rank_pattern": {"up_proj": 9}}),
    "dora": (lora.llama, {"use_dora": True}),
    "dora_rslora": (lora.qwen3, {"use_dora": True, "use_rslora": True}),
    "lora_bias": (biased, {"lora_bias": True}),
    "bias_all": (biased, {"bias": "all"}),
    "bias_lora_only": (biased, {"bias": "lora_only", "target_modules": ["q_proj", "up_proj"]}),
    "conv1d": (lora.gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "conv1d_flag_off": (lora.gpt2, {"target_modules": ["c_attn", "c_proj"]}),
    "conv1d_dora": (lora.gpt2, {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "embedding": (untied, {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding_dora": (untied, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "head": (lora.llama, {"target_modules": ["lm_head", "q_proj"]}),
    "modules_to_save": (untied, {"modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]}),
    "block_to_save": (lora.llama, {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}),
    "tokens": (lora.qwen3, {"trainable_token_indices": [5, 2, 60]}),
    "tokens_untied": (untied, {"trainable_token_indices": {"embed_tokens": [0, 9], "lm_head": [3]}}),
    "tied_targets": (lora.qwen3, {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}),
    "tied_modules": (lora.qwen3, {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}),
    "some_layers": (lora.llama, {"layers_to_transform": [1], "layers_pattern": "layers"}),
    "gaussian": (lora.llama, {"init_lora_weights": "gaussian"}),
    "orthogonal": (lora.llama, {"init_lora_weights": "orthogonal"}),
    "mica": (lora.llama, {"init_lora_weights": "mica"}),
    "experts": (lora.qwen3_moe, {"r": 2, "target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "one_of_the_experts": (
        lora.qwen3_moe,
        {"r": 3, "target_modules": ["q_proj"], "target_parameters": EXPERTS[1:], "use_rslora": True},
    ),
    "expert_patterns": (
        lora.qwen3_moe,
        {
            "r": 3,
            "target_modules": [],
            "target_parameters": EXPERTS[::-1],
            "rank_pattern": {"experts.down_proj": 2},
            "alpha_pattern": {"gate_up_proj": 9},
        },
    ),
    "square_experts": (lora.mixtral, {"r": 2, "target_modules": ["k_proj"], "target_parameters": EXPERTS}),
    "transposed_experts": (
        lora.gpt_oss,
        {"r": 2, "target_modules": ["k_proj"], "target_parameters": [*EXPERTS, "experts.gate_up_proj_bias"]},
    ),
    "experts_to_save": (lora.qwen3_moe, {"target_modules": ["q_proj"], "modules_to_save": ["experts"]}),
    "router": (lora.qwen3_moe, {"target_modules": ["q_proj"], "target_parameters": ["gate.weight"]}),
    "parameter_of_conv1d": (
        lora.gpt2,
        {"target_modules": [], "target_parameters": ["c_proj.weight", "c_attn.weight"]},
    ),
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    lora.llama().save_pretrained(tmp_path / "base")
    return tmp_path


def opened(folder: Path, agent: str = "tool") -> OpenedAdapter:
    return open_adapter(folder / agent, open_checkpoint(folder / "base", "base").store, f"agent '{agent}'")


def refusal(folder: Path, agent: str = "tool") -> str:
    problems = opened(folder, agent).problems
    assert problems
    assert all(problem.where == f"agent '{agent}'" for problem in problems)
    return "\n".join(map(str, problems))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("variant", VARIANTS)
def test_agent_alone_computes_what_peft_computes(tmp_path, variant):
    """TRAPS 3.3, 3.4, 3.6, 3.7, 3.11, 3.14: the right scale, orientation and place, saved and opened again."""
    make, settings = VARIANTS[variant]
    make().save_pretrained(tmp_path / "base")
    trained = lora.logits(lora.adapter(tmp_path / "base", tmp_path / "tool", **settings))
    base, agents = lora.opened(tmp_path / "base", {"tool": tmp_path / "tool"})

    lora.save_model(tmp_path / "base", lora.merged(base, agents, ALONE), tmp_path / "out")

    found = lora.of_folder(tmp_path / "out")
    assert lora.distance(found, trained) < 1e-5
    assert lora.distance(found, lora.of_agent(tmp_path / "base", tmp_path / "tool")) < 1e-5
    assert lora.distance(found, lora.of_folder(tmp_path / "base")) > 1e-3


@pytest.mark.parametrize("variant", ["plain", "dora", "embedding", "tokens", "conv1d", "experts", "lora_bias"])
def test_live_adapter_is_the_saved_one(tmp_path, variant):
    make, settings = VARIANTS[variant]
    make().save_pretrained(tmp_path / "base")
    model = lora.adapter(tmp_path / "base", tmp_path / "tool", **settings)
    base, agents = lora.opened(tmp_path / "base", {"tool": tmp_path / "tool"})
    live = live_adapter(model, "default", base, "agent 'tool'")
    assert not live.problems
    for name in base.names():
        span = Span(name, 0, entries(base, name))
        assert torch.equal(span.of(live.store), span.of(agents["tool"]))


@pytest.mark.parametrize("variant", ["plain", "dora", "conv1d_dora", "embedding", "tokens", "experts", "lora_bias"])
def test_any_cut_and_any_number_of_threads_give_the_same_bits(tmp_path, variant, monkeypatch):
    monkeypatch.setattr(edits, "BLOCK", 200)
    make, settings = VARIANTS[variant]
    make().save_pretrained(tmp_path / "base")
    for seed, agent in enumerate(("tool", "code")):
        lora.adapter(tmp_path / "base", tmp_path / agent, seed=seed, **settings)
    folders = {"tool": tmp_path / "tool", "code": tmp_path / "code"}
    results = []
    for how in ({"chunk": 1 << 30, "threads": 1}, {"chunk": 97, "threads": 3}, {"chunk": 501, "threads": 2}):
        base, agents = lora.opened(tmp_path / "base", folders)
        results.append(lora.merged(base, agents, MergeConfig(top=0.2, r=0.2), **how))
    for other in results[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in results[0].items())


def test_shards_give_the_same_bits_as_the_whole():
    generator = torch.Generator().manual_seed(0)
    low_rank = edits.LowRank(torch.randn(2, 333, 5, generator=generator), torch.randn(2, 5, 217, generator=generator))
    whole = low_rank.delta(0, 2 * 333 * 217)
    for world in (2, 3, 7):
        cuts = [rank * len(whole) // world for rank in range(world + 1)]
        shards = [low_rank.delta(start, stop) for start, stop in pairwise(cuts)]
        assert torch.equal(torch.cat(shards), whole)


def test_factors_in_16_bits_are_multiplied_in_float32(llama):
    """TRAPS 3.16: one rounding at the end, of the sum."""
    lora.adapter(llama / "base", llama / "tool")
    rewrite(llama / "tool", lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    _, agents = lora.opened(llama / "base", {"tool": llama / "tool"})
    saved = load_file(llama / "tool" / "adapter_model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    a, b = (saved[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
    weights = load_file(llama / "base" / "model.safetensors")[f"{name}.weight"].double()
    exact = (weights + b @ a * 1.5).view(-1)
    found = agents["tool"].read(f"{name}.weight", 0, exact.numel())
    unit = torch.finfo(torch.float32).eps * exact.abs().clamp(min=float(weights.abs().mean()))
    assert bool(((found.double() - exact).abs() <= 2 * unit).all())


def test_average_of_two_is_the_mean_of_their_updates(llama):
    """TRAPS 3.1, 3.4: other ranks, other targets, in ΔW space."""
    lora.adapter(llama / "base", llama / "tool", seed=1, r=4)
    lora.adapter(
        llama / "base", llama / "code", seed=2, r=8, target_modules=["q_proj", "up_proj", "lm_head"], use_rslora=True
    )
    base, agents = lora.opened(llama / "base", {"tool": llama / "tool", "code": llama / "code"})
    result = lora.merged(base, agents, AVERAGE)
    updates = [lora.update(base, agent) for agent in agents.values()]
    mean = {name: (updates[0][name].double() + updates[1][name].double()) / 2 for name in base.names()}
    weights = {name: Span(name, 0, entries(base, name)).of(base) for name in base.names()}
    assert lora.far(result, {n: weights[n].double() + mean[n] for n in mean}) < 1e-7
    assert lora.far({n: result[n].view(-1).double() - weights[n].double() for n in mean}, mean) < 1e-6


def test_negative_weight_is_exact_negation(llama):
    """TRAPS 3.1: at W = 0, where sums do not round."""
    with_zeros = lora.llama()
    with torch.no_grad():
        for parameter in with_zeros.parameters():
            parameter.zero_()
    with_zeros.save_pretrained(llama / "zero")
    lora.adapter(llama / "zero", llama / "tool")
    base, agents = lora.opened(llama / "zero", {"tool": llama / "tool"})
    for config in ({"method": "average"}, {"method": "task_arithmetic"}, {"epsilon": 0}):
        plus = lora.merged(base, agents, MergeConfig(**config))
        minus = lora.merged(base, agents, MergeConfig(**config, weights={"tool": -1}))
        assert all(torch.equal(-plus[name], minus[name]) for name in plus)
        assert any(bool(tensor.any()) for tensor in plus.values())


@pytest.mark.parametrize("variant", ["plain", "dora", "modules_to_save", "conv1d", "experts"])
@pytest.mark.parametrize("config", [MergeConfig(top=0.2, r=0.2), MergeConfig(epsilon=1e-5, r=0.1, alpha=2)])
def test_ram_equals_ram_on_models_that_peft_merged(tmp_path, variant, config):
    """TRAPS 3.5, 3.7: every agent against the clean base, DoRA and whole modules too."""
    make, settings = VARIANTS[variant]
    make().save_pretrained(tmp_path / "base")
    plain = {}
    for seed, agent in enumerate(("tool", "code")):
        lora.adapter(tmp_path / "base", tmp_path / agent, seed=seed, **settings)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / agent)
        model.merge_and_unload().save_pretrained(tmp_path / f"{agent}-merged")
        plain[agent] = open_checkpoint(tmp_path / f"{agent}-merged", agent).store
    base, agents = lora.opened(tmp_path / "base", {"tool": tmp_path / "tool", "code": tmp_path / "code"})
    found, expected = (lora.merged(base, stores, config) for stores in (agents, plain))
    # Where an agent's |τ| is within rounding of the threshold, the two may disagree on a few entries.
    different = sum(int((~torch.isclose(found[n], expected[n], rtol=1e-4, atol=1e-6)).sum()) for n in found)
    assert different <= 4
    near = {n: torch.where(torch.isclose(found[n], e, rtol=1e-4, atol=1e-6), e, found[n]) for n, e in expected.items()}
    assert lora.far(found, near) < 1e-6


def test_one_of_two_agents_may_train_a_module_whole(tmp_path):
    """TRAPS 3.7."""
    untied().save_pretrained(tmp_path / "base")
    lora.adapter(tmp_path / "base", tmp_path / "tool", seed=1, modules_to_save=["lm_head"])
    lora.adapter(tmp_path / "base", tmp_path / "code", seed=2)
    base, agents = lora.opened(tmp_path / "base", {"tool": tmp_path / "tool", "code": tmp_path / "code"})
    saved = load_file(tmp_path / "tool" / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    head = load_file(tmp_path / "base" / "model.safetensors")["lm_head.weight"]
    result = lora.merged(base, agents, AVERAGE)["lm_head.weight"]
    assert lora.distance(result - head, (saved - head) / 2) < 1e-6


def test_mixed_with_a_full_checkpoint(llama):
    lora.adapter(llama / "base", llama / "tool")
    models.trained(lora.llama(), seed=3).save_pretrained(llama / "code")
    base, agents = lora.opened(llama / "base", {"tool": llama / "tool"})
    code = open_checkpoint(llama / "code", "code").store
    result = lora.merged(base, agents | {"code": code}, AVERAGE)
    one, two = lora.update(base, agents["tool"]), lora.update(base, code)
    for name in base.names():
        expected = Span(name, 0, entries(base, name)).of(base) + (one[name] + two[name]) / 2
        assert torch.allclose(result[name].view(-1), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
    ],
)
def test_a_change_of_one_of_two_tied_tensors_is_refused(tmp_path, settings):
    """TRAPS 3.8: one stored tensor cannot be both."""
    lora.qwen3(tied=True).save_pretrained(tmp_path / "base")
    lora.adapter(tmp_path / "base", tmp_path / "tool", **settings)
    told = refusal(tmp_path)
    assert "the base ties the two" in told
    assert "ensure_weight_tying" in told


def test_trained_copy_of_a_tied_head_merges_into_an_untied_base(tmp_path):
    """TRAPS 3.8: what the refusal advises."""
    tied = lora.qwen3(tied=True)
    tied.save_pretrained(tmp_path / "tied")
    expected = lora.logits(lora.adapter(tmp_path / "tied", tmp_path / "tool", modules_to_save=["lm_head"]))
    base = lora.qwen3(tied=False)
    base.load_state_dict(tied.state_dict())
    base.save_pretrained(tmp_path / "base")
    lora.reconfigure(tmp_path / "tool", base_model_name_or_path=str(tmp_path / "base"))
    checkpoint, agents = lora.opened(tmp_path / "base", {"tool": tmp_path / "tool"})
    lora.save_model(tmp_path / "base", lora.merged(checkpoint, agents, ALONE), tmp_path / "out")
    assert lora.distance(lora.of_folder(tmp_path / "out"), expected) < 1e-5


def test_resized_vocabulary(tmp_path):
    """TRAPS 3.9: refused against the old base; rows are the adapter's against the resized one."""
    untied().save_pretrained(tmp_path / "base")
    resized = untied()
    torch.manual_seed(0)
    resized.resize_token_embeddings(64)
    resized.save_pretrained(tmp_path / "resized")
    settings = {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["q_proj"]}
    trained = lora.logits(lora.adapter(tmp_path / "resized", tmp_path / "tool", **settings))
    lora.reconfigure(tmp_path / "tool", base_model_name_or_path="somebody/resized")
    assert "resize the base the same way" in refusal(tmp_path)
    base, agents = lora.opened(tmp_path / "resized", {"tool": tmp_path / "tool"})
    result = lora.merged(base, agents, ALONE)
    saved = load_file(tmp_path / "tool" / "adapter_model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(result[name], saved[f"base_model.model.{name}"])
    lora.save_model(tmp_path / "resized", result, tmp_path / "out")
    assert lora.distance(lora.of_folder(tmp_path / "out"), trained) < 1e-5


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 2}}])
def test_init_that_rewrites_the_base(llama, init, settings):
    """TRAPS 3.10: refused by name; converted with the adapter as it was before training."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=list(lora.EVERYWHERE), init_lora_weights=init, **settings)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(llama / "base"), config)
    model.save_pretrained(llama / "initial")
    lora.train(model, seed=1)
    model.save_pretrained(llama / "tool")
    told = refusal(llama)
    assert f"'{init}'" in told
    assert "initial_adapter" in told

    shutil.copytree(llama / "initial", llama / "tool" / "initial_adapter")
    base, agents = lora.opened(llama / "base", {"tool": llama / "tool"})
    lora.save_model(llama / "base", lora.merged(base, agents, ALONE), llama / "out")
    assert lora.distance(lora.of_folder(llama / "out"), lora.logits(model)) < 1e-5


def test_pissa_that_peft_converted_is_plain_lora(llama):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights="pissa")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(llama / "base"), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(llama / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    lora.train(model, seed=1)
    expected = lora.logits(model)
    model.save_pretrained(llama / "tool", path_initial_model_for_weight_conversion=str(llama / "initial"))
    base, agents = lora.opened(llama / "base", {"tool": llama / "tool"})
    lora.save_model(llama / "base", lora.merged(base, agents, ALONE), llama / "out")
    assert lora.distance(lora.of_folder(llama / "out"), expected) < 1e-5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_replication", [[0, 2], [1, 2]]),
        ("use_qalora", True),
        ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 2}),
        ("kasa_config", {"beta": 1e-4}),
        ("monteclora_config", {"num_samples": 8}),
        ("use_bdlora", {"nblocks": 2}),
        ("velora_config", {"num_groups": 64}),
        ("megatron_config", {"tensor_model_parallel_size": 2}),
        ("a_setting_of_the_future", 0.5),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "an_init_of_the_future"),
        ("peft_type", "ADALORA"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(llama, key, value):
    """TRAPS 3.3."""
    lora.adapter(llama / "base", llama / "tool")
    lora.reconfigure(llama / "tool", **{key: value})
    told = refusal(llama)
    assert str(value if isinstance(value, str) else key) in told


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 0),
        ("r", "8"),
        ("lora_alpha", True),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"(": 2}),
        ("alpha_pattern", {"q_proj": "2"}),
        ("target_parameters", "experts.gate_up_proj"),
        ("modules_to_save", "lm_head"),
        ("trainable_token_indices", {"embed_tokens": [1.5]}),
    ],
)
def test_settings_of_another_form_are_refused(llama, key, value):
    lora.adapter(llama / "base", llama / "tool")
    lora.reconfigure(llama / "tool", **{key: value})
    assert f"sets {key} to" in refusal(llama)


def test_settings_of_the_future_at_rest_are_no_problem(llama):
    lora.adapter(llama / "base", llama / "tool")
    lora.reconfigure(llama / "tool", a_setting_of_the_future=None, another=False, a_third={})
    assert not opened(llama).problems


def test_damaged_adapters_are_refused(llama):
    """TRAPS 3.13 among others."""
    lora.adapter(llama / "base", llama / "good")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight".format

    def broken(change) -> str:
        shutil.rmtree(llama / "tool", ignore_errors=True)
        shutil.copytree(llama / "good", llama / "tool")
        rewrite(llama / "tool", change)
        return refusal(llama)

    assert "sharded" in broken(lambda tensors: tensors.update({name("A"): torch.zeros(0)}))
    assert "holds no tensors" in broken(lambda tensors: tensors.clear())
    assert "missing beside its other factor" in broken(lambda tensors: tensors.pop(name("A")))
    assert "has rank 3" in broken(
        lambda tensors: tensors.update({name("A"): torch.zeros(3, 32), name("B"): torch.zeros(32, 3)})
    )
    assert "adapts a weight of 31" in broken(lambda tensors: tensors.update({name("B"): torch.zeros(31, 4)}))
    assert "not in the base" in broken(
        lambda tensors: tensors.update({"base_model.model.score.weight": torch.ones(2)})
    )
    assert "not a tensor of an adapter" in broken(lambda tensors: tensors.update({"x.lora_diag": torch.ones(2)}))
    assert "int8" in broken(lambda tensors: tensors.update({name("A"): torch.zeros(4, 32, dtype=torch.int8)}))
    (llama / "tool" / "adapter_model.safetensors").unlink()
    assert "is missing" in refusal(llama)
    (llama / "tool" / "adapter_model.bin").write_bytes(b"pickle")
    assert "never read" in refusal(llama)
    (llama / "tool" / "adapter_config.json").write_text("{")
    assert "JSON" in refusal(llama)


def test_lora_bias_without_a_bias_in_the_base_is_refused(llama):
    lora.adapter(llama / "base", llama / "tool", lora_bias=True)
    assert "merging cannot add one" in refusal(llama)


def test_adapter_of_another_base_is_refused(llama):
    """TRAPS 3.19."""
    other = models.trained(lora.llama(), seed=5)
    other.save_pretrained(llama / "other")
    lora.adapter(llama / "other", llama / "tool")
    told = refusal(llama)
    assert str(llama / "other") in told
    assert "share one base" in told
    shutil.copytree(llama / "base", llama / "copy")
    lora.reconfigure(llama / "tool", base_model_name_or_path=str(llama / "copy"))
    assert opened(llama).problems == []
    assert opened(llama).warnings == []
    lora.reconfigure(llama / "tool", base_model_name_or_path="somebody/else")
    assert "make sure" in opened(llama).warnings[0]


def test_quantized_base_of_training_is_warned_about(llama):
    """TRAPS 3.17."""
    lora.adapter(llama / "base", llama / "tool")
    lora.reconfigure(llama / "tool", base_model_name_or_path="unsloth/Llama-3-8B-bnb-4bit")
    assert "quantized" in opened(llama).warnings[0]
    shutil.copytree(llama / "base", llama / "four")
    models.reconfigure(llama / "four", quantization_config={"quant_method": "bitsandbytes"})
    lora.reconfigure(llama / "tool", base_model_name_or_path=str(llama / "four"))
    assert "quantized" in opened(llama).warnings[0]
    assert opened(llama).problems == []


def test_rows_are_read_where_they_are_asked_for(llama):
    """No tensor is ever held whole: a range of a huge product costs a few blocks."""
    low_rank = edits.LowRank(torch.ones(1, 1 << 20, 2), torch.ones(1, 2, 1 << 16))
    assert torch.equal(low_rank.delta(3 << 33, (3 << 33) + 5), torch.full((5,), 2.0))


def test_base_in_memory(llama):
    model = lora.adapter(llama / "base", llama / "tool")
    live = live_adapter(model, "default", StateDict(lora.llama().state_dict()), "agent 'tool'")
    assert not live.problems
    base, agents = lora.opened(llama / "base", {"tool": llama / "tool"})
    assert all(
        torch.equal(Span(n, 0, entries(base, n)).of(live.store), Span(n, 0, entries(base, n)).of(agents["tool"]))
        for n in base.names()
    )


def test_folders_of_adapters_and_models_merge_into_one_model(llama):
    lora.adapter(llama / "base", llama / "tool", use_dora=True)
    models.trained(lora.llama(), seed=3).save_pretrained(llama / "code")
    folders = {"tool": llama / "tool", "code": llama / "code"}
    report = merge(llama / "base", folders, llama / "out", MergeConfig(top=0.2), chunk=1000)
    assert report.sources == {name: str(folder) for name, folder in folders.items()}
    assert "adapter_config.json" not in {path.name for path in (llama / "out").iterdir()}
    base, agents = lora.opened(llama / "base", {"tool": llama / "tool"})
    agents |= {"code": open_checkpoint(llama / "code", "code").store}
    expected = lora.merged(base, agents, MergeConfig(top=0.2))
    found = load_file(llama / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    counted = probe(llama / "base", folders, MergeConfig(top=0.2))
    assert {n: a.active for n, a in counted.agents.items()} == {n: a.active for n, a in report.agents.items()}


def test_adapters_on_a_16_bit_base(llama):
    """Untouched layers are no reason to call agents stored in different precision; the output has the base's dtype."""
    lora.llama().bfloat16().save_pretrained(llama / "half")
    lora.adapter(llama / "half", llama / "tool", seed=1, target_modules=["q_proj"])
    lora.adapter(llama / "half", llama / "code", seed=2, target_modules=["up_proj"])
    merge(llama / "half", {"tool": llama / "tool", "code": llama / "code"}, llama / "out", AVERAGE)
    base, agents = lora.opened(llama / "half", {"tool": llama / "tool", "code": llama / "code"})
    found, expected = load_file(llama / "out" / "model.safetensors"), lora.merged(base, agents, AVERAGE)
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in found.items())


def test_bad_adapter_is_told_with_all_other_problems_and_nothing_is_written(llama):
    lora.adapter(llama / "base", llama / "tool")
    lora.reconfigure(llama / "tool", use_qalora=True)
    with pytest.raises(MergeInputError) as caught:
        merge(llama / "base", {"tool": llama / "tool", "code": llama / "absent"}, llama / "out")
    assert {problem.where for problem in caught.value.problems} == {"agent 'tool'", "agent 'code'"}
    assert not (llama / "out").exists()


def test_adapter_of_single_experts(tmp_path):
    """As older versions of transformers had them: every expert with factors of its own; peft fuses them on loading."""
    lora.qwen3_moe().save_pretrained(tmp_path / "base")
    lora.adapter(tmp_path / "base", tmp_path / "tool", r=2, target_modules=["q_proj"])
    generator = torch.Generator().manual_seed(0)
    shapes = {name: t.shape for name, t in load_file(tmp_path / "base" / "model.safetensors").items()}

    def add(tensors) -> None:
        for name, shape in shapes.items():
            if ".experts." in name:
                key = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(2, shape[1], generator=generator) * 0.2
                tensors[f"{key}.lora_B.weight"] = torch.randn(shape[0], 2, generator=generator) * 0.2

    rewrite(tmp_path / "tool", add)
    lora.reconfigure(tmp_path / "tool", target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    base, agents = lora.opened(tmp_path / "base", {"tool": tmp_path / "tool"})
    saved = load_file(tmp_path / "tool" / "adapter_model.safetensors")
    for name, change in lora.update(base, agents["tool"]).items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in saved:
            expected = (saved[f"{key}.lora_B.weight"] @ saved[f"{key}.lora_A.weight"]) * 3
            assert lora.distance(change, expected.view(-1)) < 1e-5
    lora.save_model(tmp_path / "base", lora.merged(base, agents, ALONE), tmp_path / "out")
    assert lora.distance(lora.of_folder(tmp_path / "out"), lora.of_agent(tmp_path / "base", tmp_path / "tool")) < 1e-5
