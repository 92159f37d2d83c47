"""
LoRA agents over two ranks: DDP, DeepSpeed ZeRO-2 and ZeRO-3. Base and adapter of every rank after a merge have to be
what the simulator of DESIGN §5 computes from what they were before it, bit for bit.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ram_trl.continual.hub import Hub
from tests import lora, models
from tests.distributed.launching import deepspeed_config, end, finish, launch
from tests.distributed.test_shards import assert_same, state
from tests.simulator import Simulator, Weights

ADAPTER = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj", "up_proj"]}
RANK = 5
"""Of exported generalists."""
NORM = ADAPTER | {"modules_to_save": ["norm"]}
BIAS = ADAPTER | {"bias": "all"}
MIXED = {"stage3_param_persistence_threshold": 100, "sub_group_size": 4000}
LORA = ".lora_"


@dataclass(frozen=True)
class Case:
    """A layout, and how rounds go into the adapter."""

    stage: int | None
    bf16: bool = False
    mode: str = "fold"
    zero: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=lambda: ADAPTER)


QUICK = {"zero3-fp32": Case(3, zero=MIXED)}
ALL = {
    "ddp-fp32": Case(None),
    "ddp-fp32-svd": Case(None, mode="svd"),
    "zero2-fp32": Case(2),
    "zero2-bf16": Case(2, True),
    "zero2-fp32-svd": Case(2, mode="svd"),
    "zero3-bf16": Case(3, True, zero=MIXED),
    "zero3-fp32-svd": Case(3, mode="svd", zero=MIXED),
    "ddp-norm": Case(None, adapter=NORM),
    "ddp-bias-svd": Case(None, mode="svd", adapter=BIAS),
    "zero2-bf16-norm": Case(2, True, adapter=NORM),
    "zero2-bias": Case(2, adapter=BIAS),
    "zero3-norm-svd": Case(3, mode="svd", zero=MIXED, adapter=NORM),
    "zero3-bias": Case(3, zero=MIXED, adapter=BIAS),
}


def make_base(case: Case, folder: Path) -> None:
    (lora.llama(bias=True) if case.adapter is BIAS else models.tiny_model()).save_pretrained(folder / "base")
    models.tokenizer().save_pretrained(folder / "base")


def start(case: Case, folder: Path, training: dict[str, Any], **settings: Any) -> subprocess.Popen:
    settings = {"odd": False, "adapter": case.adapter, "ram": {"lora": case.mode, "export_rank": RANK}} | settings
    settings["training"] = {"bf16": case.bf16} | training
    config = None if case.stage is None else deepspeed_config(folder, case.stage, 2, case.zero, {})
    return launch(folder, settings, config, 2, module="tests.distributed.lora_agent")


def run(case: Case, folder: Path) -> None:
    make_base(case, folder)
    finish(start(case, folder, {"max_steps": 5}), folder)


def seen(folder: Path, when: str, rank: int, kind: str) -> Weights:
    held = load_file(folder / f"{when}-rank{rank}.safetensors")
    return {n.removeprefix(f"{kind} "): t for n, t in held.items() if n.startswith(f"{kind} ")}


def plain_name(name: str) -> str:
    return re.sub(r"^base_model\.model\.|\.base_layer|\.modules_to_save\.default", "", name)


def base_of(copies: Weights) -> Weights:
    return {plain_name(n): t for n, t in copies.items() if LORA not in n and ".original_module" not in n}


def whole(masters: Weights) -> Weights:
    """What is trained as it is: norms and biases."""
    return {plain_name(n): t for n, t in masters.items() if LORA not in n}


def change(masters: Weights) -> Weights:
    found = {}
    for name in masters:
        if ".lora_A." in name:
            layer = name.split(".lora_A.")[0].removeprefix("base_model.model.") + ".weight"
            b = masters[name.replace(".lora_A.", ".lora_B.")]
            found[layer] = (b * (ADAPTER["lora_alpha"] / ADAPTER["r"])) @ masters[name]
    return found


def check(case: Case, folder: Path) -> None:
    start = {n: p.detach() for n, p in AutoModelForCausalLM.from_pretrained(folder / "base").named_parameters()}
    start = {n: t.bfloat16().float() if case.bf16 else t for n, t in start.items()}
    low = torch.bfloat16 if case.bf16 else torch.float32
    simulator = Simulator(start)
    simulator.join("tool")
    loaded, earlier = start, {n: torch.zeros_like(t) for n, t in start.items()}
    for number, step in enumerate((2, 4), 1):
        masters = seen(folder, f"before-{step}", 0, "master")
        now, own = change(masters), whole(masters)
        assert any((t - earlier[n]).any() for n, t in now.items())  # it was trained
        assert all((t - loaded[n]).any() for n, t in own.items())
        assert bool(own) == (case.adapter is not ADAPTER)
        theta = {n: t + (now[n] - earlier[n]) if n in now else t for n, t in loaded.items()} | own
        simulator.agents["tool"].theta = theta
        simulator.publish("tool")
        simulator.close()
        simulator.load("tool")
        expected = simulator.agents["tool"].theta
        for name, tensor in state(folder, number).items():
            assert torch.equal(tensor, simulator.states[-1][name]), (number, name)
        for rank in range(2):
            for when in (f"after-{step}", f"before-{step + 1}"):  # a step later the base is still what was loaded
                held = base_of(seen(folder, when, rank, "copy"))
                for name, tensor in (expected if case.mode == "fold" else start).items():
                    if name not in own:
                        assert torch.equal(held[name], tensor.to(low)), (when, rank, name)
            held = whole(seen(folder, f"after-{step}", rank, "master"))
            for name in own:
                assert torch.equal(held[name], expected[name]), (rank, name)
            factors = seen(folder, f"after-{step}", rank, "master")
            assert all(torch.equal(t, seen(folder, f"after-{step}", 0, "master")[n]) for n, t in factors.items())
            copies = seen(folder, f"after-{step}", rank, "copy")
            assert all(torch.equal(copies[n].float(), t.to(copies[n].dtype).float()) for n, t in factors.items())
        loaded, earlier = expected, change(seen(folder, f"after-{step}", 0, "master"))
        if case.mode == "fold":
            assert not any(t.any() for t in earlier.values())
        else:
            assert lora.far(earlier, {n: expected[n] - start[n] for n in earlier}) < 0.7
        earlier = {n: earlier.get(n, torch.zeros_like(t)) for n, t in start.items()}
    check_export(folder, start, simulator.states[2])
    for rank in range(2):
        told = json.loads((folder / f"seen-rank{rank}.json").read_text())
        assert told["world"] == 2
        assert told["distributed"] == ("MULTI_CPU" if case.stage is None else "DEEPSPEED")
        assert {None: "unsharded", 2: "ZeRO-1/2", 3: "ZeRO-3"}[case.stage] in told["layout"]


@pytest.mark.parametrize("name", QUICK)
def test_base_and_adapter_after_a_merge_match_the_simulator_on_every_rank(tmp_path, name):
    run(QUICK[name], tmp_path)
    check(QUICK[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_layout_matches_the_simulator_on_every_rank(tmp_path, name):
    run(ALL[name], tmp_path)
    check(ALL[name], tmp_path)


def check_export(folder: Path, start: Weights, generalist: Weights) -> None:
    """TRAPS 3.13: an adapter that a job of several ranks leaves has its true shapes, and misses what it says."""
    exported = Hub(folder / "hub").generalist_folder(2)
    tensors = load_file(exported / "adapter_model.safetensors")
    assert all(
        RANK in t.shape and t.numel() for n, t in tensors.items() if n.endswith((".lora_A.weight", ".lora_B.weight"))
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    merged = PeftModel.from_pretrained(model, exported).merge_and_unload()
    held = {n: p.detach() - base[n] for n, p in merged.named_parameters()}
    error = json.loads((exported / "adapter_report.json").read_text())["error"]
    wanted = {n: t - start[n] for n, t in generalist.items()}
    assert lora.far({n: held[n] for n in wanted}, wanted) == pytest.approx(error, abs=1e-3)


RESUMED = ["ddp-fp32", "zero2-bf16", "zero2-fp32-svd", "zero2-bias", "zero3-fp32", "zero3-bf16", "zero3-norm-svd"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_killed_job_goes_on_from_its_checkpoint_as_if_nothing_had_happened(tmp_path, name):
    """Killed at step 4, before its second round; the newest checkpoint is of step 3, between two rounds."""
    case = (ALL | QUICK)[name]
    training = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    make_base(case, tmp_path)
    for folder in (broken, unbroken):
        shutil.copytree(tmp_path / "base", folder / "base")
    job = start(case, broken, training, die={"rank": 1, "step": 4})
    try:
        assert job.wait(200) != 0
    finally:
        end(job)
    assert len(Hub(broken / "hub").decisions()) == 1
    finish(start(case, broken, training, resume=str(broken / "out" / "checkpoint-3")), broken)
    finish(start(case, unbroken, training), unbroken)
    assert len(Hub(broken / "hub").decisions()) == len(Hub(unbroken / "hub").decisions()) >= 3
    for number in (1, 2, 3):
        assert_same(state(broken, number), state(unbroken, number), number)
    for when in ("before-4", "after-4", "after-5"):
        for rank in (0, 1):
            for kind in ("master", "copy"):
                assert_same(seen(broken, when, rank, kind), seen(unbroken, when, rank, kind), (when, rank, kind))
