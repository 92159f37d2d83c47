"""
LoRA agents over two ranks: DDP, DeepSpeed ZeRO-2 and ZeRO-3. Base and adapter of every rank after a merge have to be
what the simulator of DESIGN §5 computes from what they were before it, bit for bit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import lora, models
from tests.distributed.launching import deepspeed_config, finish, launch
from tests.distributed.test_shards import state
from tests.simulator import Simulator, Weights

ADAPTER = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj", "up_proj"]}
MIXED = {"stage3_param_persistence_threshold": 100, "sub_group_size": 4000}
LORA = ".lora_"


@dataclass(frozen=True)
class Case:
    """A layout, and how rounds go into the adapter."""

    stage: int | None
    bf16: bool = False
    mode: str = "fold"
    zero: dict[str, Any] = field(default_factory=dict)


QUICK = {"zero3-fp32": Case(3, zero=MIXED)}
ALL = {
    "ddp-fp32": Case(None),
    "ddp-fp32-svd": Case(None, mode="svd"),
    "zero2-fp32": Case(2),
    "zero2-bf16": Case(2, True),
    "zero2-fp32-svd": Case(2, mode="svd"),
    "zero3-bf16": Case(3, True, zero=MIXED),
    "zero3-fp32-svd": Case(3, mode="svd", zero=MIXED),
}


def run(case: Case, folder: Path) -> None:
    models.tiny_model().save_pretrained(folder / "base")
    models.tokenizer().save_pretrained(folder / "base")
    settings = {"odd": False, "adapter": ADAPTER, "ram": {"lora": case.mode}}
    settings["training"] = {"bf16": case.bf16, "max_steps": 5}
    config = None if case.stage is None else deepspeed_config(folder, case.stage, 2, case.zero, {})
    finish(launch(folder, settings, config, 2, module="tests.distributed.lora_agent"), folder)


def seen(folder: Path, when: str, rank: int, kind: str) -> Weights:
    held = load_file(folder / f"{when}-rank{rank}.safetensors")
    return {n.removeprefix(f"{kind} "): t for n, t in held.items() if n.startswith(f"{kind} ")}


def base_of(copies: Weights) -> Weights:
    plain = {n.removeprefix("base_model.model.").replace(".base_layer", ""): t for n, t in copies.items()}
    return {n: t for n, t in plain.items() if LORA not in n}


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
        now = change(seen(folder, f"before-{step}", 0, "master"))
        assert any((t - earlier[n]).any() for n, t in now.items())  # it was trained
        simulator.agents["tool"].theta = {n: t + (now[n] - earlier[n]) if n in now else t for n, t in loaded.items()}
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
                    assert torch.equal(held[name], tensor.to(low)), (when, rank, name)
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
