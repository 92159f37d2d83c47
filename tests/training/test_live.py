"""What a model in training is to the callback: its layouts, its reference model, its vLLM engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trl.trainer.grpo_trainer
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration

import ram_trl
from ram_trl.continual.hub import HubError
from ram_trl.team import Team
from ram_trl.weights.live import LayoutError, LiveWeights
from tests import models
from tests.training.test_callback import QUICK, states, trainer_of

ALONE = QUICK | {"agents": ()}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    models.tiny_model().save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- layouts ------------------------------------------------------------------------------------------------------


def test_dtypes_without_a_proof_are_refused():
    with pytest.raises(LayoutError, match=r"torch.float16 parameters \(such as 'model"):
        LiveWeights(models.tiny_model(dtype=torch.float16), Team())


def test_a_frozen_model_is_refused():
    model = models.tiny_model().requires_grad_(False)
    with pytest.raises(LayoutError, match="no trainable parameter"):
        LiveWeights(model, Team())


def test_fsdp1_is_refused_by_name(one_rank):
    sharded = FullyShardedDataParallel(models.tiny_model(), device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(LayoutError, match=r"FSDP1 .*fsdp_version to 2"):
        LiveWeights(sharded, Team())


def test_tensor_parallelism_is_refused_by_name(one_rank):
    model = models.tiny_model()
    plan = {f"model.layers.{i}.mlp.up_proj": ColwiseParallel() for i in (0, 1)}
    parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
    with pytest.raises(LayoutError, match=r"tensor parallelism.*up_proj"):
        LiveWeights(model, Team())


def test_fsdp2_without_fp32_shards_is_refused(one_rank):
    model = models.tiny_model(dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(LayoutError, match=r"bfloat16.*load the model in float32"):
        LiveWeights(model, Team())


def test_fsdp2_that_offloads_is_refused(one_rank):
    model = models.tiny_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(LayoutError, match=r"^FSDP2 cannot be merged while it trains: it offloads parameters"):
        LiveWeights(model, Team())


def test_fsdp2_that_replicates_shards_is_refused(one_rank):
    model = models.tiny_model()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    with pytest.raises(LayoutError, match=r"^FSDP2 cannot be merged .*otherwise than by rows .*HSDP"):
        LiveWeights(model, Team())


def test_an_optimizer_that_steps_copies_is_refused():
    """DeepSpeed's and others keep masters; merging into the parameters would be undone by the next step."""
    copies = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
    with pytest.raises(LayoutError, match=r"steps none of the model's parameters.*attach"):
        LiveWeights(models.tiny_model(), Team(), copies)


def test_parameters_are_found_by_name_whatever_wraps_them():
    """TRAPS 2.5: never by position."""
    model = models.tiny_model()
    live = LiveWeights(torch.compile(model), Team())
    assert live.names() == sorted(name for name, _ in model.named_parameters())
    first = live.names()[0]
    live.write(first, 1, torch.tensor([7.0]))
    live.commit()
    assert model.get_parameter(first).view(-1)[1] == 7


# ---- the reference model ------------------------------------------------------------------------------------------


class Watch(TrainerCallback):
    """Keeps the reference model's weights at every step end."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args, state, control, **kwargs):
        named = self.trainer.ref_model.named_parameters()
        self.seen[state.global_step] = {n: p.detach().clone() for n, p in named}


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("reference", ["keep", "generalist"])
def test_the_reference_model_follows_the_generalist_if_asked_to(base, tmp_path, kind, reference):
    trainer = trainer_of("tool", base, tmp_path, kind, beta=0.1)
    ram_trl.attach(
        trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, keep_rounds=99, reference=reference,
        **ALONE,
    )  # fmt: skip
    watch = Watch(trainer)
    trainer.add_callback(watch)
    trainer.train()
    generalists = states(tmp_path / "hub")
    for step, weights in watch.seen.items():
        number = step // 2 if reference == "generalist" else 0
        assert all(torch.equal(weights[n], t) for n, t in generalists[number].items()), step
    assert any(not torch.equal(generalists[1][n], t) for n, t in generalists[0].items())


def test_a_resumed_job_refers_to_the_round_it_had_loaded(base, tmp_path):
    def begin(steps: int):
        trainer = trainer_of("tool", base, tmp_path, beta=0.1, max_steps=steps, save_strategy="steps", save_steps=2)
        ram_trl.attach(
            trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, keep_rounds=99,
            reference="generalist", **ALONE,
        )  # fmt: skip
        watch = Watch(trainer)
        trainer.add_callback(watch)
        return trainer, watch

    begin(2)[0].train()
    trainer, watch = begin(3)
    trainer.train(resume_from_checkpoint=str(tmp_path / "tool" / "checkpoint-2"))
    newest = trainer.state.stateful_callbacks["ram_trl"]["tool"]["round"]
    assert newest >= 1
    assert all(torch.equal(watch.seen[3][n], t) for n, t in states(tmp_path / "hub")[newest].items())


def test_a_reference_that_cannot_follow_is_refused_by_name(base, tmp_path):
    arguments = {"hub": tmp_path / "hub", "agent": "tool", "base": base, "merge_every": 2, "reference": "generalist"}
    trainer = trainer_of("tool", base, tmp_path)
    ram_trl.attach(trainer, **arguments, **ALONE)
    with pytest.raises(ValueError, match=r"agent 'tool': reference=.*beta is 0"):
        trainer.train()
    trainer = trainer_of("tool", base, tmp_path, beta=0.1, callbacks=[ram_trl.RAMCallback(**arguments, **ALONE)])
    with pytest.raises(ValueError, match=r"agent 'tool': reference=.*attach"):
        trainer.train()
    trainer = trainer_of("tool", base, tmp_path, beta=0.1, sync_ref_model=True)
    ram_trl.attach(trainer, **arguments, **ALONE)
    with pytest.raises(ValueError, match=r"agent 'tool': reference=.*sync_ref_model"):
        trainer.train()
    trainer = trainer_of("tool", base, tmp_path, beta=0.1)
    ram_trl.attach(trainer, **arguments, resync="none", **ALONE)
    with pytest.raises(ValueError, match=r"agent 'tool': reference=.*observe"):
        trainer.train()


# ---- vLLM: a stand-in that records what TRL's own code loads into the engine ----------------------------------------


class Engine(VLLMGeneration):
    """TRL's generation with vLLM, without vLLM: weights are recorded, and drop when the engine sleeps."""

    pushed: list[dict[str, torch.Tensor]]
    generated_from: list[dict[str, torch.Tensor]]

    def _init_vllm(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self._llm_weights_sleeping = False
        self.generated_from = []

        def load_weights(weights):
            self.held.update({name: tensor.detach().clone() for name, tensor in weights})

        runner = SimpleNamespace(model=SimpleNamespace(load_weights=load_weights))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm = SimpleNamespace(
            llm_engine=SimpleNamespace(model_executor=worker),
            reset_prefix_cache=lambda: None,
            wake_up=lambda tags: None,
        )

    def generate(self, prompts, images, num_generations, profiler=None, **named):
        if self._llm_weights_sleeping:
            self.sync_weights()
        self.generated_from.append(dict(self.held))
        if self.enable_sleep_mode:
            self.held.clear()
            self._llm_weights_sleeping = True
        completions = [[3 + (i + len(self.generated_from)) % 20, 4 + i % 7] for i, _ in enumerate(prompts)]
        return prompts, completions, [[[0.0]] * len(c) for c in completions], None


class Weights(TrainerCallback):
    """Keeps the weights after every step end, when all callbacks have run."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.seen[state.global_step] = {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_next_rollout_of_vllm_uses_the_merged_weights(base, tmp_path, monkeypatch, sleeps):
    """After a merge and after resuming; TRAPS 2.8, 2.9 (vLLM itself did not run)."""
    monkeypatch.setattr(trl.trainer.grpo_trainer, "VLLMGeneration", Engine)

    def begin(steps: int):
        trainer = trainer_of(
            "tool", base, tmp_path, max_steps=steps, use_vllm=True, vllm_mode="colocate",
            vllm_importance_sampling_correction=False, save_strategy="steps", save_steps=2,
            vllm_enable_sleep_mode=sleeps,
        )  # fmt: skip
        ram_trl.attach(
            trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, keep_rounds=99, carry=False, **ALONE
        )
        weights = Weights()
        trainer.add_callback(weights)
        return trainer, weights

    trainer, weights = begin(4)
    trainer.train()
    generalists = states(tmp_path / "hub")
    used = trainer.vllm_generation.generated_from
    assert len(used) == 4
    for step, held in enumerate(used):
        assert all(torch.equal(held[n], t) for n, t in weights.seen[step].items()), step
    assert all(torch.equal(used[2][n], t) for n, t in generalists[1].items())
    assert any(not torch.equal(used[2][n], t) for n, t in used[1].items())

    trainer, weights = begin(5)
    trainer.train(resume_from_checkpoint=str(tmp_path / "tool" / "checkpoint-4"))
    first = trainer.vllm_generation.generated_from[0]
    assert all(torch.equal(first[n], t) for n, t in weights.seen[4].items())


def test_weights_are_pushed_again_after_an_evaluation_at_the_same_step(base, tmp_path, monkeypatch):
    """TRAPS 2.7: an evaluation at this step made TRL take the engine for up to date; the merge tells it otherwise."""
    monkeypatch.setattr(trl.trainer.grpo_trainer, "VLLMGeneration", Engine)
    trainer = trainer_of(
        "tool", base, tmp_path, max_steps=3, use_vllm=True, vllm_mode="colocate",
        vllm_importance_sampling_correction=False,
    )  # fmt: skip

    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer._last_loaded_step = state.global_step  # as after an evaluation's rollouts

    trainer.add_callback(Evaluates())
    ram_trl.attach(
        trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, keep_rounds=99, carry=False, **ALONE
    )
    trainer.train()
    last = trainer.vllm_generation.generated_from[-1]
    assert all(torch.equal(last[n], t) for n, t in states(tmp_path / "hub")[1].items())


# ---- checkpoints and second runs ------------------------------------------------------------------------------------


def test_a_checkpoint_of_a_step_with_a_merge_holds_the_merged_weights(base, tmp_path):
    """TRAPS 2.7, 2.16: the merge comes before the checkpoint of its step is written."""
    trainer = trainer_of("tool", base, tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    ram_trl.attach(
        trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, keep_rounds=99, carry=False, **ALONE
    )
    trainer.train()
    generalists = states(tmp_path / "hub")
    for number in (1, 2):
        saved = load_file(tmp_path / "tool" / f"checkpoint-{2 * number}" / "model.safetensors")
        assert all(torch.equal(saved[name], tensor) for name, tensor in generalists[number].items())


def test_a_trainer_that_is_used_a_second_time_is_refused_by_name(base, tmp_path):
    """TRAPS 2.11: it is neither the base nor at a checkpoint, so what it carries cannot be known."""
    trainer = trainer_of("tool", base, tmp_path, max_steps=2)
    callback = ram_trl.attach(trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, **ALONE)
    trainer.train()
    rounds = len(callback.hub.decisions())
    with pytest.raises(HubError, match=r"agent 'tool' does not start from the base"):
        trainer.train()
    assert len(callback.hub.decisions()) == rounds
