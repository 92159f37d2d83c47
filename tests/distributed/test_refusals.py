"""DeepSpeed engines that are laid out as was not shown to work: refused at attach, by name. One rank is enough."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ram_trl.team import Team
from ram_trl.weights.live import LayoutError, LiveWeights, trainers
from ram_trl.weights.live.zero3 import Zero3
from ram_trl.weights.live.zero12 import Zero12
from tests import models
from tests.distributed.sharded import without_compiling


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    without_compiling()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        yield
    dist.destroy_process_group()


def engine_of(stage: int, zero: dict[str, Any] | None = None, **settings: Any):
    import deepspeed

    model = models.tiny_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage} | (zero or {}),
        **settings,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def live(engine: Any) -> LiveWeights:
    return LiveWeights(engine.module, Team(), engine.optimizer)


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_with_fp32_masters_is_taken(stage):
    assert live(engine_of(stage, **BF16)).dtype("model.embed_tokens.weight") == torch.float32


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_is_refused(stage):
    with pytest.raises(LayoutError, match=r"fp16|FP16"):
        live(engine_of(stage, **FP16))


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_of_16_bits_are_refused(stage):
    half = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    with pytest.raises(LayoutError, match=r"masters are torch.bfloat16; switch bf16_master_weights_and_grads off"):
        live(engine_of(stage, **half))


def test_quantized_weights_are_refused():
    """DeepSpeed cannot quantize on the CPU; the parameters of a real engine get the mark of those that are."""
    engine = engine_of(3, **BF16)
    next(engine.module.parameters()).ds_tensor.ds_quant_scale = torch.ones(1)
    with pytest.raises(LayoutError, match=r"zero_quantized_weights"):
        live(engine)


# What this machine cannot start: a real engine that says of itself what such an engine says.
UNSTARTED = {
    "swap_optimizer": (True, r"NVMe; offload them to the CPU"),
    "params_in_nvme_and_cpu": (True, r"NVMe; offload them to the CPU"),
    "zero_hpz_partition_size": (2, r"hpZ keeps second copies \(zero_hpz_partition_size\); set it to 1"),
    "partial_offload": (0.5, r"offload_optimizer.ratio"),
    "zenflow": (True, r"ZenFlow"),
}


@pytest.mark.parametrize("attribute", UNSTARTED)
def test_engines_that_cannot_start_here_are_refused(attribute):
    engine = engine_of(3, **BF16)
    value, told = UNSTARTED[attribute]
    setattr(engine.optimizer, attribute, value)
    with pytest.raises(LayoutError, match=rf"^DeepSpeed ZeRO-3 cannot be merged while it trains: .*{told}"):
        live(engine)


@pytest.mark.parametrize(("stage", "layout"), [(2, Zero12), (3, Zero3)])
def test_parameters_that_are_split_over_a_part_of_the_ranks_are_refused(stage, layout):
    """As experts, tensor parallelism, sequence parallelism and MiCS do: the groups are smaller than the job."""
    engine = engine_of(stage, **BF16)
    parameters, job = dict(engine.module.named_parameters()), SimpleNamespace(world=2)
    with pytest.raises(LayoutError, match=r"are split over .*(MoE|MiCS)"):
        layout(parameters, engine.optimizer, job)


def test_everything_wrong_is_told_at_once():
    engine = engine_of(3, **BF16)
    engine.optimizer.swap_optimizer = engine.optimizer.zenflow = True
    with pytest.raises(LayoutError, match=r"NVMe.*; ZenFlow"):
        live(engine)


@pytest.mark.parametrize(("stage", "attribute"), [(2, "round_robin_bit16_groups"), (3, "grad_position")])
def test_a_deepspeed_that_keeps_its_shards_elsewhere_is_refused(stage, attribute):
    engine = engine_of(stage, **BF16)
    delattr(engine.optimizer, attribute)
    with pytest.raises(LayoutError, match=rf"has no {attribute}; .* 0.19.8 keeps them"):
        live(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_that_are_not_the_working_copies_are_refused(stage):
    """TRAPS 4.4: weights were loaded into one and not the other; merging would bring the old ones back."""
    engine = engine_of(stage, **BF16)
    name, parameter = next(iter(engine.module.named_parameters()))
    copy = parameter.ds_tensor if stage == 3 else parameter
    copy.data.view(-1)[5] = 3.0
    with pytest.raises(LayoutError, match=rf"entry 5 of '{name}' is .* in the fp32 masters and 3.0 in the working"):
        live(engine)


def test_a_parameter_that_the_optimizer_does_not_step_is_refused():
    engine = engine_of(2, **BF16)
    extra = torch.nn.Parameter(torch.zeros(3))
    engine.module.register_parameter("extra", extra)
    with pytest.raises(LayoutError, match=r"does not step extra"):
        live(engine)


class PolicyAndValue(nn.Module):
    """What TRL's PPOTrainer trains: two models in one."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value_model = models.tiny_model(), models.tiny_model()


def test_ppo_under_fsdp2_is_refused():
    both = PolicyAndValue()
    assert trainers.merged_part(both) is both.policy
    fully_shard(both, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(LayoutError, match=r"^PPO under FSDP2 was not shown to work; use DDP or DeepSpeed$"):
        trainers.merged_part(both)
