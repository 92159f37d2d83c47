"""What a recipe may say: its fields, how it is read, and how `file.py:function` finds a function beside it.

A recipe is a YAML file that names a base, the agents trained from it and the merges of them. The Python it needs
(a maker of the base, one function per task) lies in files next to it and is found relative to it, so that a folder
with a recipe can be copied and edited as a whole; or it is installed, and named `module:function`. `ram-trl demo` and
`ram-trl launch` read the same recipes: the demo compares merges, the launcher trains as the section `launch` says.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_serializer, model_validator

from ram_trl.config import AGENT_NAME, MergeConfig, read_yaml

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ram_trl.evaluate import Scorer, ScoreRow

Split = Literal["train", "dev", "test"]

# Called with the steps done and the steps in all.
Progress = Callable[[int, int], None]


def _shipped_recipes() -> Path:
    package = Path(__file__).resolve().parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


# The recipes that ship with the library: inside the package once installed, beside it in a clone.
RECIPES: Path = _shipped_recipes()


# A reward function as TRL calls it: completions and the dataset's columns come in by name.
RewardFunction = Callable[..., list[float]]


@dataclass(frozen=True)
class Task:
    """
    What a task function returns.

    Args:
        train ([`~datasets.Dataset`]):
            Prompts to train on, with a `prompt` column and whatever else the rewards read.
        rewards (`list[Callable]`):
            Reward functions with TRL's signature.
        rows (`Callable[[Split, int], list[ScoreRow]]`, *optional*):
            Called with a split and a count, the prompts and right answers to score on. No prompt is in two splits.
        scorer ([`Scorer`], *optional*):
            Scores generalists where there is no one right answer, in place of `rows`.
        reward_model (`str` or `Path`, *optional*):
            For `ppo`: the checkpoint of a sequence classifier with one label, which scores completions in place of
            `rewards`.
    """

    train: Dataset
    rewards: list[RewardFunction]
    rows: Callable[[Split, int], list[ScoreRow]] | None = None
    scorer: Scorer | None = None
    reward_model: str | Path | None = None


class BaseMaker(Protocol):
    """A function that makes the base; it also takes whatever `base.args` of the recipe gives."""

    def __call__(
        self, *, seed: int, progress: Progress, **args: Any
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]: ...


def _is_function_name(text: str) -> str:
    file, _, function = text.rpartition(":")
    module = all(part.isidentifier() for part in file.split("."))
    if not (file.endswith(".py") or module) or not function.isidentifier():
        raise ValueError(f"'{text}' does not name a function; write file.py:function, such as tasks/tool.py:tool")
    return text


def _is_agent_name(name: str) -> str:
    if not AGENT_NAME.fullmatch(name):
        raise ValueError(f"'{name}' is not an agent's name; use letters, digits, '.', '_' and '-'")
    return name


FunctionName = Annotated[str, AfterValidator(_is_function_name)]
AGENT = Annotated[str, AfterValidator(_is_agent_name)]


class Section(BaseModel):
    """A part of a recipe: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BaseSection(Section):
    """
    The base: a checkpoint, or a function that makes it.

    Args:
        model (`str`, *optional*):
            A folder, or a name on the Hugging Face Hub.
        revision (`str`, *optional*):
            Its revision on the Hub.
        make (`str`, *optional*):
            In place of `model`, a function that makes it.
        args (`dict[str, Any]`, *optional*):
            Arguments of that function.
        config (`dict[str, Any]`, *optional*):
            The config of the model, for `--dry-run` to count parameters by where the model is not at hand.
    """

    model: str | None = None
    revision: str | None = None
    make: FunctionName | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> BaseSection:
        if (self.model is None) == (self.make is None):
            raise ValueError("name a checkpoint (model) or a function that makes one (make): one of them")
        if self.make is not None and self.revision is not None:
            raise ValueError("revision belongs to model, but the base is made by make; leave it out")
        if self.model is not None and self.args:
            raise ValueError("args are the arguments of make, but the base is model; leave them out")
        return self


class AgentSection(Section):
    """
    An agent.

    Args:
        name (`str`):
            Its name.
        task (`str`), task_args (`dict[str, Any]`, *optional*):
            The function that returns its [`Task`], and arguments of it.
        trainer (`str`, *optional*, defaults to `"grpo"`), args (`dict[str, Any]`, *optional*):
            `grpo`, `rloo` or `ppo`, and fields of TRL's config of that trainer.
        peft (`dict[str, Any]`, *optional*):
            Train a LoRA adapter: fields of peft's `LoraConfig`.
        devices (`list[int]`, *optional*):
            GPUs of its job, counted within `CUDA_VISIBLE_DEVICES`.
        job (`str`, *optional*):
            For the schedule `mixed`: agents of one job take turns.
    """

    name: AGENT
    task: FunctionName
    task_args: dict[str, Any] = Field(default_factory=dict)
    trainer: Literal["grpo", "rloo", "ppo"] = "grpo"
    args: dict[str, Any] = Field(default_factory=dict)
    peft: dict[str, Any] | None = None
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    job: AGENT | None = None


class ScoringSection(Section):
    """
    How models are scored.

    Args:
        dev, test (`int`, *optional*, default to `200` and `400`):
            Prompts of these splits, per task.
        rounds (`bool`, *optional*, defaults to `True`):
            `ram-trl launch`: score every generalist on each agent's task, on `dev` or by the task's scorer.
    """

    dev: int = Field(default=200, ge=1)
    test: int = Field(default=400, ge=1)
    rounds: bool = True


class MergeRow(Section):
    """
    A merge to be made: a name, the fields of a [`MergeConfig`] (or a `preset`) beside it, and knobs to tune.

    Args:
        name (`str`):
            Its name in tables.
        config ([`MergeConfig`]):
            How it merges.
        tune (`dict[str, list[float]]`, *optional*):
            Values to try, by knob. Every combination is scored on the dev split; the best one is the row.
    """

    name: str = Field(min_length=1)
    config: MergeConfig
    tune: dict[str, list[float]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_the_knobs(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError(f"{values!r} is not a mapping; write at least a name")
        row = {key: values[key] for key in ("name", "tune") if key in values}
        knobs = {key: value for key, value in values.items() if key not in row}
        return row | {"config": _merge_config(knobs)}

    @model_validator(mode="after")
    def _every_candidate_is_a_config(self) -> MergeRow:
        for knob, grid in self.tune.items():
            if not grid:
                raise ValueError(f"tune.{knob} has no values to try")
        self.candidates()
        return self

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        row = {"name": self.name, **self.config.model_dump(exclude_unset=True), "tune": self.tune}
        return {key: value for key, value in row.items() if value != {}}

    def candidates(self) -> list[tuple[dict[str, float], MergeConfig]]:
        """Every combination of the tuned knobs, in the order written, with its config; one without any if untuned."""
        written = self.config.model_dump(exclude_unset=True)
        combinations = (dict(zip(self.tune, values, strict=True)) for values in itertools.product(*self.tune.values()))
        return [(knobs, _merge_config(written, knobs)) for knobs in combinations]


class FactorRow(Section):
    """
    A merge of adapters' factors A and B, each apart, by peft's `add_weighted_adapter(combination_type="linear")`: what
    merging in the space of ΔW is compared with.

    Args:
        name (`str`):
            Its name in tables.
        weight (`float` or `"mean"`, *optional*, defaults to `1`):
            Weight of every agent; `"mean"` is the one with which A is the mean of the agents' A, and B of their B.
        tune (`dict[str, list[float]]`, *optional*):
            Values of `weight` to try. Each is scored on the dev split; the best one is the row.
    """

    name: str = Field(min_length=1)
    weight: float | Literal["mean"] = 1.0
    tune: dict[str, list[float]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _tunes_weights(self) -> FactorRow:
        if self.tune and (list(self.tune) != ["weight"] or not self.tune["weight"]):
            raise ValueError(f"tune is {self.tune}; it may hold values of weight, at least one, and nothing else")
        return self

    def candidates(self) -> list[tuple[dict[str, float], float | Literal["mean"]]]:
        """Every weight to try, as knobs and by itself; `weight` if it is not tuned."""
        if not self.tune:
            return [({}, self.weight)]
        return [({"weight": weight}, weight) for weight in self.tune["weight"]]


class ContinualRow(Section):
    """
    A continual run.

    Args:
        name (`str`):
            Its name in tables.
        carry (`bool`, *optional*, defaults to `True`):
            Whether agents keep what a round did not consume of their updates.
        lora (`str`, *optional*, defaults to `"fold"`):
            How a round goes into agents with adapters, as in [`ContinualConfig`].
    """

    name: str = Field(min_length=1)
    carry: bool = True
    lora: Literal["fold", "svd"] = "fold"


class ContinualSection(Section):
    """
    Merging while agents train, by the rule of the recipe's `merge`.

    Args:
        merge_every (`int`):
            Optimizer steps between merges.
        rows (`list[ContinualRow]`, *optional*):
            The demo's runs. The hub of the first one is kept.
        carry, resync, wait, timeout, moments, reference, lora, export_rank, on_hub_error, keep_rounds, heartbeat,
        patience:
            `ram-trl launch`: as in [`ContinualConfig`].
    """

    merge_every: int = Field(ge=1)
    rows: list[ContinualRow] = Field(default=[ContinualRow(name="continual")], min_length=1)
    carry: bool = True
    resync: Literal["generalist", "none"] = "generalist"
    wait: Literal["all", "available"] | Annotated[int, Field(ge=1)] = "all"
    timeout: float = Field(default=1800, gt=0)
    moments: Literal["keep", "reset"] = "keep"
    reference: Literal["keep", "generalist"] = "keep"
    lora: Literal["fold", "svd"] = "fold"
    export_rank: int | None = Field(default=None, ge=1)
    on_hub_error: Literal["skip", "raise"] = "skip"
    keep_rounds: int = Field(default=3, ge=1)
    heartbeat: float = Field(default=10, gt=0)
    patience: float = Field(default=120, gt=0)

    def knobs(self) -> dict[str, Any]:
        """These fields as arguments of a [`RAMCallback`]."""
        return self.model_dump(exclude={"rows"})


class LaunchSection(Section):
    """
    How `ram-trl launch` runs the agents.

    Args:
        accelerate (`str`, *optional*, defaults to `"cpu"`):
            A file of `launch/accelerate/` without `.yaml`, or a path to one of your own, relative to the recipe.
        schedule (`str`, *optional*, defaults to `"concurrent"`):
            `concurrent`: a job per agent. `interleaved`: one job in which agents take turns. `mixed`: agents with the
            same `job` share one.
        processes (`int`, *optional*):
            Processes (ranks) of every job; by default its devices, or what the accelerate config says.
        machines (`int`, *optional*, defaults to `1`):
            Machines per job. With more than one, `--dry-run` prints what to start on each.
        out (`Path`, *optional*):
            Folder for base, hub, checkpoints and logs; `runs/<name of the recipe>` by default.
        hub (`Path`, *optional*):
            The hub, if not `out`/hub.
        park (`bool`, *optional*, defaults to `True`):
            Agents that wait for their turn give the memory of their device free.
        restarts (`int`, *optional*, defaults to `3`), backoff (`float`, *optional*, defaults to `5`):
            How often a job that died is started again, and seconds before the first time, doubled each time.
        hang_after (`float`, *optional*, defaults to `1800`):
            Seconds without any progress of a job after which it is taken for hung and started again.
    """

    accelerate: str = "cpu"
    schedule: Literal["concurrent", "interleaved", "mixed"] = "concurrent"
    processes: int | None = Field(default=None, ge=1)
    machines: int = Field(default=1, ge=1)
    out: Path | None = None
    hub: Path | None = None
    park: bool = True
    restarts: int = Field(default=3, ge=0)
    backoff: float = Field(default=5, ge=0)
    hang_after: float = Field(default=1800, gt=0)


class FastSection(Section):
    """What `--fast` changes: single arguments of the base, of every agent's trainer, of scoring and merging."""

    base: dict[str, Any] = Field(default_factory=dict)
    trainer: dict[str, Any] = Field(default_factory=dict)
    scoring: dict[str, int] = Field(default_factory=dict)
    continual: dict[str, int] = Field(default_factory=dict)


class Recipe(Section):
    """
    A recipe.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Of the base's maker and of agents that do not set their own. The demo counts its own seeds from 0.
        base ([`BaseSection`]):
            What every agent starts from.
        agents (`list[AgentSection]`):
            The agents.
        scoring ([`ScoringSection`], *optional*):
            How many prompts score a model.
        merge ([`MergeRow`]):
            The merge that makes the generalist. It is never tuned.
        compare (`list[MergeRow]`, *optional*):
            The merges it is compared with.
        factors (`list[FactorRow]`, *optional*):
            Where agents train adapters: merges of A and B apart that it is compared with, too.
        continual ([`ContinualSection`], *optional*):
            Merging while agents train.
        launch ([`LaunchSection`], *optional*):
            How `ram-trl launch` runs the agents.
        fast ([`FastSection`], *optional*):
            What a quick test run changes.
    """

    seed: int = Field(default=0, ge=0)
    base: BaseSection
    agents: list[AgentSection] = Field(min_length=1)
    scoring: ScoringSection = ScoringSection()
    merge: MergeRow
    compare: list[MergeRow] = Field(default_factory=list)
    factors: list[FactorRow] = Field(default_factory=list)
    continual: ContinualSection | None = None
    launch: LaunchSection = LaunchSection()
    fast: FastSection = Field(default_factory=FastSection)

    @model_validator(mode="after")
    def _names_are_different(self) -> Recipe:
        agents = [agent.name for agent in self.agents]
        for name in agents:
            if agents.count(name) > 1:
                raise ValueError(f"two agents are called '{name}'; give each its own name")
        models = [
            "base",
            *(f"agent:{name}" for name in agents),
            *(row.name for row in self.one_shot),
            *(run.name for run in self.runs),
        ]
        for name in models:
            if models.count(name) > 1:
                raise ValueError(f"two models of the comparison are called '{name}'; give each merge its own name")
        if "average" in agents:
            raise ValueError("an agent is called 'average', which is the column of the mean over tasks; rename it")
        if self.fast.continual and self.continual is None:
            raise ValueError("fast.continual changes the section continual, which the recipe does not have")
        if self.factors and any(agent.peft is None for agent in self.agents):
            raise ValueError("factors merges the A and B of adapters, but not every agent has a section peft")
        if self.merge.tune:
            raise ValueError("merge has a tune grid; the generalist is not tuned, tune rows of compare instead")
        return self

    @property
    def rows(self) -> list[MergeRow]:
        """All merges by our rules of the trained agents, the generalist's last."""
        return [*self.compare, self.merge]

    @property
    def one_shot(self) -> list[FactorRow | MergeRow]:
        """All merges of the trained agents: those of factors, then all others."""
        return [*self.factors, *self.rows]

    @property
    def runs(self) -> list[ContinualRow]:
        """All continual runs."""
        return self.continual.rows if self.continual else []

    def quick(self) -> Recipe:
        """This recipe with what its `fast` section changes."""
        continual = self.continual
        return self.model_copy(
            update={
                "base": self.base.model_copy(update={"args": self.base.args | self.fast.base}),
                "agents": [a.model_copy(update={"args": a.args | self.fast.trainer}) for a in self.agents],
                "scoring": ScoringSection(**(self.scoring.model_dump() | self.fast.scoring)),
                "continual": continual and ContinualSection(**(continual.model_dump() | self.fast.continual)),
            }
        )


def load_recipe(path: Path, changes: Sequence[tuple[str, Any]] = ()) -> Recipe:
    """
    Read and check a recipe.

    Args:
        path (`Path`):
            Its file.
        changes (`Sequence[tuple[str, Any]]`, *optional*):
            Fields to set before checking: a dotted path (agents by name or number, or `*` for all) and a value.

    Raises:
        `ValueError`: if the file cannot be read or a field is wrong; the message names file and field.
    """
    try:
        return Recipe(**changed(read_yaml(path), changes))
    except ValidationError as error:
        raise ValueError(f"{path}: {sentences(error)}") from error


def changed(values: dict[str, Any], changes: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """
    The values of a recipe with fields set, as in [`load_recipe`].

    Raises:
        `ValueError`: if a path leads nowhere.
    """
    for field, value in changes:
        _set(values, field.split("."), value, field)
    return values


def _set(held: Any, keys: list[str], value: Any, field: str) -> None:
    """Sets a field in nested mappings and lists; mappings on the way are made."""
    key, rest = keys[0], keys[1:]
    if isinstance(held, list):
        named = [item for item in held if isinstance(item, dict) and item.get("name") == key]
        numbered = [held[int(key)]] if key.isdigit() and int(key) < len(held) else []
        found = held if key == "*" else named or numbered
        if not found or not rest:
            names = ", ".join(str(item.get("name")) for item in held if isinstance(item, dict))
            raise ValueError(f"--set {field}: '{key}' names none of the entries there ({names})")
        for number, item in enumerate(held):
            if any(item is one for one in found):
                # A YAML anchor makes entries share their mappings; what is set for one must not reach the others.
                held[number] = copy.deepcopy(item)
                _set(held[number], rest, value, field)
    elif not isinstance(held, dict):
        raise ValueError(f"--set {field}: there is no field '{key}' below {held!r}")
    elif rest:
        held[key] = {} if held.get(key) is None else copy.deepcopy(held[key])
        _set(held[key], rest, value, field)
    else:
        held[key] = value


def load_function(name: str, folder: Path) -> Callable[..., Any]:
    """
    The function that `file.py:function` names, the file taken relative to `folder`; or `module:function`.

    Files of one folder import each other with `from .other import …`.

    Raises:
        `ValueError`: if there is no such file, it cannot be imported, or it has no such function.
    """
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        return _imported(name, file, function)
    path = (folder / file).resolve()
    if not path.is_file():
        raise ValueError(f"'{name}' names {path}, and there is no such file")
    try:
        module = importlib.import_module(f"{_package_of(path.parent)}.{path.stem}")
    except Exception as error:
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"'{name}': {path} has no function '{function}'")
    return found


def _imported(name: str, module: str, function: str) -> Callable[..., Any]:
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:
        raise ValueError(f"'{name}': {module} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"'{name}': {module} has no function '{function}'")
    return found


def _package_of(folder: Path) -> str:
    """
    Name of a package that stands for `folder`, made on first use.

    It is named after the folder's path, so that it meets neither a `tasks` package of the user's nor another
    recipe's folder, and `sys.path` stays as it is.
    """
    name = f"_ram_trl_recipe_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        package = ModuleType(name, f"The files of {folder}.")
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    importlib.invalidate_caches()
    return name


def _merge_config(*layers: Mapping[str, Any]) -> MergeConfig:
    try:
        return MergeConfig.layered(*layers)
    except ValidationError as error:
        raise ValueError(sentences(error)) from error


def sentences(error: ValidationError) -> str:
    """The errors of a validation, each as a sentence that starts with the field."""
    return "; ".join(_sentence(e["type"], e["loc"], e["msg"], e["input"]) for e in error.errors())


def _sentence(kind: str, location: tuple[int | str, ...], message: str, found: Any) -> str:
    field = ""
    for part in location:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else part
    if kind == "missing":
        return f"{field} is missing"
    if kind == "extra_forbidden":
        return f"{field} is not a field here; leave it out or correct its name"
    if kind == "value_error":
        told = message.removeprefix("Value error, ")
        return f"{field}: {told}" if field else told
    return f"{field} is {found!r}: {message[0].lower()}{message[1:]}"
