"""
What users of merging programs run into, one test for each row 1.x of TRAPS.md that is a test.

Real transformers models of a few thousand weights throughout; rows are named by their number.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ram_trl import MergeConfig, MergeInputError, merge, merge_state_dicts, probe
from ram_trl.folders.offline import find_problems
from ram_trl.weights.writer import CheckpointWriter
from tests import models
from tests.crash import forked
from tests.test_cli import run

PAPER = MergeConfig.preset("paper")
TEXT = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}


def agents_of(folder: Path) -> dict[str, Path]:
    return {"tool": folder / "tool", "code": folder / "code"}


def saved(folder: Path, base) -> Path:
    """A base and two agents of any model class."""
    base.save_pretrained(folder / "base")
    models.trained(base, seed=1).save_pretrained(folder / "tool")
    models.trained(base, seed=2).save_pretrained(folder / "code")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        held |= load_file(file)
    return held


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def opened(folder: Path, kind=AutoModelForCausalLM):
    """Opens a folder and checks that no key is missing, unexpected or made anew."""
    model, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def refusal(folder: Path, agents: dict[str, Path] | None = None, **options) -> str:
    """The text of the error; nothing was written and no input touched."""
    before = models.contents(folder)
    with pytest.raises(MergeInputError) as caught:
        merge(folder / "base", agents or agents_of(folder), options.pop("out", folder / "out"), **options)
    assert models.contents(folder) == before
    return str(caught.value)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 19).reshape(2, 8)).logits


def test_1_1_a_tied_model_stored_without_its_head_stays_so(family):
    merge(family / "base", agents_of(family), family / "out")
    assert "lm_head.weight" not in weights(family / "out")
    model = opened(family / "out")
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_1_1_one_agent_with_and_one_without_the_head_give_the_same_logits_as_in_memory(family):
    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    states = {name: opened(folder).state_dict() for name, folder in agents_of(family).items()}
    models.rewrite(family / "code", add_head)
    merge(family / "base", agents_of(family), family / "out")
    expected = opened(family / "base")
    expected.load_state_dict(merge_state_dicts(expected.state_dict(), states)[0])
    assert torch.equal(logits(opened(family / "out")), logits(expected))


def test_1_2_a_head_that_differs_under_a_tied_config_is_refused(family):
    models.rewrite(family / "code", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    text = refusal(family)
    for word in ("agent 'code'", "lm_head.weight", "tie_word_embeddings"):
        assert word in text


def test_1_3_another_vocabulary_is_refused_with_both_sizes(tmp_path):
    models.tiny_model(vocabulary=32).save_pretrained(tmp_path / "base")
    models.tiny_model(vocabulary=34).save_pretrained(tmp_path / "tool")
    models.tiny_model(vocabulary=32).save_pretrained(tmp_path / "code")
    text = refusal(tmp_path)
    for word in ("agent 'tool'", "model.embed_tokens.weight", "[34, 33]", "[32, 33]", "34 rows against 32"):
        assert word in text


def test_1_3_rows_padded_past_the_tokenizer_are_kept(family):
    assert len(models.tokenizer()) < 61
    merge(family / "base", agents_of(family), family / "out")
    assert weights(family / "out")["model.embed_tokens.weight"].shape == (61, 33)


def test_1_3_a_tokenizer_that_differs_is_told_with_both_sizes(family):
    tokenizer = models.tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(family / "tool")
    models.tokenizer().save_pretrained(family / "code")
    report = merge(family / "base", agents_of(family), family / "out")
    told = [warning for warning in report.warnings if "tokenizer.json" in warning]
    assert len(told) == 1
    assert all(word in told[0] for word in ("agent 'tool'", "31 tokens", "the base's 30", "'<think>'"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_1_4_a_planted_nan_is_refused_by_tensor_and_agent(family, value):
    models.rewrite(family / "tool", lambda t: t["model.embed_tokens.weight"][60].fill_(value))
    text = refusal(family)
    assert "agent 'tool'" in text
    assert "'model.embed_tokens.weight' holds 33 NaN or Inf" in text


def test_1_5_a_single_agent_in_bfloat16_comes_back_bit_for_bit(tmp_path):
    folder = saved(tmp_path, models.tiny_model(dtype=torch.bfloat16))
    merge(folder / "base", {"tool": folder / "tool"}, folder / "out", MergeConfig(epsilon=0))
    assert same(weights(folder / "out"), weights(folder / "tool"))


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_1_5_config_and_weights_agree_on_the_dtype(tmp_path, base, dtype):
    folder = saved(tmp_path, models.tiny_model(dtype=base))
    merge(folder / "base", agents_of(folder), folder / "out", dtype=dtype)
    expected = base if dtype == "auto" else getattr(torch, dtype)
    assert {tensor.dtype for tensor in weights(folder / "out").values()} == {expected}
    assert json.loads((folder / "out" / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")
    assert opened(folder / "out").dtype == expected


def test_1_6_bfloat16_never_passes_through_float16(tmp_path):
    """1e-8 would become 0 in float16, and 7e4 infinite."""
    folder = saved(tmp_path, models.tiny_model(dtype=torch.bfloat16))
    for name in ("base", "tool", "code"):
        models.rewrite(folder / name, lambda t: t["model.norm.weight"][:2].copy_(torch.tensor([1e-8, 7e4])))
    merge(folder / "base", agents_of(folder), folder / "out")
    expected = torch.tensor([1e-8, 7e4]).bfloat16()
    assert torch.equal(weights(folder / "out")["model.norm.weight"][:2], expected)
    shutil.rmtree(folder / "out")
    text = refusal(folder, dtype="float16")
    assert "'model.norm.weight'" in text
    assert "65504" in text


def test_1_7_updates_below_epsilon_are_dropped_and_told_by_name(tmp_path):
    base = models.tiny_model()
    base.save_pretrained(tmp_path / "base")
    for name, step in {"tool": 3e-6, "code": -3e-6}.items():
        agent = models.tiny_model()
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter += step
        agent.save_pretrained(tmp_path / name)
    report = probe(tmp_path / "base", agents_of(tmp_path), PAPER)
    assert {agent.active for agent in report.agents.values()} == {0}
    for name in agents_of(tmp_path):
        assert any(f"agent '{name}'" in warning and "lr × steps" in warning for warning in report.warnings)
    merge(tmp_path / "base", agents_of(tmp_path), tmp_path / "dropped", PAPER)
    assert same(weights(tmp_path / "dropped"), weights(tmp_path / "base"))
    merge(tmp_path / "base", {"tool": tmp_path / "tool"}, tmp_path / "kept", MergeConfig(epsilon=1e-6))
    assert same(weights(tmp_path / "kept"), weights(tmp_path / "tool"))


def test_1_7_without_unique_entries_the_rescale_is_one(tmp_path):
    folder = saved(tmp_path, models.tiny_model())
    shutil.rmtree(folder / "code")
    shutil.copytree(folder / "tool", folder / "code")
    report = merge(folder / "base", agents_of(folder), folder / "out", PAPER)
    assert [(agent.unique, agent.rho, agent.lambda_) for agent in report.agents.values()] == [(0, None, 1.0)] * 2
    assert all(tensor.isfinite().all() for tensor in weights(folder / "out").values())


def narrow(folder: Path) -> None:
    models.rewrite(folder, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))


def test_1_8_agents_in_different_precision_are_refused_unless_told(family):
    narrow(family / "base")
    narrow(family / "tool")
    text = refusal(family)
    for word in ("'tool' has it in bfloat16", "'code' has it in float32", "--allow-mixed-dtypes"):
        assert word in text
    told = merge(family / "base", agents_of(family), family / "out", allow_mixed_dtypes=True)
    assert any("different precision" in warning for warning in told.warnings)
    merge(family / "base", agents_of(family), family / "ulp", MergeConfig(ulp=True))
    assert any("different precision" in warning for warning in probe(family / "base", agents_of(family)).warnings)


def test_1_8_agents_trained_in_float32_from_a_bfloat16_base_are_merged(family):
    """What TRL does with every bfloat16 checkpoint."""
    narrow(family / "base")
    report = merge(family / "base", agents_of(family), family / "out")
    assert {dtype for agent in report.agents.values() for dtype in agent.dtypes} == {"float32"}
    assert {tensor.dtype for tensor in weights(family / "out").values()} == {torch.bfloat16}


def test_1_9_the_index_counts_bytes_and_names_what_is_there(family):
    merge(family / "base", agents_of(family), family / "out", max_shard_size="10KB")
    index = json.loads((family / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights(family / "out").values())
    for name, file in index["weight_map"].items():
        assert name in load_file(family / "out" / file)


def test_1_9_a_phantom_entry_is_refused(family):
    shutil.rmtree(family / "tool")
    models.trained(models.tiny_model(), seed=1).save_pretrained(family / "tool", max_shard_size="20KB")
    path = family / "tool" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.7.phantom.weight"] = sorted(set(index["weight_map"].values()))[0]
    path.write_text(json.dumps(index))
    assert "'model.layers.7.phantom.weight'" in refusal(family)


def test_1_10_a_stray_file_beside_the_shards_is_named_and_not_merged(family):
    clean = merge(family / "base", agents_of(family), family / "clean")
    shutil.rmtree(family / "tool")
    models.trained(models.tiny_model(), seed=1).save_pretrained(family / "tool", max_shard_size="20KB")
    save_file({"model.norm.weight": torch.full((33,), 9.0)}, family / "tool" / "model.safetensors")
    (family / "tool" / "pytorch_model.bin").write_bytes(b"never read")
    report = merge(family / "base", agents_of(family), family / "out")
    assert same(weights(family / "out"), weights(family / "clean"))
    added = " ".join(set(report.warnings) - set(clean.warnings))
    assert "model.safetensors beside" in added
    assert "pytorch_model.bin" in added


def test_1_11_side_files_are_all_there_and_byte_equal(family):
    for name in ("generation_config.json", "preprocessor_config.json", "modeling_own.py", "special_tokens_map.json"):
        (family / "base" / name).write_text(f'{{"of": "{name}"}}')
    merge(family / "base", agents_of(family), family / "out")
    base, out = models.contents(family / "base"), models.contents(family / "out")
    for name in base.keys() - {"model.safetensors", "README.md"}:
        assert out[name] == base[name], name
    assert {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "modeling_own.py"} <= out.keys()


def peak(work) -> int:
    """By how many bytes the anonymous memory of a child process rises while it works."""

    def watched() -> int:
        def anonymous() -> int:
            line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
            return int(line.split()[1]) * 1024

        start, seen, done = anonymous(), [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                seen.append(anonymous() - start)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            work()
        finally:
            done.set()
            watcher.join()
        return max(seen)

    return forked(watched)


def one_embedding(folder: Path, rows: int, agents: int) -> dict[str, Path]:
    """A base of a single bfloat16 embedding, 64 wide, and agents with other values in a fifth of its rows."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(rows, 64, generator=generator).bfloat16()
    made = {"base": table}
    for number in range(agents):
        made[f"agent{number}"] = table.clone()
        made[f"agent{number}"][number::5] *= 1.5
    for name, values in made.items():
        (folder / name).mkdir(parents=True)
        models.save_tensors(folder / name, {"embed.weight": values, "norm.weight": torch.ones(64).bfloat16()})
    return {name: folder / name for name in made if name != "base"}


def test_1_12_and_1_13_memory_depends_neither_on_size_nor_on_a_huge_embedding(tmp_path):
    """8 agents; the larger model is 4 times as large, and each of its files exceeds all that is held."""
    rises = {}
    for rows in (1 << 16, 1 << 18):
        agents = one_embedding(tmp_path / str(rows), rows, 8)
        folder = tmp_path / str(rows)
        rises[rows] = peak(lambda f=folder, a=agents: merge(f / "base", a, f / "out", PAPER, threads=1, chunk=1 << 14))
    small, large = rises.values()
    one_file = (1 << 18) * 64 * 2
    assert large < one_file
    assert large < small + one_file // 8


def test_1_13_chunked_equals_unchunked_bit_for_bit(tmp_path):
    agents = one_embedding(tmp_path, 1000, 8)
    merge(tmp_path / "base", agents, tmp_path / "whole", chunk=64_000)
    merge(tmp_path / "base", agents, tmp_path / "chunked", chunk=999, threads=3)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "chunked"))


def mixture(tied: bool = True) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **TEXT, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=tied
    )
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_1_14_experts_apart_on_disk_and_fused_in_memory_merge_to_the_same_model(tmp_path, tied):
    """Agent `tool` is saved from memory, agent `code` opened from its checkpoint, trained on and saved again."""
    base = mixture(tied)
    base.save_pretrained(tmp_path / "base")
    models.trained(base, seed=1).save_pretrained(tmp_path / "tool", max_shard_size="20KB")
    models.trained(base, seed=2).save_pretrained(tmp_path / "once")
    models.trained(opened(tmp_path / "once"), seed=3).save_pretrained(tmp_path / "code")
    merge(tmp_path / "base", agents_of(tmp_path), tmp_path / "out", max_shard_size="15KB")

    generalist = opened(tmp_path / "out")
    states = {name: opened(folder).state_dict() for name, folder in agents_of(tmp_path).items()}
    expected, _ = merge_state_dicts(base.state_dict(), states)
    assert same(generalist.state_dict(), expected)
    base.load_state_dict(expected)
    assert torch.equal(logits(generalist), logits(base))
    assert weights(tmp_path / "out").keys() == weights(tmp_path / "base").keys()
    assert sum(".experts." in name for name in weights(tmp_path / "out")) == 2 * 4 * 3


def test_1_14_fused_experts_on_disk_against_experts_apart_are_refused_with_the_reason(tmp_path):
    folder = saved(tmp_path, mixture())
    state = {name: tensor.clone() for name, tensor in mixture().state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / "code" / "model.safetensors", {"format": "pt"})
    text = refusal(folder)
    assert "experts are stored fused here, one by one in the base" in text
    assert "save_pretrained" in text
    assert "experts.gate_up_proj" in text


def test_1_15_keys_after_opening_the_merge_are_those_of_the_base(tmp_path):
    folder = saved(tmp_path, mixture())
    merge(folder / "base", agents_of(folder), folder / "out")
    assert opened(folder / "out").state_dict().keys() == opened(folder / "base").state_dict().keys()


@pytest.mark.parametrize("shard_size", ["5GB", "30KB"])
def test_1_16_every_tensor_is_accounted_for_after_writing(family, monkeypatch, shard_size):
    """A file that got a wrong name into it on the way is found, and the exit code is not 0."""
    close = CheckpointWriter.close

    def spoiled(writer):
        files = close(writer)
        models.rewrite_file(writer._folder / files[0].name, lambda t: t.update({"x100": t.pop(sorted(t)[0])}))
        return files

    monkeypatch.setattr(CheckpointWriter, "close", spoiled)
    inputs = ["--base", family / "base", "--agent", f"tool={family}/tool", "--out", family / "out"]
    result = run("merge", *inputs, "--shard-size", shard_size)
    assert result.exit_code != 0
    assert "'model.embed_tokens.weight'" in result.output
    assert sorted(path.name for path in family.iterdir()) == ["base", "code", "tool"]


def test_1_16_a_chunk_that_gets_lost_is_found(family, monkeypatch):
    monkeypatch.setattr(CheckpointWriter, "write", lambda *a: None)
    with pytest.raises(RuntimeError, match=r"not all of the weights were written; missing in model.safetensors \(\d+"):
        merge(family / "base", agents_of(family), family / "out")
    assert not (family / "out").exists()


def test_1_17_both_kinds_of_experts_in_one_file_and_doubled_keys_are_refused(tmp_path):
    folder = saved(tmp_path, mixture())
    fused = {n: t.clone() for n, t in mixture().state_dict().items() if n.endswith("gate_up_proj")}
    models.rewrite(folder / "tool", lambda t: t.update(fused))
    shutil.rmtree(folder / "code")
    models.trained(mixture(), seed=2).save_pretrained(folder / "code", max_shard_size="20KB")
    first, second, *_ = sorted((folder / "code").glob("*.safetensors"))
    doubled = sorted(load_file(first))[0]
    save_file(load_file(second) | {doubled: load_file(first)[doubled]}, second, {"format": "pt"})
    text = refusal(folder)
    assert "agent 'tool': 'model.layers.0.mlp.experts' is stored both fused and one by one" in text
    assert "'model.layers.0.mlp.experts.gate_up_proj' (shape [4, 32, 32]) is not in the base" in text
    assert f"agent 'code': '{doubled}' is in {first.name} and in {second.name}" in text


def test_1_17_a_key_with_a_number_stuck_to_it_is_refused(tmp_path):
    folder = saved(tmp_path, mixture())
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    models.rewrite(folder / "code", lambda t: t.update({f"{name}100": t.pop(name)}))
    text = refusal(folder)
    assert f"'{name}100'" in text
    assert f"'{name}' (shape [16, 32]) is missing" in text


def vision() -> Gemma3ForConditionalGeneration:
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=TEXT, vision_config=tower, mm_tokens_per_image=4, image_token_index=60)
    return Gemma3ForConditionalGeneration(config)


def test_1_19_a_text_agent_of_a_vision_base_is_refused_with_the_reason(tmp_path):
    folder = saved(tmp_path, vision())
    shutil.rmtree(folder / "code")
    Gemma3ForCausalLM(Gemma3TextConfig(**TEXT)).save_pretrained(folder / "code")
    text = refusal(folder)
    assert "would fit without 'language_model.'" in text
    assert "text model" in text
    assert "Gemma3ForConditionalGeneration" in text


def test_1_19_vision_models_keep_an_untouched_tower_and_their_files(tmp_path):
    base = vision()
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "preprocessor_config.json").write_text("{}")
    for seed, name in enumerate(agents_of(tmp_path)):
        agent = models.trained(base, seed)
        agent.model.vision_tower.load_state_dict(base.model.vision_tower.state_dict())
        agent.save_pretrained(tmp_path / name)
    merge(tmp_path / "base", agents_of(tmp_path), tmp_path / "out")
    merged, before = weights(tmp_path / "out"), weights(tmp_path / "base")
    tower = {name for name in before if name.startswith("vision_tower")}
    assert tower
    assert all(torch.equal(merged[name], before[name]) for name in tower)
    assert (tmp_path / "out" / "preprocessor_config.json").exists()
    opened(tmp_path / "out", Gemma3ForConditionalGeneration)


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [("_orig_mod.", "torch.compile"), ("module.", "DistributedDataParallel"), ("base_model.model.", "peft")],
)
def test_1_19_prefixes_of_wrappers_are_refused_with_the_reason(family, prefix, reason):
    def wrap(tensors):
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    models.rewrite(family / "code", wrap)
    text = refusal(family)
    assert f"would fit without '{prefix}'" in text
    assert reason in text


def test_1_20_a_dry_run_tells_every_problem_from_headers_and_writes_nothing(family, monkeypatch):
    models.rewrite(family / "tool", lambda t: t.pop("model.norm.weight"))
    models.rewrite(family / "tool", lambda t: t.update({"score.weight": torch.zeros(2, 33)}))
    models.rewrite(family / "code", lambda t: t.update({"model.embed_tokens.weight": torch.zeros(63, 33)}))
    before = models.contents(family)
    monkeypatch.setattr("ram_trl.folders.inputs.find_non_finite", lambda *a: pytest.fail("read the weights"))
    inputs = ["--base", family / "base", "--agent", f"tool={family}/tool", "--agent", f"code={family}/code"]
    inputs += ["--agent", f"gone={family}/gone", "--out", family / "out"]
    result = run("merge", "--dry-run", *inputs, "--method", "ramm")
    assert result.exit_code != 0
    for words in ("'ramm'", "'model.norm.weight'", "'score.weight'", "[63, 33]", "agent 'gone'"):
        assert words in result.output, words
    assert models.contents(family) == before


def test_1_20_a_dry_run_tells_the_plan_and_writes_nothing(family):
    before = models.contents(family)
    inputs = ["--base", family / "base", "--agent", f"tool={family}/tool", "--out", family / "out"]
    result = run("merge", "--dry-run", *inputs, "--shard-size", "30KB", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert models.contents(family) == before
    merge(family / "base", {"tool": family / "tool"}, family / "out", max_shard_size="30KB", dtype="bfloat16")
    for file in (family / "out").glob("*.safetensors"):
        size = file.stat().st_size
        assert f"write {file.name}, {size / 1000:.4g} KB" in result.output
    assert "expected time" in result.output


def test_1_21_quantized_weights_are_refused(family):
    for name, kind in {"int8": torch.int8, "uint8": torch.uint8, "fp8": torch.float8_e4m3fn}.items():
        shutil.copytree(family / "tool", family / name)
        models.rewrite(family / name, lambda t, k=kind: t.update({"model.norm.weight": t["model.norm.weight"].to(k)}))
    shutil.copytree(family / "tool", family / "said")
    models.reconfigure(family / "said", quantization_config={"quant_method": "fp8"})
    shutil.copytree(family / "tool", family / "scaled")
    models.rewrite(family / "scaled", lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1)}))
    text = refusal(family, {name: family / name for name in ("int8", "uint8", "fp8", "said", "scaled")})
    for words in ("stored as I8", "stored as U8", "stored as F8_E4M3", "quantization_config (fp8)", "_scale_inv'"):
        assert words in text, words


def test_1_21_quantization_is_seen_wherever_it_is_said(family):
    for name in ("part", "compressed", "file"):
        shutil.copytree(family / "tool", family / name)
    models.reconfigure(family / "part", text_config={"quantization_config": {"quant_method": "awq"}})
    models.reconfigure(family / "compressed", compression_config={"format": "pack-quantized"})
    (family / "file" / "hf_quant_config.json").write_text("{}")
    text = refusal(family, {name: family / name for name in ("part", "compressed", "file")})
    for words in ("agent 'part'", "quantization_config (awq)", "compression_config", "hf_quant_config.json"):
        assert words in text, words


def test_1_21_masks_in_bytes_and_masks_of_infinity_are_no_weights(tmp_path):
    """GPT-2 checkpoints carry their causal masks; they are the same everywhere and come from the base."""
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    folder = saved(tmp_path, base)
    masks = {
        "transformer.h.0.attn.bias": torch.ones(16, 16, dtype=torch.uint8).tril().reshape(1, 1, 16, 16),
        "transformer.h.1.attn.signs": torch.ones(16, dtype=torch.int8),
        "transformer.h.1.attn.mask": torch.full((16, 16), -torch.inf).triu(1),
    }
    merge(folder / "base", agents_of(folder), folder / "plain")
    for name in ("base", "tool", "code"):
        models.rewrite(folder / name, lambda t: t.update({n: m.clone() for n, m in masks.items()}))
    report = merge(folder / "base", agents_of(folder), folder / "out")
    assert any("'transformer.h.1.attn.mask' holds NaN or Inf" in warning for warning in report.warnings)
    assert same(weights(folder / "out"), weights(folder / "plain") | masks)

    models.rewrite(folder / "code", lambda t: t["transformer.h.1.attn.mask"][0, 1].fill_(0))
    models.rewrite(folder / "code", lambda t: t["transformer.h.0.attn.bias"].zero_())
    shutil.rmtree(folder / "out")
    text = refusal(folder)
    assert "agent 'code': 'transformer.h.0.attn.bias' (torch.uint8) is not a weight to merge but differs" in text
    assert "agent 'code': 'transformer.h.1.attn.mask' holds" in text


def test_1_23_a_snapshot_of_links_gives_regular_files_and_inputs_stay_as_they_are(family):
    snapshot = family / "models--org--small" / "snapshots" / "0123"
    blobs = family / "models--org--small" / "blobs"
    (family / "base").rename(family / "files")
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (family / "files").iterdir():
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        os.symlink(os.path.relpath(blob, snapshot), snapshot / file.name)
    before = models.contents(family)
    merge(snapshot, agents_of(family), family / "out")
    assert not any(path.is_symlink() for path in (family / "out").rglob("*"))
    shutil.rmtree(family / "blobs", ignore_errors=True)
    opened(family / "out")
    assert "base_model: org/small" in (family / "out" / "README.md").read_text()
    shutil.rmtree(family / "out")
    assert models.contents(family) == before
    text = "inputs are never written to"
    with pytest.raises(MergeInputError, match=text):
        merge(snapshot, agents_of(family), snapshot / "out")


def test_1_24_the_coefficients_that_were_applied_are_reported(tmp_path):
    """Three numbers: weights 0.1 and 1.0 are used as they are, not normalized."""
    for name, values in {"base": [1.0, 1.0, 1.0], "a": [3.0, 1.0, 2.0], "b": [1.0, 5.0, 4.0]}.items():
        (tmp_path / name).mkdir()
        models.save_tensors(tmp_path / name, {"w": torch.tensor(values)})
    agents = {"a": tmp_path / "a", "b": tmp_path / "b"}
    config = MergeConfig(epsilon=0, r=0.5, alpha=1, weights={"a": 0.1})
    report = merge(tmp_path / "base", agents, tmp_path / "out", config)
    assert {name: (agent.weight, agent.rho, agent.lambda_) for name, agent in report.agents.items()} == {
        "a": (0.1, 1.0, 1.5),
        "b": (1.0, 1.0, 1.5),
    }
    # unique of a: 1 + 1.5 · 0.1 · 2; unique of b: 1 + 1.5 · 4; shared: 1 + (0.1 · 1 + 3) / 2
    torch.testing.assert_close(weights(tmp_path / "out")["w"], torch.tensor([1.3, 7.0, 2.55]))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| a | 66.67% | 1 | 1 | 1 | 1.5 | 0.1 |" in card


def test_1_10_weights_in_capitals_are_not_taken_for_side_files(family, tmp_path):
    (family / "base" / "OLD.SAFETENSORS").write_bytes(b"stale")
    report = merge(family / "base", {"tool": family / "tool"}, tmp_path / "out")
    assert any("OLD.SAFETENSORS" in warning for warning in report.warnings)
    assert not (tmp_path / "out" / "OLD.SAFETENSORS").exists()


def test_1_11_side_files_may_have_any_name_but_that_of_our_folder(family, tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")  # not UTF-8
    (family / "base" / name).write_text("menu")
    merge(family / "base", {"tool": family / "tool"}, tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == "menu"
    assert b"caf\xe9.txt" in (tmp_path / "out" / "SHA256SUMS").read_bytes()
    (family / "base" / "plots").write_text("not a folder")
    problems = find_problems(family / "base", {"tool": family / "tool"}, tmp_path / "again")
    assert any("plots is a file" in str(problem) for problem in problems)
