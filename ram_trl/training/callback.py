"""The callback that merges an agent while a TRL or Transformers trainer trains it: a thin edge over `Member`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ram_trl.config import ContinualConfig, MergeConfig
from ram_trl.continual.export import Exporter
from ram_trl.continual.hub import Hub, HubError
from ram_trl.continual.member import SAY_EVERY, Member, MemberState, Met
from ram_trl.continual.rounds import Rounds
from ram_trl.evaluate import ExactScorer, Scorer
from ram_trl.team import Team
from ram_trl.training import folded
from ram_trl.training.presence import training_goes_on
from ram_trl.training.turns import given, in_common, parked, rest, taking_turns
from ram_trl.weights.checkpoint import open_checkpoint
from ram_trl.weights.live import LiveWeights, Reference, trainers
from ram_trl.weights.live.common_base import CommonBase
from ram_trl.weights.live.lora import Live, LoraWeights

logger = logging.getLogger(__name__)

KEY = "ram_trl"
"""Under which the state travels in a checkpoint's `trainer_state.json`: written with it, in one piece."""
HELD = ("model", "model_wrapped", "optimizer", "ref_model", "reward_model")
"""What trainers hold on their device; not every trainer has all of these."""
RESIDUAL_FILE = "ram_residual.safetensors"


class RAMCallback(TrainerCallback):
    """
    Merges an agent with others through a hub while it trains.

    Every `merge_every` optimizer steps the agent publishes what it changed, waits for the round, and goes on from the
    new generalist plus what the round did not consume of its own update. Weights change between two rollouts only: a
    merge that falls inside a rollout buffer waits for its end. If this process dies, the others go on without it;
    resumed from a checkpoint, it rejoins.

    In `callbacks=[…]` it works with any trainer whose every step makes new rollouts. With rollouts that are used for
    several steps, use [`attach`], which also makes the metrics reach `report_to`.

    Args:
        hub (`str` or `Path`):
            Folder that all jobs of the run share; made if it is not there.
        agent (`str`):
            Name of the agent.
        base (`str` or `Path`):
            Folder of the checkpoint the model was loaded from.
        merge_every (`int`):
            Optimizer steps between merges.
        config (`MergeConfig`, *optional*):
            The merge rule; by default RAM+ with our defaults. The same in all jobs.
        resync (`str`, *optional*, defaults to `"generalist"`):
            `"generalist"` loads every round; `"none"` only publishes (observe mode).
        carry (`bool`, *optional*, defaults to `True`):
            Keep what a round did not consume.
        wait (`str` or `int`, *optional*, defaults to `"all"`), timeout (`float`, *optional*, defaults to `1800`):
            When a round closes; see [`ContinualConfig`].
        agents (`Sequence[str]`, *optional*):
            Agents that the first round waits for even before they have joined.
        moments (`str`, *optional*, defaults to `"keep"`):
            Optimizer moments after loading: `"keep"` or `"reset"`.
        reference (`str`, *optional*, defaults to `"keep"`):
            The reference model (β > 0): `"keep"`, or `"generalist"` to load every round into it, which needs
            [`attach`]. Of a model with an adapter, the reference is the model without: it follows with `lora="fold"`.
        lora (`str`, *optional*, defaults to `"fold"`):
            Of a PEFT model: `"fold"` puts every round into the base's weights and starts the adapter again at zero;
            `"svd"` leaves the base alone and sets the adapter to the best fit of what the round changes, and what that
            misses is kept apart. The optimizer's moments start again with either. With `"fold"`, an adapter that the
            trainer saves belongs to the newest round and not to the base.
        export_rank (`int`, *optional*):
            Export generalists as LoRA adapters of this rank, the best fit of what they change of the base, with the
            error told in the folder; by default as models. The same in all jobs.
        on_hub_error (`str`, *optional*, defaults to `"skip"`):
            `"skip"` trains on when the hub cannot be read or written; `"raise"` stops.
        keep_rounds (`int`, *optional*, defaults to `3`):
            Generalists to keep in the hub.
        scorer (`Scorer` or `ExactScorer`, *optional*):
            Scores every new generalist on this agent's task; logged as `ram/eval/<task>`.
        resume (`bool`, *optional*, defaults to `False`):
            Allow a name that was in this hub before, without a checkpoint.
        heartbeat (`float`, *optional*, defaults to `10`), patience (`float`, *optional*, defaults to `120`):
            Seconds between signs of life, and without one after which others go on.
        park (`bool`, *optional*, defaults to `False`):
            Agents of one process that take turns: move weights, gradients and optimizer states to the CPU while this
            one waits; needs [`attach`]. The base that agents with adapters share stays where it is.

    Raises:
        `pydantic.ValidationError`: if an argument is out of range.
    """

    def __init__(
        self,
        hub: str | Path,
        agent: str,
        base: str | Path,
        merge_every: int,
        config: MergeConfig | None = None,
        resync: Literal["generalist", "none"] = "generalist",
        *,
        carry: bool = True,
        wait: Literal["all", "available"] | int = "all",
        timeout: float = 1800,
        agents: Sequence[str] = (),
        moments: Literal["keep", "reset"] = "keep",
        reference: Literal["keep", "generalist"] = "keep",
        lora: Literal["fold", "svd"] = "fold",
        export_rank: int | None = None,
        on_hub_error: Literal["skip", "raise"] = "skip",
        keep_rounds: int = 3,
        scorer: Scorer | ExactScorer | None = None,
        resume: bool = False,
        heartbeat: float = 10,
        patience: float = 120,
        park: bool = False,
    ) -> None:
        self.hub = Hub(Path(hub))
        self.agent = agent
        self.base = Path(base)
        self.config = ContinualConfig(
            merge_every=merge_every,
            merge=config or MergeConfig(),
            resync=resync,
            carry=carry,
            wait=wait,
            timeout=timeout,
            agents=tuple(agents),
            moments=moments,
            reference=reference,
            lora=lora,
            export_rank=export_rank,
            on_hub_error=on_hub_error,
            keep_rounds=keep_rounds,
            heartbeat=heartbeat,
            patience=patience,
        )
        self.scorer = scorer
        self.resume = resume
        self.park = park
        self.trainer: Trainer | None = None
        self._told_to_wait = False
        self._told_of_fold = False

    # ---- the trainer's events -----------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.trainer is None and not trainers.always_at_generation_boundary(args):
            raise ValueError(
                f"agent '{self.agent}': rollouts are used for several optimizer steps here (steps_per_generation × "
                "num_iterations is larger than gradient_accumulation_steps), and a callback alone cannot tell when "
                "they end; use ram_trl.attach(trainer, …) in place of callbacks=[…]"
            )
        self._team = Team()
        self._reference = self._bound_reference(args) if self.config.reference == "generalist" else None
        # PPO hands callbacks the optimizer as it was before the engine took it over.
        optimizer = kwargs.get("optimizer") if self.trainer is None else self.trainer.optimizer
        self._live = self._weights(trainers.merged_part(kwargs["model"]), optimizer)
        self._common = self._common_base(args)
        self._exporter = Exporter.shared_by(self.agent, self.hub.path, self.base)
        self._due = False
        self._member = Member(
            self.hub,
            self.agent,
            self.base,
            self._live,
            self.config,
            export=self._exporter.start,
            rest=rest,
            look_for=0 if taking_turns() else SAY_EVERY,
            aside=self._waiting,
            given=given,
            goes_on=training_goes_on(),
        )
        checkpoint = self._from_checkpoint(args, state) if state.global_step else None
        told = self._member.join(state.global_step, checkpoint, self.resume)
        if self._team.first:
            logger.info(told)
        self._refer_to_generalist()
        self._tell_of_fold()
        self._remember(state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._due = self._due or state.global_step % self.config.merge_every == 0
        if not self._due:
            return
        if self.trainer is not None and not trainers.at_generation_boundary(self.trainer):
            if not self._told_to_wait and self._team.first:
                logger.info(
                    "agent '%s': the merge of step %d waits for the end of the rollout buffer, and so will later ones",
                    self.agent, state.global_step,
                )  # fmt: skip
            self._told_to_wait = True
            return
        self._due = False
        before = self._member.round
        met = self._member.meet(state.global_step)
        if self._member.round != before and not self._member.observes:
            self._after_loading()
        self._remember(state)
        self._log(met, self._scored(met, trainers.merged_part(kwargs["model"]), kwargs["processing_class"]))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        rounded_off = self._live.rounded_off()
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if rounded_off and self._team.first:
            save_file(dict(rounded_off), folder / RESIDUAL_FILE)
        if isinstance(self._live, LoraWeights) and not self._member.observes:
            member = self._member
            try:
                self._live.save(folder, member.round, lambda: member.state_of(member.round))
                if self._folded and self._team.first:
                    folded.note_in_card(folder / "README.md", self.agent, self.base, self.hub, member.round)
            except OSError as error:
                if self.config.on_hub_error == "raise":
                    raise
                logger.warning("agent '%s' cannot resume from %s: the hub failed (%s)", self.agent, folder, error)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._log(self._member.finish(state.global_step))
        self._exporter.leave(self.agent)
        self._member.tidy_up()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around waiting, in which agents of this process may take their turns. Collective."""
        keep = self._common.tensors() if self._common is not None else ()
        trainer = self.trainer
        away = self.park and trainer is not None
        try:
            with parked(*(getattr(trainer, name, None) for name in HELD), keep=keep) if away else nullcontext():
                yield
        except Exception:  # a hub that failed, with which training goes on
            self._take_base()
            raise
        self._take_base()

    def _take_base(self) -> None:
        if self._common is not None and isinstance(self._live, LoraWeights):
            self._common.take(self._live)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _weights(self, model: Any, optimizer: Any) -> Live:
        if not isinstance(model, PeftModel):
            return LiveWeights(model, self._team, optimizer)
        opened = partial(open_checkpoint, self.base, "base")
        return LoraWeights(model, self._team, optimizer, self.agent, self.config.lora, lambda: opened().store)

    def _common_base(self, args: TrainingArguments) -> CommonBase | None:
        """The memory that agents with adapters have in common if they take turns. Collective."""
        # The sync with vLLM merges the adapter into the base and takes it out again, which leaves its trace there.
        drifts = self.config.lora == "svd" and getattr(args, "use_vllm", False)
        if not isinstance(self._live, LoraWeights) or drifts:
            return None
        common = in_common((CommonBase, self.base.resolve(), self.config.lora), CommonBase)
        freed = common.join(self._live) if common is not None else 0
        if freed and self._team.first:
            logger.info(
                "agent '%s' computes with the base that others have in memory: %.0f MB less per rank", self.agent,
                freed / 1e6,
            )  # fmt: skip
        return common

    def _remember(self, state: TrainerState) -> None:
        """Puts the agent's state where the trainer writes it with every checkpoint."""
        state.stateful_callbacks.setdefault(KEY, {})[self.agent] = self._member.state().model_dump()

    def _from_checkpoint(self, args: TrainingArguments, state: TrainerState) -> MemberState:
        held = (state.stateful_callbacks or {}).get(KEY, {}).get(self.agent)
        if held is None:
            good = sorted(_checkpoints_with_state(Path(args.output_dir), self.agent))
            advice = f"the newest that has it is {good[-1][1]}" if good else "none in the output folder has it"
            raise HubError(
                f"training resumes at step {state.global_step} from a checkpoint that has no state of agent "
                f"'{self.agent}' (it was made without RAMCallback, or under another name); {advice}"
            )
        if self._live.rounded_off():
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / RESIDUAL_FILE
            if not path.exists():
                raise HubError(f"{path} is missing: the checkpoint is not whole, resume from an earlier one")
            self._live.restore_rounded_off(load_file(path))
        member = MemberState(**held)
        if isinstance(self._live, LoraWeights) and self.config.resync != "none":
            self._restore_base(self._live, Path(args.output_dir) / f"checkpoint-{state.global_step}", member.round)
        return member

    def _restore_base(self, live: LoraWeights, folder: Path, number: int) -> None:
        """A trainer's checkpoint holds the adapter alone; rounds may have changed what it stands on."""
        if not self._team.ask(self.hub.state_folder(number).exists):
            return  # then the agent cannot go on from there, and loads the newest round
        rounds = Rounds(self.hub, self._team, self._team.ask(self.hub.described)["identity"])
        try:
            live.restore(folder, number, lambda: rounds.state(number))
        except FileNotFoundError as error:
            raise HubError(f"{error.filename} is missing: the checkpoint is not whole, resume from another") from error

    def _after_loading(self) -> None:
        if self.config.moments == "reset":
            self._live.forget_moments()
        self._refer_to_generalist()
        self._tell_of_fold()
        if self.trainer is not None:
            trainers.forget_pushed_weights(self.trainer)

    @property
    def _folded(self) -> bool:
        """Whether rounds have gone into the live base, so that the adapter does not belong to the checkpoint."""
        loads = isinstance(self._live, LoraWeights) and self.config.lora == "fold" and not self._member.observes
        return loads and self._member.round > 0

    def _tell_of_fold(self) -> None:
        if self._folded and not self._told_of_fold and self._team.first:
            folded.warn(self.agent, self.base, self.hub, self._member.round)
            self._told_of_fold = True

    def _bound_reference(self, args: TrainingArguments) -> Reference:
        model = getattr(self.trainer, "ref_model", None)
        if model is None:
            why = (
                "a callback alone is not handed the reference model: use ram_trl.attach(trainer, …)"
                if self.trainer is None
                else "this trainer has none (beta is 0, or it trains adapters); set beta above 0"
            )
            raise ValueError(
                f"agent '{self.agent}': reference=\"generalist\" loads rounds into a reference model; {why}"
            )
        if self.config.resync == "none" or getattr(args, "sync_ref_model", False):
            why = "agents that observe never load one" if self.config.resync == "none" else "sync_ref_model mixes it"
            raise ValueError(f"agent '{self.agent}': reference=\"generalist\" keeps it at the generalist, but {why}")
        return Reference(model, self._team)

    def _refer_to_generalist(self) -> None:
        if self._reference is not None:
            self._reference.load(lambda: self._member.state_of(self._member.round))

    def _scored(self, met: Met, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
        scorer = self.scorer
        if scorer is None or met.round is None:
            return {}
        score = self._member.as_generalist(lambda: scorer.score(model, tokenizer))
        if self._team.first:
            self._member.note_score(scorer.task, score)
        return {f"ram/eval/{scorer.task}": score}

    def _log(self, met: Met, scores: Mapping[str, float] | None = None) -> None:
        metrics = {"ram/exchange_mb": met.exchange_mb, "ram/wait_s": met.wait_s, "ram/merge_s": met.merge_s}
        metrics |= scores or {}
        if isinstance(self._live, LoraWeights) and self._live.fit_error is not None:
            metrics["ram/svd_error"] = self._live.fit_error
        if met.density is not None:
            metrics["ram/density"] = met.density
        if met.round is not None:
            metrics["ram/round"] = float(met.round)
        own = (met.report or {}).get("agents", {}).get(self.agent)
        if met.report is not None and own is not None:
            numbers = {"ram/rho": own["rho"], "ram/lambda": own["lambda"], "ram/shared": own["shared"]}
            numbers["ram/sign_conflict"] = met.report["sign_conflict"]
            metrics |= {name: float(value) for name, value in numbers.items() if value is not None}
        for warning in (met.report or {}).get("warnings", []) if self._team.first else []:
            logger.warning("round %s: %s", met.round, warning)
        if self.trainer is not None:
            trainers.log_metrics(self.trainer, metrics)
        elif self._team.first:
            logger.info("agent '%s': %s", self.agent, metrics)


def attach(trainer: Trainer, **arguments: Any) -> RAMCallback:
    """
    Adds a [`RAMCallback`] to a trainer and binds the two.

    Bound, the callback knows the trainer's rollout buffer (so rollouts may be used for several steps), its metrics
    (so they reach `report_to`), and its vLLM engine (so the next rollout uses the new weights).

    Args:
        trainer ([`~transformers.Trainer`]):
            Any TRL or Transformers trainer.
        arguments:
            As for [`RAMCallback`].

    Returns:
        [`RAMCallback`]: the callback.
    """
    callback = RAMCallback(**arguments)
    callback.trainer = trainer
    trainer.add_callback(callback)
    return callback


def _checkpoints_with_state(output: Path, agent: str) -> list[tuple[int, Path]]:
    found = []
    for path in output.glob("checkpoint-*/trainer_state.json"):
        held = json.loads(path.read_text(encoding="utf-8"))
        if agent in (held.get("stateful_callbacks") or {}).get(KEY, {}):
            found.append((int(held["global_step"]), path.parent))
    return found
