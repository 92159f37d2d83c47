"""What a rank will need, before anything runs: weights, gradients, optimizer states, reference, by layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ram_trl.recipe import AgentSection
from ram_trl.runs.hardware import Hardware
from ram_trl.runs.jobs import Job, Plan, known_args

GB = 1e9
FP32, BF16 = 4, 2
ADAM = 2 * FP32
CHUNKS = 0.1e9
"""Bytes that merging needs in passing, whatever the model: chunks are merged one after another."""


@dataclass(frozen=True)
class Sizes:
    """Parameters of an agent: all, and those it trains."""

    all: int
    trained: int


@dataclass(frozen=True)
class Estimate:
    """
    Bytes that one rank of a job needs on its device and in the host's memory.

    Args:
        device (`float`), host (`float`):
            In all.
        common (`float`, *optional*):
            Those on the device that agents of one job have in common: the base under their adapters.
    """

    device: float
    host: float
    common: float = 0.0

    def __str__(self) -> str:
        device = f"{self.device / GB:.2f} GB on the device, " if self.device else ""  # none on the CPU
        return f"{device}{self.host / GB:.2f} GB of host memory"


def estimate(plan: Plan, job: Job) -> Estimate | str:
    """
    What one rank of a job needs for weights, gradients, optimizer states and reference models.

    Activations, logits and vLLM's cache come on top: they depend on what is generated.

    Returns:
        `Estimate` or `str`: or why it cannot be told.
    """
    agents = [agent for agent in plan.recipe.agents if agent.name in job.agents]
    found = []
    for agent in agents:
        sizes = sizes_of(plan, agent)
        if isinstance(sizes, str):
            return sizes
        found.append(_of_agent(plan, agent, sizes, job.processes))
    parks = plan.recipe.launch.park
    own = [e.device - e.common for e in found]
    device = (max(own) if parks else sum(own)) + max(e.common for e in found)
    host = sum(e.host for e in found)
    if parks and len(found) > 1:
        host += sum(own) - min(own)
    if plan.hardware.on_cpu:
        return Estimate(0.0, device + host + CHUNKS)
    return Estimate(device + CHUNKS, host)


def sizes_of(plan: Plan, agent: AgentSection) -> Sizes | str:
    """Parameters of an agent, counted without making one; a sentence if the model's config is not at hand."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

    base = plan.recipe.base
    config: PretrainedConfig
    if base.config:
        values: dict[str, Any] = dict(base.config)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    elif base.make is not None:
        made = plan.out / "base"
        if not made.is_dir():
            return f"not known before {base.make} has made the base, unless its config is given as base.config"
        config = AutoConfig.from_pretrained(made)
    else:
        try:
            config = AutoConfig.from_pretrained(base.model, revision=base.revision)
        except (OSError, ValueError):
            return f"not known: the config of {base.model} is not at hand; give it as base.config"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        every = sum(parameter.numel() for parameter in model.parameters())
        if agent.peft is None:
            return Sizes(every, every)
        from peft import LoraConfig, get_peft_model

        lora = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **agent.peft}))
        trained = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    return Sizes(every, trained)


def _of_agent(plan: Plan, agent: AgentSection, sizes: Sizes, ranks: int) -> Estimate:
    hardware: Hardware = plan.hardware
    stage, kind = hardware.stage, hardware.kind
    mixed = kind == "DEEPSPEED" and hardware.precision == "bf16"
    # TRL loads fp32; autocast keeps no second copy, DeepSpeed casts and keeps fp32 masters of what is trained.
    bytes_each = BF16 if mixed or _stored_in_16_bits(agent) else FP32
    cut = ranks if kind == "FSDP" or stage == 3 else 1
    weights = sizes.all * bytes_each / cut
    gradients = sizes.trained * bytes_each / (ranks if kind == "FSDP" or stage >= 2 else 1)
    states = sizes.trained * (ADAM + (FP32 if kind == "DEEPSPEED" else 0)) / (
        ranks if kind == "FSDP" or stage >= 1 else 1
    )  # fmt: skip
    beta = float((known_args(agent.trainer) | agent.args).get("beta", 0.0) or 0.0)
    reference = sizes.all * bytes_each / cut if agent.peft is None and (beta > 0 or agent.trainer == "ppo") else 0.0
    device, host, common = weights + gradients + reference, 0.0, 0.0
    if agent.peft is not None:
        frozen = (sizes.all - sizes.trained) / cut
        host += frozen * FP32  # what was loaded, beside what the device computes with
        svd = plan.recipe.continual is not None and plan.recipe.continual.lora == "svd"
        common = 0.0 if svd and agent.args.get("use_vllm") else frozen * bytes_each
    if agent.trainer == "ppo":
        # The critic is trained, too, and a reward model is held.
        device += 2 * weights + sizes.all * bytes_each / (ranks if stage >= 2 else 1)
        states += sizes.all * (ADAM + (FP32 if kind == "DEEPSPEED" else 0)) / (ranks if stage >= 1 else 1)
    if hardware.offloads:
        host += states
    else:
        device += states
    return Estimate(device, host, common)


def _stored_in_16_bits(agent: AgentSection) -> bool:
    dtype = str((agent.args.get("model_init_kwargs") or {}).get("dtype", "float32"))
    return dtype.removeprefix("torch.") in ("bfloat16", "float16")


def vllm_share(agent: AgentSection) -> float | None:
    """Share of the device that colocated vLLM takes; `None` without it."""
    args = known_args(agent.trainer) | agent.args
    if not args.get("use_vllm") or args["vllm_mode"] != "colocate":
        return None
    return float(args["vllm_gpu_memory_utilization"])
