"""PPO agents (TRL 1.12): the policy is merged, the value model never. Run by `make test-ppo`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

import ram_trl
from ram_trl.continual.hub import Hub, HubError
from ram_trl.evaluate import Scorer
from ram_trl.training import turns
from ram_trl.training.turns import _ProcessState, take_turns
from ram_trl.weights.live import LayoutError
from tests import models, ring
from tests.ppo import judge, ppo_trainer
from tests.training.test_callback import QUICK, letters_of, states, trainer_of

pytestmark = pytest.mark.ppo

ALONE = QUICK | {"agents": ()}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    models.tiny_model().save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


def policy_of(base: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Watch(TrainerCallback):
    """Keeps policy and value model at every step end; the step after a merge is made with learning rate 0."""

    def __init__(self, still_after: int | None = None) -> None:
        self.policy: dict[int, dict[str, torch.Tensor]] = {}
        self.value: dict[int, dict[str, torch.Tensor]] = {}
        self.still_after = still_after

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        self.policy[state.global_step] = weights(model.policy)
        self.value[state.global_step] = weights(model.value_model)
        if self.still_after is not None:
            rate = 0.0 if state.global_step == self.still_after else args.learning_rate
            lr_scheduler.base_lrs = [rate] * len(lr_scheduler.base_lrs)
            for group in optimizer.param_groups:
                group["lr"] = rate


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_ppo_and_a_grpo_agent_train_on_from_the_same_generalists(base, tmp_path):
    """The value model is not in the hub, and no merge touches it; the policy keeps what was merged into it."""
    before, after = Watch(), Watch(still_after=2)

    def ppo():
        trainer = ppo_trainer(lambda: policy_of(base), base, tmp_path / "tool", callbacks=[before])
        ram_trl.attach(
            trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, carry=False, keep_rounds=99, **QUICK
        )
        trainer.add_callback(after)
        trainer.train()
        return trainer

    def grpo():
        trainer = trainer_of("code", base, tmp_path)
        ram_trl.attach(
            trainer, hub=tmp_path / "hub", agent="code", base=base, merge_every=2, carry=False, keep_rounds=99, **QUICK
        )
        trainer.train()

    trainers = take_turns({"tool": ppo, "code": grpo})
    hub = Hub(tmp_path / "hub")
    assert [[p.agent for p in d.publications] for d in hub.decisions()] == [["code", "tool"]] * 3
    generalists = states(tmp_path / "hub")
    assert generalists[0].keys() == weights(policy_of(base)).keys()
    for number in (1, 2, 3):
        assert_same(after.policy[2 * number], generalists[number])
    for step in range(1, 7):
        assert_same(after.value[step], before.value[step])
    assert_same(after.policy[3], generalists[1])  # the step at rate 0
    assert_same(after.value[3], before.value[2])
    assert any(not torch.equal(after.policy[4][n], before.policy[3][n]) for n in generalists[1])
    assert any(not torch.equal(after.value[1][n], after.value[2][n]) for n in after.value[1])  # the critic learns
    log = [entry for entry in trainers["tool"].state.log_history if "ram/density" in entry]
    assert len(log) == 4
    assert_same(weights(AutoModelForCausalLM.from_pretrained(hub.generalist_folder(3))), generalists[3])


def test_the_plain_callback_merges_ppo_where_it_is_enough(base, tmp_path):
    callback = ram_trl.RAMCallback(tmp_path / "hub", "tool", base, 2, **ALONE)
    ppo_trainer(lambda: policy_of(base), base, tmp_path / "tool", callbacks=[callback], max_steps=4).train()
    assert len(callback.hub.decisions()) >= 2


def test_the_reference_policy_may_follow_the_generalist(base, tmp_path):
    trainer = ppo_trainer(lambda: policy_of(base), base, tmp_path / "tool", max_steps=4)
    ram_trl.attach(
        trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, keep_rounds=99, reference="generalist",
        **ALONE,
    )  # fmt: skip
    seen = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen[state.global_step] = weights(trainer.ref_model)

    trainer.add_callback(Keep())
    trainer.train()
    generalists = states(tmp_path / "hub")
    for step in (1, 2, 3, 4):
        assert_same(seen[step], generalists[step // 2])


def test_the_policy_is_scored_and_not_its_value_model(base, tmp_path):
    scored = []

    class Watched(Scorer):
        def score(self, model, tokenizer):
            scored.append(weights(model))
            return super().score(model, tokenizer)

    scorer = Watched("letters", ["ab", "cd"], letters_of("tool"), max_new_tokens=4)
    trainer = ppo_trainer(lambda: policy_of(base), base, tmp_path / "tool", max_steps=2)
    ram_trl.attach(
        trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, keep_rounds=99, scorer=scorer, **ALONE
    )
    trainer.train()
    (seen,) = scored
    assert_same(seen, states(tmp_path / "hub")[1])
    assert any("ram/eval/letters" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("park", [False, True], ids=["", "parked"])
def test_turns_leave_no_trace(base, tmp_path, park):
    alone = ring.run(["tool"], base, tmp_path, "ppo") | ring.run(["code"], base, tmp_path, "ppo")
    assert alone["tool"] != alone["code"]
    assert ring.run(ring.UNLIKE, base, tmp_path, "ppo", park=park) == alone


def test_without_own_singletons_a_ppo_agent_sees_the_other_s_accumulation(base, tmp_path, monkeypatch):
    alone = ring.run(["tool"], base, tmp_path, "ppo")
    real = _ProcessState.show

    def show(self: _ProcessState) -> None:
        held = dict(turns.GradientState._shared_state)
        real(self)
        turns.GradientState._shared_state.clear()
        turns.GradientState._shared_state.update(held)

    monkeypatch.setattr(_ProcessState, "show", show)
    assert ring.run(ring.UNLIKE, base, tmp_path, "ppo")["tool"] != alone["tool"]


def test_a_value_model_that_shares_the_policy_s_weights_is_refused(base, tmp_path):
    policy, value_model = policy_of(base), judge(base, 7)
    value_model.model = policy.model
    loaded = iter([policy, policy_of(base)])  # and the reference
    trainer = ppo_trainer(lambda: next(loaded), base, tmp_path / "tool", value_model=value_model)
    ram_trl.attach(trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, **ALONE)
    with pytest.raises(LayoutError, match=r"value model shares parameters with the policy .*embed_tokens"):
        trainer.train()


def test_a_ppo_agent_that_was_stopped_rejoins_from_the_newest_generalist(base, tmp_path):
    """TRL's PPO does not resume; it starts anew from the base, and `resume=True` loads the newest round."""

    def begin(**ram):
        watch = Watch()
        trainer = ppo_trainer(lambda: policy_of(base), base, tmp_path / "tool", max_steps=2)
        ram_trl.attach(
            trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, keep_rounds=99, **ALONE | ram
        )

        class Begin(TrainerCallback):
            def on_train_begin(self, args, state, control, model=None, **kwargs):
                watch.policy[0] = weights(model.policy)

        trainer.add_callback(Begin())
        trainer.train()
        return watch

    begin()
    with pytest.raises(HubError, match=r"agent 'tool' has been in .* before"):
        begin()
    newest = states(tmp_path / "hub")[-1]
    assert_same(begin(resume=True).policy[0], newest)
