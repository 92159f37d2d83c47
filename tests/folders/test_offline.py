"""Merging folders: what comes out, what is refused, and that nothing half-done is left."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ram_trl import MergeConfig, MergeInputError, merge, merge_state_dicts, probe
from ram_trl.folders.offline import outline
from tests import models

PAPER = MergeConfig.preset("paper")


def agents_of(family: Path) -> dict[str, Path]:
    return {"tool": family / "tool", "code": family / "code"}


def loaded(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def in_memory(family: Path, config: MergeConfig) -> dict[str, torch.Tensor]:
    states = {name: loaded(folder).state_dict() for name, folder in agents_of(family).items()}
    return merge_state_dicts(loaded(family / "base").state_dict(), states, config)[0]


def problems_of(family: Path, agents: dict[str, Path] | None = None, out: str = "out") -> list:
    before = {name: models.contents(family / name) for name in ("base", "tool", "code")}
    with pytest.raises(MergeInputError) as caught:
        merge(family / "base", agents or agents_of(family), family / out)
    assert not (family / out).exists() or (family / out) in (family / "tool", family / "base")
    assert {name: models.contents(family / name) for name in before} == before
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return caught.value.problems


def told(problems: list, *words: str) -> bool:
    return any(all(word in str(problem) for word in words) for problem in problems)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_merged_folder_opens_and_equals_the_merge_in_memory(tmp_path, dtype, tied):
    base = models.tiny_model(tied=tied, dtype=dtype)
    base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    models.trained(base, seed=1).save_pretrained(tmp_path / "tool")
    models.trained(base, seed=2).save_pretrained(tmp_path / "code", max_shard_size="10KB")

    merge(tmp_path / "base", agents_of(tmp_path), tmp_path / "out", PAPER, max_shard_size="15KB", chunk=1000)

    generalist = loaded(tmp_path / "out")
    expected = in_memory(tmp_path, PAPER)
    assert generalist.dtype == dtype
    assert generalist.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in generalist.state_dict().items())
    assert not torch.equal(expected["model.embed_tokens.weight"], base.state_dict()["model.embed_tokens.weight"])
    generalist.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False)


def test_index_is_right(family):
    merge(family / "base", agents_of(family), family / "out", max_shard_size="20KB")
    index = json.loads((family / "out" / "model.safetensors.index.json").read_text())
    held = {}
    for file in sorted((family / "out").glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            held |= {name: (file.name, handle.get_tensor(name).nbytes) for name in handle.keys()}  # noqa: SIM118
    assert index["weight_map"] == {name: file for name, (file, _) in held.items()}
    assert index["metadata"]["total_size"] == sum(size for _, size in held.values())
    assert len(set(index["weight_map"].values())) > 1


@pytest.mark.parametrize("shard_size", ["1KB", "30KB", "5GB"])
def test_shard_size_threads_and_chunk_change_no_bit(family, shard_size):
    merge(family / "base", agents_of(family), family / "one", max_shard_size="5GB", threads=1)
    merge(family / "base", agents_of(family), family / "two", max_shard_size=shard_size, threads=3, chunk=701)
    one, two = loaded(family / "one").state_dict(), loaded(family / "two").state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_side_files_come_from_the_base(family):
    GenerationConfig(eos_token_id=[1, 7], max_new_tokens=5).save_pretrained(family / "base")
    (family / "base" / "modeling_own.py").write_text("x = 1\n")
    (family / "base" / "additional_chat_templates").mkdir()
    (family / "base" / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    (family / "base" / "checkpoint-7").mkdir()
    (family / "base" / "checkpoint-7" / "trainer_state.json").write_text("{}")
    merge(family / "base", agents_of(family), family / "out")

    base, out = models.contents(family / "base"), models.contents(family / "out")
    expected = {name for name in base if not name.startswith(("checkpoint-", "model.", "README"))}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json"} <= expected
    assert {name: out[name] for name in expected} == {name: base[name] for name in expected}
    plots = {f"plots/{name}.png" for name in ("overlap", "pairs", "layers")}
    assert out.keys() == expected | plots | {"model.safetensors", "merge_report.json", "README.md", "SHA256SUMS"}
    tokenizer = AutoTokenizer.from_pretrained(family / "out")
    assert tokenizer("ab").input_ids == models.tokenizer()("ab").input_ids
    assert tokenizer.chat_template["default"] == models.tokenizer().chat_template


def test_inputs_are_not_written_to_and_snapshot_links_become_files(family):
    blobs = family / "blobs"
    (family / "base").rename(blobs)
    (family / "base").mkdir()
    for file in blobs.iterdir():
        os.symlink(os.path.relpath(file, family / "base"), family / "base" / file.name)
    before = {name: models.contents(family / name) for name in ("blobs", "tool", "code")}
    merge(family / "base", agents_of(family), family / "out")
    assert {name: models.contents(family / name) for name in before} == before
    assert not any(path.is_symlink() for path in (family / "out").iterdir())


def test_tied_head_in_either_file_form(family):
    """Base and agent may or may not store lm_head beside the embedding; the output has the base's form."""

    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    plain = merge(family / "base", agents_of(family), family / "plain")
    models.rewrite(family / "tool", add_head)
    merge(family / "base", agents_of(family), family / "agent_has_it")
    models.rewrite(family / "base", add_head)
    both = merge(family / "base", agents_of(family), family / "both_have_it")

    expected = load_file(family / "plain" / "model.safetensors")
    assert "lm_head.weight" not in expected
    found = load_file(family / "agent_has_it" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    found = load_file(family / "both_have_it" / "model.safetensors")
    assert found.keys() == expected.keys() | {"lm_head.weight"}
    assert torch.equal(found["lm_head.weight"], expected["model.embed_tokens.weight"])
    assert both.agents["tool"].entries == plain.agents["tool"].entries
    assert (
        "tie_word_embeddings" not in json.loads((family / "base" / "config.json").read_text())
        or json.loads((family / "both_have_it" / "config.json").read_text())["tie_word_embeddings"]
    )


def test_tied_config_with_a_head_of_its_own_is_refused(family):
    models.rewrite(family / "code", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    assert told(problems_of(family), "agent 'code'", "lm_head.weight", "tie_word_embeddings")


def test_tied_base_and_untied_agent_are_refused(tmp_path):
    models.tiny_model().save_pretrained(tmp_path / "base")
    models.trained(models.tiny_model(), 1).save_pretrained(tmp_path / "tool")
    models.trained(models.tiny_model(tied=False), 2).save_pretrained(tmp_path / "code")
    assert told(problems_of(tmp_path), "agent 'code'", "lm_head.weight", "tied")
    shutil.copytree(tmp_path / "code", tmp_path / "swap")
    shutil.rmtree(tmp_path / "code")
    shutil.copytree(tmp_path / "base", tmp_path / "code")
    shutil.rmtree(tmp_path / "base")
    shutil.copytree(tmp_path / "swap", tmp_path / "base")
    assert told(problems_of(tmp_path), "agent 'code'", "lm_head.weight", "tied")


def test_mixed_dtypes_and_buffers_keep_the_bases_dtype(family):
    def mix(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
        for name in tensors:
            if "mlp" in name:
                tensors[name] = tensors[name].bfloat16()
            if "q_proj" in name:
                tensors[name] = tensors[name].half()
        tensors["model.positions"] = torch.arange(5)
        tensors["model.flags"] = torch.tensor([True, False])

    models.rewrite(family / "base", mix)
    # An agent may be stored wider than the base: TRL trains a bf16 checkpoint in fp32.
    models.rewrite(
        family / "tool",
        lambda t: t.update({"model.positions": torch.arange(5), "model.flags": torch.tensor([1, 0]) > 0}),
    )
    models.rewrite(family / "code", mix)
    merge(family / "base", agents_of(family), family / "out", PAPER, allow_mixed_dtypes=True)
    base, out = (load_file(family / name / "model.safetensors") for name in ("base", "out"))
    assert {name: tensor.dtype for name, tensor in out.items()} == {name: t.dtype for name, t in base.items()}
    assert {t.dtype for t in out.values()} >= {torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool}
    assert torch.equal(out["model.positions"], torch.arange(5))


def test_buffer_that_differs_is_refused(family):
    for name in ("base", "tool", "code"):
        models.rewrite(family / name, lambda t, n=name: t.update({"model.positions": torch.arange(5) + (n == "code")}))
    assert told(problems_of(family), "agent 'code'", "model.positions", "int64")


def test_one_agent_with_epsilon_zero_comes_back_bit_for_bit(family):
    merge(family / "base", {"tool": family / "tool"}, family / "out", MergeConfig(epsilon=0))
    agent, out = (load_file(family / name / "model.safetensors") for name in ("tool", "out"))
    assert {name: t.numpy().tobytes() for name, t in out.items()} == {n: t.numpy().tobytes() for n, t in agent.items()}


def test_report_and_card(family):
    report = merge(family / "base", agents_of(family), family / "out")
    assert json.loads((family / "out" / "merge_report.json").read_text()) == json.loads(report.to_json())
    assert report.out == family / "out"
    card = (family / "out" / "README.md").read_text()
    assert card.startswith("---\nbase_model: base\n")
    for agent in ("tool", "code"):
        assert f"| {agent} | {report.agents[agent].density:.2%}" in card
    for picture in re.findall(r"!\[\w+\]\((.+)\)", card):
        assert (family / "out" / picture).read_bytes().startswith(b"\x89PNG")
    assert card.count("![") == 3
    models.reconfigure(family / "base", _name_or_path="Qwen/Qwen3-1.7B")
    merge(family / "base", agents_of(family), family / "hub")
    assert "base_model: Qwen/Qwen3-1.7B\n" in (family / "hub" / "README.md").read_text()


def test_probe_reports_the_same_and_writes_nothing(family):
    before = models.contents(family)
    report = probe(family / "base", agents_of(family))
    assert models.contents(family) == before
    merged = merge(family / "base", agents_of(family), family / "out")
    assert report.model_dump(exclude={"out"}) == merged.model_dump(exclude={"out"})


def test_all_problems_of_all_inputs_at_once(family):
    """Missing, extra and mis-shaped tensors, NaN, a truncated file, another architecture, quantized weights."""
    for name in ("nan", "shape", "extra", "cut", "gpt", "int8", "fp8", "quant"):
        shutil.copytree(family / "tool", family / name)

    def spoil(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
        tensors["model.norm.weight"][0] = float("inf")

    models.rewrite(family / "nan", spoil)
    models.rewrite(family / "shape", lambda t: t.update({"model.embed_tokens.weight": torch.zeros(63, 33)}))
    models.rewrite(family / "shape", lambda t: t.pop("model.norm.weight"))
    models.rewrite(family / "extra", lambda t: t.update({"score.weight": torch.zeros(2, 33)}))
    whole_file = (family / "cut" / "model.safetensors").read_bytes()
    (family / "cut" / "model.safetensors").write_bytes(whole_file[:-100])
    models.reconfigure(family / "gpt", model_type="llama", architectures=["LlamaForCausalLM"])
    models.rewrite(family / "int8", lambda t: t.update({"model.norm.weight": torch.zeros(33, dtype=torch.int8)}))
    models.rewrite(family / "fp8", lambda t: t.update({"model.norm.weight": torch.zeros(33).to(torch.float8_e4m3fn)}))
    models.reconfigure(family / "quant", quantization_config={"quant_method": "bitsandbytes"})

    names = ("nan", "shape", "extra", "cut", "gpt", "int8", "fp8", "quant")
    problems = problems_of(family, {name: family / name for name in names} | {"gone": family / "nowhere"})
    assert told(problems, "agent 'nan'", "model.layers.0.mlp.up_proj.weight", "NaN")
    assert told(problems, "agent 'nan'", "model.norm.weight", "Inf")
    assert told(problems, "agent 'shape'", "model.embed_tokens.weight", "[63, 33]", "[61, 33]", "63 rows against 61")
    assert told(problems, "agent 'shape'", "model.norm.weight", "missing")
    assert told(problems, "agent 'extra'", "score.weight", "not in the base")
    assert told(problems, "agent 'cut'", "model.safetensors", "truncated")
    assert told(problems, "agent 'gpt'", "llama", "qwen3")
    assert told(problems, "agent 'gpt'", "LlamaForCausalLM", "Qwen3ForCausalLM")
    assert told(problems, "agent 'int8'", "model.norm.weight", "I8")
    assert told(problems, "agent 'fp8'", "model.norm.weight", "F8_E4M3")
    assert told(problems, "agent 'quant'", "bitsandbytes")
    assert told(problems, "agent 'gone'", "nowhere")


@pytest.mark.parametrize("place", ["base", "tool"])
def test_a_config_that_says_null_of_its_architecture_says_nothing(family, place):
    models.reconfigure(family / place, architectures=None)
    merge(family / "base", {"tool": family / "tool", "code": family / "code"}, family / "out")
    AutoModelForCausalLM.from_pretrained(family / "out")


def test_nan_alone_stops_the_merge_before_anything_is_written(family):
    models.rewrite(family / "code", lambda t: t["model.norm.weight"].fill_(float("nan")))
    problems = problems_of(family)
    assert [(p.where, p.tensor) for p in problems] == [("agent 'code'", "model.norm.weight")]


def test_nan_in_the_base_is_the_bases_problem(family):
    for name in ("base", "tool"):
        models.rewrite(family / name, lambda t: t["model.norm.weight"].fill_(float("nan")))
    assert told(problems_of(family), "base: ", "model.norm.weight")


def test_overflow_of_a_float16_output_names_the_tensor_and_leaves_nothing(family):
    models.rewrite(family / "base", lambda t: t.update({n: x.half() for n, x in t.items()}))
    models.rewrite(family / "code", lambda t: t["model.norm.weight"].fill_(7e4))
    assert told(problems_of(family), "output", "model.norm.weight", "65504", "float16")
    assert sorted(path.name for path in family.iterdir()) == ["base", "code", "tool"]


def test_broken_indexes_are_found_before_work(family):
    base = models.tiny_model()
    for name in ("code", "tool"):
        shutil.rmtree(family / name)
        models.trained(base, seed=3).save_pretrained(family / name, max_shard_size="20KB")
    index_path = family / "tool" / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    index["weight_map"]["model.layers.9.phantom"] = first
    index_path.write_text(json.dumps(index))
    gone = sorted((family / "code").glob("*.safetensors"))[0]
    gone.unlink()
    problems = problems_of(family)
    assert told(problems, "agent 'tool'", "model.layers.9.phantom", first)
    assert told(problems, "agent 'code'", gone.name, "not there")
    index_path.write_text("{")
    assert told(problems_of(family), "agent 'tool'", "index.json", "JSON")
    index_path.write_text('{"weight_map": 3}')
    assert told(problems_of(family), "agent 'tool'", "weight_map")


def test_stray_weight_files_are_named_and_not_read(family):
    shutil.rmtree(family / "tool")
    models.trained(models.tiny_model(), seed=1).save_pretrained(family / "tool", max_shard_size="20KB")
    save_file({"model.norm.weight": torch.full((33,), 9.0)}, family / "tool" / "model.safetensors")
    (family / "tool" / "pytorch_model.bin").write_bytes(b"never read")
    report = merge(family / "base", agents_of(family), family / "out")
    assert any("'tool'" in w and "pytorch_model.bin" in w for w in report.warnings)
    assert any("'tool'" in w and "from_pretrained would load model.safetensors" in w for w in report.warnings)
    assert load_file(family / "out" / "model.safetensors")["model.norm.weight"].max() < 5


def test_pickled_weights_and_adapters_are_refused_with_the_way_out(family):
    (family / "tool" / "model.safetensors").rename(family / "tool" / "pytorch_model.bin")
    (family / "code" / "model.safetensors").unlink()
    (family / "code" / "adapter_config.json").write_text("{}")
    problems = problems_of(family)
    assert told(problems, "agent 'tool'", "pytorch_model.bin", "save_pretrained")
    assert told(problems, "agent 'code'", "adapter", "merge_and_unload")


def test_config_that_changes_the_forward_is_warned_about(family):
    models.reconfigure(family / "code", rms_norm_eps=1e-3)
    report = merge(family / "base", agents_of(family), family / "out")
    assert any("'code'" in w and "rms_norm_eps 0.001 (base: 1e-06)" in w for w in report.warnings)
    clean = probe(family / "base", {"tool": family / "tool"})
    assert clean.warnings == []


@pytest.mark.parametrize("where", ["out", "tool/merged", "base"])
def test_output_that_exists_or_lies_in_an_input_is_refused(family, where):
    (family / "out").mkdir()
    (family / "out" / "mine.txt").write_text("keep")
    with pytest.raises(MergeInputError, match=r"exists|inputs are never written to"):
        merge(family / "base", agents_of(family), family / where)
    assert models.contents(family / "out") == {"mine.txt": b"keep"}
    assert not (family / "tool" / "merged").exists()


def test_too_little_disk_is_told_with_both_numbers(family, monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    assert told(problems_of(family), "output", "GB are needed", "GB are free")


def test_failure_while_writing_leaves_nothing(family, monkeypatch):
    real, calls = os.pwrite, []

    def full(descriptor, content, offset):
        calls.append(offset)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        return real(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        merge(family / "base", agents_of(family), family / "out", chunk=500)
    assert sorted(path.name for path in family.iterdir()) == ["base", "code", "tool"]


def test_files_are_readable_as_the_umask_says(family):
    old = os.umask(0o022)
    try:
        merge(family / "base", agents_of(family), family / "out")
    finally:
        os.umask(old)
    files = [path for path in (family / "out").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o644"}


def test_learning_rate_times_steps_below_epsilon_is_warned_about_by_name(family):
    base = models.tiny_model()
    shutil.rmtree(family / "code")
    models.trained(base, seed=5, size=1e-7).save_pretrained(family / "code")
    report = merge(family / "base", agents_of(family), family / "out", PAPER)
    assert report.agents["code"].active == 0
    assert any("agent 'code'" in w and "lr × steps" in w and "1e-05" in w for w in report.warnings)
    assert not any("agent 'tool'" in w for w in report.warnings)


@pytest.mark.parametrize("who", ["base", "code"])
def test_a_checkpoint_without_tensors_is_refused(family, who):
    save_file({}, family / who / "model.safetensors")
    assert told(problems_of(family), "base: " if who == "base" else "agent 'code'", "no tensors")


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_size_below_one_is_refused(family, chunk):
    with pytest.raises(ValueError, match=f"chunk size is {chunk}"):
        merge(family / "base", agents_of(family), family / "out", chunk=chunk)
    assert not (family / "out").exists()


@pytest.mark.parametrize("size", ["abc", "0GB", "1GiB", 0, -1])
def test_a_shard_size_that_is_none_is_refused_before_work(family, size):
    with pytest.raises(ValueError, match="max_shard_size"):
        merge(family / "base", agents_of(family), family / "new" / "out", max_shard_size=size)
    assert not (family / "new").exists()


def test_links_that_lead_nowhere_and_stray_adapters_do_not_reach_the_output(family):
    (family / "base" / "adapter_config.json").write_text("{}")
    merge(family / "base", agents_of(family), family / "out")
    assert not (family / "out" / "adapter_config.json").exists()
    (family / "base" / "vocab.txt").symlink_to("gone")
    assert told(problems_of(family, out="other"), "base: ", "vocab.txt", "link to nothing")


def test_folders_made_on_the_way_are_removed_when_the_merge_fails(family):
    models.rewrite(family / "base", lambda t: t.update({n: x.half() for n, x in t.items()}))
    models.rewrite(family / "code", lambda t: t["model.norm.weight"].fill_(7e4))
    problems_of(family, out="a/b/out")
    assert not (family / "a").exists()


def test_an_output_that_cannot_be_made_is_told_before_work(family):
    (family / "file").write_text("")
    (family / "link").symlink_to(family / "elsewhere")
    assert told(problems_of(family, out="file/out"), "output", "not a folder that can be written to")
    assert told(problems_of(family, out="link"), "output", "is a link")
    with pytest.raises(MergeInputError, match="longer than 255"):
        merge(family / "base", agents_of(family), family / ("x" * 300))


def test_agents_in_16_bits_against_a_base_in_32_are_warned_about(family):
    for agent in ("tool", "code"):
        models.rewrite(family / agent, lambda t: t.update({n: x.bfloat16() for n, x in t.items()}))
    assert any("rounding alone" in w and "'tool'" in w for w in probe(family / "base", agents_of(family)).warnings)
    ulp = probe(family / "base", agents_of(family), MergeConfig(ulp=True))
    assert not any("rounding alone" in w for w in ulp.warnings)


def test_tied_state_dicts_match_in_every_form(family):
    """With lm_head or without it, from a model or from a file."""
    base, tool = loaded(family / "base").state_dict(), loaded(family / "tool").state_dict()
    from_file = {name: load_file(family / name / "model.safetensors") for name in ("base", "tool")}
    assert "lm_head.weight" in base
    assert "lm_head.weight" not in from_file["base"]
    expected, _ = merge_state_dicts(base, {"tool": tool})
    for one, other in ((base, from_file["tool"]), (from_file["base"], tool), (from_file["base"], from_file["tool"])):
        merged, _ = merge_state_dicts(one, {"tool": other})
        assert merged.keys() == one.keys()
        assert all(torch.equal(merged[n], expected[n]) for n in merged)


def test_what_is_not_a_state_dict_is_told_by_name(family):
    base = loaded(family / "base").state_dict()
    with pytest.raises(MergeInputError, match=r"agent 'a': 'model.norm.weight' is NoneType"):
        merge_state_dicts(base, {"a": base | {"model.norm.weight": None}})
    with pytest.raises(MergeInputError, match=r"agent 'a': it is list"):
        merge_state_dicts(base, {"a": []})
    with pytest.raises(MergeInputError, match=r"base: it holds no tensors"):
        merge_state_dicts({}, {"a": {}})


@pytest.mark.parametrize(
    "config",
    [
        MergeConfig(),
        PAPER,
        MergeConfig.preset("mergekit"),
        MergeConfig(ulp=True, weights={"tool": 0.5}),
        MergeConfig(method="ties"),
        MergeConfig(method="dare", seed=3),
    ],
    ids=lambda config: f"{config.method} {config.criterion} {config.rho}",
)
def test_equals_the_merge_in_memory_for_every_chunk_thread_count_and_file_size(family, config):
    expected = in_memory(family, config)
    for number, (chunk, threads, size) in enumerate([(97, 1, "1KB"), (1 << 20, 2, "20KB"), (1000, 5, "5GB")]):
        out = family / f"out{number}"
        merge(family / "base", agents_of(family), out, config, chunk=chunk, threads=threads, max_shard_size=size)
        held = loaded(out).state_dict()
        assert all(torch.equal(held[name], expected[name]) for name in expected)


def test_checksums_cover_every_file(family):
    merge(family / "base", agents_of(family), family / "out", max_shard_size="20KB")
    lines = (family / "out" / "SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split("  ")) for line in lines)
    contents = models.contents(family / "out")
    del contents["SHA256SUMS"]
    assert sums == {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def test_an_output_equal_to_the_base_although_entries_are_active_is_refused(tmp_path):
    """Steps of 1e-7 vanish when they are rounded to the base's bfloat16."""
    base = models.tiny_model(dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    for seed, name in enumerate(("tool", "code")):
        agent = models.tiny_model(dtype=torch.bfloat16).float()
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter *= 1 + 1e-6 * (seed + 1)
        agent.save_pretrained(tmp_path / name)
    text = str(MergeInputError(problems_of(tmp_path)))
    for words in ("entries are active", "equals the base bit for bit", "--dtype float32"):
        assert words in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "code", "tool"]
    merge(tmp_path / "base", agents_of(tmp_path), tmp_path / "wide", dtype="float32")
    nothing = MergeConfig(method="task_arithmetic", scale=0)
    merge(tmp_path / "base", agents_of(tmp_path), tmp_path / "zero", nothing)


def test_a_sign_of_zero_counts_as_a_difference(tmp_path):
    for name, value in {"base": 0.0, "tool": -0.0}.items():
        (tmp_path / name).mkdir()
        models.save_tensors(tmp_path / name, {"w": torch.full((3,), value)})
    merge(tmp_path / "base", {"tool": tmp_path / "tool"}, tmp_path / "out", MergeConfig(epsilon=0))
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].signbit().all()


def test_a_tilde_stands_for_the_home_folder(family, monkeypatch):
    monkeypatch.setenv("HOME", str(family))
    merge("~/base", {"tool": "~/tool", "code": Path("~/code")}, "~/out")
    assert (family / "out" / "model.safetensors").exists()
    assert probe("~/base", {"tool": "~/tool"}).agents["tool"].active


@pytest.mark.parametrize(
    ("options", "words"),
    [({"dtype": "fp8"}, "dtype is 'fp8'"), ({"device": "tpu"}, "device is 'tpu'"), ({"device": "cuda"}, "no GPU")],
)
def test_dtypes_and_devices_that_are_none_are_told(family, monkeypatch, options, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MergeInputError, match=words):
        merge(family / "base", agents_of(family), family / "out", **options)


def test_a_config_at_odds_with_the_weights_is_told_and_left(family):
    models.reconfigure(family / "base", dtype="bfloat16")
    report = merge(family / "base", agents_of(family), family / "out")
    assert any("config.json says bfloat16, but the weights are in float32" in told for told in report.warnings)
    assert json.loads((family / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_parts_of_a_composite_config_say_the_chosen_dtype_too(family):
    models.reconfigure(family / "base", text_config={"dtype": "float32"}, token_map={"dtype": 7})
    merge(family / "base", agents_of(family), family / "out", dtype="float16")
    config = json.loads((family / "out" / "config.json").read_text())
    assert (config["dtype"], config["text_config"], config["token_map"]) == (
        "float16",
        {"dtype": "float16"},
        {"dtype": 7},
    )


def test_outline_tells_what_a_merge_then_does(family):
    before = models.contents(family)
    told = outline(family / "base", agents_of(family), family / "out", max_shard_size="20KB", threads=1)
    assert models.contents(family) == before
    merge(family / "base", agents_of(family), family / "out", max_shard_size="20KB")
    assert told.files == {path.name: path.stat().st_size for path in (family / "out").glob("*.safetensors")}
    held = load_file(family / "base" / "model.safetensors")
    assert told.inputs == dict.fromkeys(("base", "code", "tool"), sum(tensor.nbytes for tensor in held.values()))
    assert (told.tensors, told.entries, told.threads) == (len(held), sum(t.numel() for t in held.values()), 1)
    assert told.seconds > 0


def test_a_config_that_says_its_dtype_by_part_says_the_chosen_one(family):
    models.reconfigure(family / "base", dtype={"": "float32"})
    merge(family / "base", {"tool": family / "tool"}, family / "out", dtype="bfloat16")
    assert json.loads((family / "out" / "config.json").read_text())["dtype"] == "bfloat16"
