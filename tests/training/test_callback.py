"""The callback in real trainers: GRPO, RLOO and SFT agents that merge while they train."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

import ram_trl
from ram_trl import MergeConfig
from ram_trl.continual.hub import Hub, HubError
from ram_trl.continual.rounds import Rounds
from ram_trl.continual.status import hub_status
from ram_trl.evaluate import Scorer
from ram_trl.team import Team
from ram_trl.training.turns import take_turns
from ram_trl.weights.live import LayoutError, LiveWeights
from tests import models

QUICK = {"heartbeat": 0.2, "patience": 30, "timeout": 60, "agents": ("code", "tool"), "on_hub_error": "raise"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    models.tiny_model().save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


def letters_of(agent: str):
    """A reward that tells the agents apart, and depends on nothing random."""
    favourite = {"tool": "a", "code": "e", "mem": "i"}[agent]

    def reward(completions: list[str], **columns) -> list[float]:
        return [completion.count(favourite) + 0.1 * len(set(completion)) for completion in completions]

    return reward


def trainer_of(agent: str, base: Path, out: Path, kind: str = "grpo", callbacks=(), **arguments):
    common = models.TRAINING | {
        "output_dir": str(out / agent),
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "seed": len(agent),
    }
    model = AutoModelForCausalLM.from_pretrained(base, dtype=arguments.pop("dtype", torch.float32))
    adapter = arguments.pop("peft_config", None)
    rollouts = {"num_generations": 4, "max_completion_length": 5}
    dataset = Dataset.from_dict({"prompt": ["ab", "cd", "ef", "gh"] * 8})
    if kind == "sft":
        text = Dataset.from_dict({"text": [f"{agent} abc", f"{agent} xyz"] * 16})
        config = SFTConfig(**(common | {"max_length": 16} | arguments))
        return SFTTrainer(
            model,
            config,
            train_dataset=text,
            processing_class=models.tokenizer(),
            callbacks=[*callbacks],
            peft_config=adapter,
        )
    kinds = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
    make, configure = kinds[kind]
    return make(
        model,
        letters_of(agent),
        args=configure(**(common | rollouts | arguments)),
        train_dataset=dataset,
        processing_class=models.tokenizer(),
        callbacks=[*callbacks],
        peft_config=adapter,
    )


def states(hub: Path) -> list[dict[str, torch.Tensor]]:
    opened = Hub(hub)
    rounds = Rounds(opened, Team(), opened.described()["identity"])
    found = []
    for number in range(len(opened.decisions()) + 1):
        state = rounds.state(number)
        found.append({n: state.read(n, 0, math.prod(state.shape(n))).reshape(state.shape(n)) for n in state.names()})
    return found


def together(base: Path, out: Path, kind: str = "grpo", merge_every: int = 2, training=(), **ram):
    """Two agents in turns; returns their trainers."""

    def work(agent: str):
        def run():
            trainer = trainer_of(agent, base, out, kind, **dict(training))
            ram_trl.attach(
                trainer,
                hub=out / "hub",
                agent=agent,
                base=base,
                merge_every=merge_every,
                **QUICK | {"keep_rounds": 99} | ram,
            )
            trainer.train()
            return trainer

        return run

    return take_turns({agent: work(agent) for agent in ("tool", "code")})


class Recorder(TrainerCallback):
    """Keeps the weights after every step end; placed after RAMCallback, it sees what the next step starts from."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen[state.global_step] = {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["grpo", "rloo", "sft"])
def test_agents_train_on_from_the_generalist(base, tmp_path, kind):
    trainers = together(base, tmp_path, kind, carry=False)
    hub = Hub(tmp_path / "hub")
    assert [[p.agent for p in d.publications] for d in hub.decisions()] == [["code", "tool"]] * 3
    # No fourth round: after the third was loaded nothing is left to merge, as nothing is carried.
    generalists = states(tmp_path / "hub")
    for one, other in itertools.pairwise(generalists):
        assert any(not torch.equal(one[n], other[n]) for n in one)
    for agent in trainers:
        log = [entry for entry in trainers[agent].state.log_history if "ram/density" in entry]
        assert log
        assert log[-1]["ram/lambda"] >= 1
    folder = hub.generalist_folder(hub.latest())
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert hub.latest() == 3
    assert all(torch.equal(exported[n], t) for n, t in generalists[-1].items())


def test_swapped_weights_are_the_state_and_survive_the_next_optimizer_step(base, tmp_path):
    recorders = {}

    def work(agent: str):
        def run():
            trainer = trainer_of(agent, base, tmp_path, learning_rate=1e-3)
            ram_trl.attach(
                trainer,
                hub=tmp_path / "hub",
                agent=agent,
                base=base,
                merge_every=2,
                carry=False,
                keep_rounds=99,
                **QUICK,
            )
            recorders[agent] = Recorder()
            trainer.add_callback(recorders[agent])
            trainer.train()

        return run

    take_turns({agent: work(agent) for agent in ("tool", "code")})
    generalists = states(tmp_path / "hub")
    for recorder in recorders.values():
        for number in (1, 2, 3):
            assert all(torch.equal(t, generalists[number][n]) for n, t in recorder.seen[2 * number].items())
        moved = [(recorder.seen[3][n] - generalists[1][n]).abs().max() for n in generalists[1]]
        assert 0 < max(moved) < 5e-3


def test_small_updates_reach_the_generalist_through_carry(base, tmp_path):
    """lr × steps per round stays below ε: nothing is active for some rounds, and then it is."""
    training = {"max_steps": 30, "learning_rate": 2e-5, "num_generations": 4}
    config = MergeConfig(epsilon=1.5e-4, r=0)
    together(base, tmp_path, merge_every=3, training=training, config=config)
    start, *_, end = states(tmp_path / "hub")
    reports = [
        json.loads((tmp_path / "hub" / "rounds" / f"round-{k:04d}" / "report.json").read_text()) for k in (1, 10)
    ]
    assert reports[0]["content"]["touched"] == 0
    assert any(not torch.equal(start[n], end[n]) for n in start)
    shutil.rmtree(tmp_path / "hub")
    together(base, tmp_path, merge_every=3, training=training, config=config, carry=False)
    start, *_, end = states(tmp_path / "hub")
    assert all(torch.equal(start[n], end[n]) for n in start)


def test_observing_agents_train_as_if_alone(base, tmp_path):
    observed = together(base, tmp_path, resync="none")
    generalists = states(tmp_path / "hub")
    assert len(generalists) > 2
    for agent, trainer in observed.items():
        alone = trainer_of(agent, base, tmp_path / "alone")
        alone.train()
        for name, parameter in alone.model.named_parameters():
            assert torch.equal(parameter, trainer.model.get_parameter(name)), (agent, name)


def test_agents_in_turns_equal_agents_alone_bit_for_bit(base, tmp_path):
    """With unequal clipping and accumulation: equal settings would hide a singleton that is not swapped."""
    settings = {"tool": {"max_grad_norm": 0.1}, "code": {"max_grad_norm": 10.0, "gradient_accumulation_steps": 2}}

    def work(agent: str, out: Path):
        def run():
            trainer = trainer_of(agent, base, out, **settings[agent])
            ram_trl.attach(
                trainer,
                hub=out / "hub",
                agent=agent,
                base=base,
                merge_every=2,
                resync="none",
                **QUICK | {"agents": ()},
            )
            trainer.train()
            return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}

        return run

    ring = take_turns({agent: work(agent, tmp_path / "ring") for agent in settings})
    for agent in settings:
        alone = take_turns({agent: work(agent, tmp_path / agent)})[agent]
        assert all(torch.equal(ring[agent][n], t) for n, t in alone.items())


def test_a_merge_inside_a_rollout_buffer_waits_for_its_end(base, tmp_path):
    """Rollouts are used for 4 steps, merges are due every 3: they happen at 4, 8, 12."""
    trainer = trainer_of("tool", base, tmp_path, max_steps=12, num_iterations=4)
    callback = ram_trl.attach(
        trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=3, **QUICK | {"agents": ()}
    )
    trainer.train()
    steps = [d.publications[0].step for d in callback.hub.decisions()]
    assert steps[:3] == [4, 8, 12]


def test_the_plain_callback_refuses_what_it_cannot_know(base, tmp_path):
    callback = ram_trl.RAMCallback(tmp_path / "hub", "tool", base, 2, **QUICK)
    trainer = trainer_of("tool", base, tmp_path, num_iterations=4, callbacks=[callback])
    with pytest.raises(ValueError, match=r"attach"):
        trainer.train()


def test_the_plain_callback_merges(base, tmp_path):
    callback = ram_trl.RAMCallback(tmp_path / "hub", "tool", base, 2, **QUICK | {"agents": ()})
    trainer_of("tool", base, tmp_path, callbacks=[callback]).train()
    assert len(callback.hub.decisions()) >= 3


def test_a_model_that_is_not_the_base_is_refused(base, tmp_path):
    models.tiny_model(seed=5).save_pretrained(tmp_path / "other")
    trainer = trainer_of("tool", base, tmp_path)
    ram_trl.attach(trainer, hub=tmp_path / "hub", agent="tool", base=tmp_path / "other", merge_every=2, **QUICK)
    with pytest.raises(HubError, match=r"does not start from the base .*entry \d+ of '"):
        trainer.train()


def test_pure_bf16_training_loses_nothing_to_rounding(base, tmp_path):
    together(base, tmp_path, training={"dtype": torch.bfloat16, "learning_rate": 1e-2})
    hub = Hub(tmp_path / "hub")
    assert hub.described()["founding"] == {"rounded": True}
    start, *_, end = states(tmp_path / "hub")
    assert all(torch.equal(t, t.bfloat16().float()) for t in start.values())
    assert any(not torch.equal(start[n], end[n]) for n in start)


def test_resuming_in_the_middle_of_a_round_equals_an_unbroken_run(base, tmp_path):
    """Killed at step 3 of rounds of 2 steps, resumed from its checkpoint: same rounds, same final weights."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                control.should_save = True
                control.should_training_stop = True

    def run(out: Path, broken: bool):
        def begin(agent: str):
            trainer = trainer_of(agent, base, out, max_steps=8)
            ram = QUICK | {"agents": ()}
            callback = ram_trl.attach(
                trainer, hub=out / "hub", agent=agent, base=base, merge_every=2, keep_rounds=99, **ram
            )
            return trainer, callback

        trainer, callback = begin("tool")
        if broken:
            trainer.add_callback(Stop())
            callback.on_train_end = lambda *args, **kwargs: callback._member.leave()  # the process dies: no last words
            trainer.train()
            callback._exporter.close()
            trainer, callback = begin("tool")
            trainer.train(resume_from_checkpoint=str(out / "tool" / "checkpoint-3"))
        else:
            trainer.train()
        return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}, states(out / "hub")

    weights, rounds = run(tmp_path / "unbroken", broken=False)
    resumed_weights, resumed_rounds = run(tmp_path / "broken", broken=True)
    assert len(rounds) == len(resumed_rounds) == 6
    for one, other in zip(rounds, resumed_rounds, strict=True):
        assert all(torch.equal(one[n], other[n]) for n in one)
    assert all(torch.equal(weights[n], resumed_weights[n]) for n in weights)


def test_a_checkpoint_without_our_state_is_refused_and_the_last_good_one_named(base, tmp_path):
    trainer = trainer_of("tool", base, tmp_path, save_strategy="steps", save_steps=2)
    ram_trl.attach(trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, **QUICK | {"agents": ()})
    trainer.train()
    path = tmp_path / "tool" / "checkpoint-6" / "trainer_state.json"
    held = json.loads(path.read_text())
    del held["stateful_callbacks"]["ram_trl"]
    path.write_text(json.dumps(held))
    again = trainer_of("tool", base, tmp_path, max_steps=8)
    ram_trl.attach(again, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, **QUICK | {"agents": ()})
    with pytest.raises(HubError, match=r"no state of agent 'tool'.*checkpoint-4"):
        again.train(resume_from_checkpoint=str(path.parent))


def test_a_second_run_over_an_old_hub_needs_resume(base, tmp_path):
    def run(**ram):
        trainer = trainer_of("tool", base, tmp_path, max_steps=2)
        ram_trl.attach(
            trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, **QUICK | {"agents": ()} | ram
        )
        trainer.train()

    run()
    with pytest.raises(HubError, match=r"agent 'tool' has been in .* before"):
        run()
    run(resume=True)


def test_every_generalist_is_scored_and_training_does_not_notice(base, tmp_path):
    class Watched(Scorer):
        """Keeps the weights it was asked to score."""

        def score(self, model, tokenizer):
            seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
            return super().score(model, tokenizer)

    def run(out: Path, scorer: Scorer | None):
        trainer = trainer_of("tool", base, out)
        ram = QUICK | {"agents": ()}
        ram_trl.attach(
            trainer, hub=out / "hub", agent="tool", base=base, merge_every=2, keep_rounds=99, scorer=scorer, **ram
        )
        trainer.train()
        return trainer

    seen: list[dict[str, torch.Tensor]] = []
    scorer = Watched("letters", ["ab", "cd", "e"], letters_of("tool"), max_new_tokens=4, batch_size=2)
    scored, plain = run(tmp_path / "scored", scorer), run(tmp_path / "plain", None)
    generalists = states(tmp_path / "scored" / "hub")
    assert len(seen) == 3
    for weights, generalist in zip(seen, generalists[1:4], strict=True):
        assert all(torch.equal(weights[n], generalist[n]) for n in generalist)
    logged = [entry["ram/eval/letters"] for entry in scored.state.log_history if "ram/eval/letters" in entry]
    assert len(logged) == 3
    status = hub_status(Hub(tmp_path / "scored" / "hub"))
    assert [row.scores for row in status.rounds[:3]] == [{"letters": score} for score in logged]
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(parameter, scored.model.get_parameter(name))


def test_the_next_rollout_pushes_the_merged_weights(base, tmp_path):
    """TRL pushes weights to vLLM once per global step; after a merge the tag must not say "pushed already"."""
    tags = []

    class Pushed(TrainerCallback):
        def __init__(self, trainer) -> None:
            self.trainer = trainer

        def on_step_end(self, args, state, control, **kwargs):
            tags.append(self.trainer._last_loaded_step)
            self.trainer._last_loaded_step = state.global_step  # as an evaluation at this step would

    trainer = trainer_of("tool", base, tmp_path)
    trainer._last_loaded_step = 0
    ram = QUICK | {"agents": ()}
    ram_trl.attach(trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, **ram)
    trainer.add_callback(Pushed(trainer))
    trainer.train()
    assert tags == [0, -1, 2, -1, 4, -1]


@pytest.mark.parametrize("restore", [False, True])
def test_resuming_works_whether_or_not_the_trainer_restores_callbacks(base, tmp_path, restore):
    """With the option on, transformers builds new callback objects; ours must be neither lost nor doubled."""

    def run(steps: int, checkpoint: str | None):
        trainer = trainer_of(
            "tool", base, tmp_path, max_steps=steps, save_strategy="steps", save_steps=2,
            restore_callback_states_from_checkpoint=restore,
        )  # fmt: skip
        ram = QUICK | {"agents": ()}
        ram_trl.attach(trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, keep_rounds=99, **ram)
        trainer.train(resume_from_checkpoint=checkpoint)

    run(4, None)
    before = len(Hub(tmp_path / "hub").decisions())
    run(8, str(tmp_path / "tool" / "checkpoint-4"))
    steps = [d.publications[0].step for d in Hub(tmp_path / "hub").decisions()]
    assert steps[before:] == [6, 8, 8]


def test_rotating_checkpoints_leaves_the_generalists_alone(base, tmp_path):
    training = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    together(base, tmp_path, training=training)
    hub = Hub(tmp_path / "hub")
    assert len(list((tmp_path / "tool").glob("checkpoint-*"))) == 1
    assert all(hub.generalist_folder(number).exists() for number in (1, 2, 3, 4))


def test_no_more_generalists_than_rounds_to_keep_are_left(base, tmp_path):
    """Exports come later than rounds, from processes of their own; in the end those count, too."""
    together(base, tmp_path, merge_every=1, keep_rounds=2)
    hub = Hub(tmp_path / "hub")
    newest = len(hub.decisions())
    assert newest > 4
    for kind, kept in {"generalist": [newest - 1, newest], "state": [0, newest - 1, newest]}.items():
        assert sorted(path.name for path in (hub.path / kind).glob("round-*")) == [f"round-{n:04d}" for n in kept]
    assert hub.latest() == newest


def test_adapters_where_they_are_not_understood_are_refused(base, tmp_path):
    """As in a model that holds a PEFT model; a PEFT model itself is another kind of weights."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(LayoutError, match=r"peft adapters .*lora_"):
        LiveWeights(torch.nn.ModuleDict({"policy": model}), Team())
