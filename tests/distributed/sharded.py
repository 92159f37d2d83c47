"""
One agent of a run as a job of several ranks: `… -m tests.distributed.sharded FOLDER SETTINGS`, settings as JSON.

Every rank writes what it sees before and after every merge to FOLDER: whole parameters, gathered by the engines' own
means and not by ours. The step after a merge is made with learning rate 0.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import ram_trl
from ram_trl.evaluate import Scorer
from tests import models
from tests.distributed.odd import load_odd
from tests.ppo import ppo_trainer

Weights = dict[str, torch.Tensor]


def without_compiling() -> None:
    """DeepSpeed's shared-memory collectives take a minute to compile; plain gloo gives the same sums."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def fsdp_on_the_cpu() -> None:
    """Accelerate prepares FSDP only where it believes in GPUs."""
    begin = PartialState.__init__

    def init(self: PartialState, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        if self.__dict__.get("distributed_type") == DistributedType.MULTI_CPU:
            self.__dict__["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = init


def whole_copies(model: torch.nn.Module, frozen: bool = False) -> Weights:
    """The trainable (or all) working parameters, whole, as the next forward pass would read them. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad or frozen):
            continue
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.data.clone()
        elif hasattr(parameter, "full_tensor"):
            found[name] = parameter.full_tensor().detach().clone()
        else:
            found[name] = parameter.data.clone()
    return found


def whole_masters(model: torch.nn.Module, optimizer: Any) -> Weights:
    """The trainable parameters as the optimizer keeps them, whole. Collective."""
    inner = getattr(optimizer, "optimizer", optimizer)
    found = {}
    if type(inner).__name__ == "FP16_UnfusedOptimizer":
        high = {id(low): high for lows, highs in zip(inner.fp16_groups, inner.fp32_groups, strict=True)
                for low, high in zip(lows, highs, strict=True)}  # fmt: skip
        return {n: high[id(p)].detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")):
            from deepspeed.utils import safe_get_full_fp32_param

            found[name] = (
                safe_get_full_fp32_param(parameter)
                .detach()
                .clone()
                .view(getattr(parameter, "ds_shape", parameter.shape))
            )
    return found or whole_copies(model)


def moments(optimizer: Any) -> torch.Tensor:
    """Sum of this rank's Adam moments, and the highest step count, as the innermost optimizer keeps them."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    states = optimizer.state.values()
    held = [
        getattr(state[name], "_local_tensor", state[name]) for state in states for name in ("exp_avg", "exp_avg_sq")
    ]
    steps = [float(state["step"]) for state in states]
    return torch.tensor([sum(float(m.abs().double().sum()) for m in held), max(steps, default=0.0)]).double()


class Recorder(TrainerCallback):
    """Writes whole weights to the folder at every merge; two of them stand around `RAMCallback`."""

    def __init__(self, folder: Path, when: str, every: int, reference: torch.nn.Module | None = None) -> None:
        self.folder, self.when, self.every, self.reference = folder, when, every, reference

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        write(self.folder, f"{self.when}-begin", model, optimizer)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step % self.every == 0:
            write(self.folder, f"{self.when}-{state.global_step}", model, optimizer, self.reference)


class StandStill(TrainerCallback):
    """Makes the step after every merge one with learning rate 0 and writes what is there then."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every, self.rates = folder, every, []

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        if state.global_step % self.every == 0:
            self.rates = list(lr_scheduler.base_lrs)
            self.set(optimizer, lr_scheduler, [0.0] * len(self.rates))
        elif self.rates:
            write(self.folder, f"still-{state.global_step - 1}", model, optimizer)
            self.set(optimizer, lr_scheduler, self.rates)
            self.rates = []

    def set(self, optimizer, schedule, rates):
        schedule.base_lrs = list(rates)
        while hasattr(optimizer, "param_groups"):
            for group, rate in zip(optimizer.param_groups, rates, strict=False):
                group["lr"] = rate
            optimizer = getattr(optimizer, "optimizer", None)


def write(
    folder: Path, name: str, model: torch.nn.Module, optimizer: Any, reference: torch.nn.Module | None = None
) -> None:
    value_model = getattr(model, "value_model", None)
    policy = model.policy if value_model is not None else model
    copies, masters = whole_copies(policy), whole_masters(policy, optimizer)
    tensors = {f"copy {n}": t.contiguous() for n, t in copies.items()}
    tensors |= {f"master {n}": t.contiguous() for n, t in masters.items()}
    if value_model is not None:
        tensors |= {f"value {n}": t.contiguous() for n, t in whole_masters(value_model, optimizer).items()}
    tensors["moments"] = moments(optimizer)
    if reference is not None:
        found = whole_copies(reference, frozen=True)
        tensors |= {f"reference {n.removeprefix('module.')}": t.contiguous() for n, t in found.items()}
    rank = dist.get_rank() if dist.is_initialized() else 0
    save_file(tensors, folder / f"{name}-rank{rank}.safetensors")


class Spy:
    """Counts the gathers of engines while a merge is made, those of `commit` apart."""

    def __init__(self) -> None:
        self.counts = {"merge": 0, "commit": 0}
        self.where = ""

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        before, self.where = self.where, where
        try:
            yield
        finally:
            self.where = before

    def watch(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            if self.where:
                self.counts[self.where] += 1
            return real(*arguments, **named)

        setattr(owner, name, counted)

    def place(self, callback: ram_trl.RAMCallback) -> None:
        import deepspeed
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        from ram_trl.continual.member import Member
        from ram_trl.weights.live import LiveWeights

        for name in ("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "broadcast", "allgather_fn"):
            self.watch(deepspeed.comm, name)
        for name in ("all_gather_into_tensor", "all_gather", "broadcast"):
            self.watch(dist, name)
        self.watch(deepspeed.zero.GatheredParameters, "__enter__")
        self.watch(DTensor, "full_tensor")
        self.watch(FSDPModule, "unshard")
        self.within(Member, "meet", "merge")
        self.within(LiveWeights, "commit", "commit")

    def within(self, owner: type, name: str, where: str) -> None:
        real: Callable = getattr(owner, name)

        def run(*arguments: Any, **named: Any) -> Any:
            with self.at(where):
                return real(*arguments, **named)

        setattr(owner, name, run)


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [completion.count("a") + 0.1 * len(set(completion)) for completion in completions]


class Die(TrainerCallback):
    """Kills a rank at the end of a step, before its merge, after the checkpoint of the step before was written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def fail_in(where: str) -> None:
    """A call there, in this rank's second merge, raises: the third block, or the removal of old rounds."""
    from ram_trl.continual.hub import Hub
    from ram_trl.continual.member import Member
    from ram_trl.weights.live import LiveWeights
    from ram_trl.weights.sparse import BlockWriter

    places = {
        "count": (LiveWeights, "read", 3),
        "publish": (BlockWriter, "add", 3),
        "load": (LiveWeights, "write", 3),
        "sweep": (Hub, "sweep", 1),
    }
    owner, method, at = places[where]
    real, meet = getattr(owner, method), Member.meet
    meetings, calls = itertools.count(1), iter(())

    def met(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls = itertools.count(1) if next(meetings) == 2 else iter(())
        return meet(*arguments, **named)

    def failing(*arguments: Any, **named: Any) -> Any:
        if next(calls, 0) == at:
            raise OSError("the disk of this rank is gone")
        return real(*arguments, **named)

    Member.meet = met
    setattr(owner, method, failing)


def make_trainer(folder: Path, settings: dict[str, Any]):
    base = settings.get("base", folder / "base")
    if settings.get("kind") == "ppo":
        # The arguments before the models: they tell transformers that DeepSpeed will shard those.
        return ppo_trainer(lambda: load_odd(base), base, folder / "out", **settings.get("training", {}))
    kinds = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
    make, configure = kinds[settings.get("kind", "grpo")]
    # Before the model: it tells transformers that DeepSpeed will shard it.
    arguments = configure(
        **models.TRAINING
        | {
            "output_dir": str(folder / "out"),
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 5,
            "seed": 3,
        }
        | settings.get("training", {})
    )
    adapter = {"peft_config": LoraConfig(**settings["adapter"])} if "adapter" in settings else {}
    torch.manual_seed(7)
    return make(
        load_odd(base) if settings.get("odd", True) else AutoModelForCausalLM.from_pretrained(base),
        letters,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cd", "ef", "gh"] * 16}),
        processing_class=models.tokenizer(),
        **adapter,
    )


def save_policy(trainer: Any, folder: Path) -> None:
    """PPOTrainer.save_model fails under DeepSpeed and DDP; this is the way round that the README tells. Collective."""
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        policy = {n.removeprefix("policy."): t for n, t in weights.items() if n.startswith("policy.")}
        trainer.accelerator.unwrap_model(trainer.model).policy.save_pretrained(folder, state_dict=policy)


def prepare() -> None:
    """What CPU ranks need before a trainer is made."""
    torch.set_num_threads(1)
    without_compiling()
    if os.environ.get("ACCELERATE_USE_FSDP"):
        fsdp_on_the_cpu()


def main(folder: Path, settings: dict[str, Any]) -> None:
    prepare()
    trainer = make_trainer(folder, settings)
    ram = {"hub": folder / "hub", "agent": "tool", "base": settings.get("base", folder / "base"), "merge_every": 2,
           "keep_rounds": 99, "heartbeat": 0.2, "patience": 60, "timeout": 100, "on_hub_error": "raise"}  # fmt: skip
    ram |= settings.get("ram", {})
    if settings.get("scored"):
        ram["scorer"] = Scorer("letters", ["ab", "cd", "e"], letters, max_new_tokens=4, batch_size=2)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if settings.get("die", {}).get("rank") == rank:
        trainer.add_callback(Die(settings["die"]["step"]))
    trainer.add_callback(Recorder(folder, "before", settings.get("record", ram["merge_every"])))
    if settings.get("attach", True):
        callback = ram_trl.attach(trainer, **ram)
    else:
        callback = ram_trl.RAMCallback(**ram)
        trainer.add_callback(callback)
    trainer.add_callback(Recorder(folder, "after", ram["merge_every"], getattr(trainer, "ref_model", None)))
    if settings.get("still", True):
        trainer.add_callback(StandStill(folder, ram["merge_every"]))
    spy = Spy()
    spy.place(callback)
    if settings.get("fail", {}).get("rank") == rank:
        fail_in(settings["fail"]["where"])
    try:
        if settings.get("kind") == "ppo":
            trainer.train()
        else:
            trainer.train(resume_from_checkpoint=settings.get("resume"))
    except (OSError, RuntimeError, ValueError) as error:
        (folder / f"error-rank{rank}.json").write_text(json.dumps(f"{type(error).__name__}: {error}"))
        write(folder, "error", trainer.callback_handler.model, trainer.callback_handler.optimizer)
        raise
    if settings.get("kind") == "ppo":
        save_policy(trainer, folder / "saved")
    else:
        trainer.save_model(str(folder / "saved"))
    seen = {
        "world": dist.get_world_size() if dist.is_initialized() else 1,
        "distributed": str(AcceleratorState().distributed_type).rsplit(".", 1)[-1],
        "layout": callback._live.title,
        "gathers": spy.counts,
        "held": [[span.name, span.start, span.stop] for span in callback._live.held()],
    }
    (folder / f"seen-rank{rank}.json").write_text(json.dumps(seen))
    if dist.is_initialized():  # at interpreter exit gloo's threads may abort the process
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
