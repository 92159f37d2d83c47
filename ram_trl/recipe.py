"""What a recipe may say: its fields, how it is read, and how `file.py:function` finds a function beside it.

A recipe is a YAML file that names a base, the agents trained from it and the merges of them. The Python it needs
(a maker of the base, one function per task) lies in files next to it and is found relative to it, so that a folder
with a recipe can be copied and edited as a whole.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_serializer, model_validator

from ram_trl.config import AGENT_NAME, MergeConfig, read_yaml

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ram_trl.evaluate import ScoreRow

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
        rows (`Callable[[Split, int], list[ScoreRow]]`):
            Called with a split and a count, the prompts and right answers to score on. No prompt is in two splits.
    """

    train: Dataset
    rewards: list[RewardFunction]
    rows: Callable[[Split, int], list[ScoreRow]]


class BaseMaker(Protocol):
    """A function that makes the base; it also takes whatever `base.args` of the recipe gives."""

    def __call__(
        self, *, seed: int, progress: Progress, **args: Any
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]: ...


def _is_function_name(text: str) -> str:
    file, _, function = text.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise ValueError(f"'{text}' does not name a function; write file.py:function, such as tasks/tool.py:tool")
    return text


def _is_agent_name(name: str) -> str:
    if not AGENT_NAME.fullmatch(name):
        raise ValueError(f"'{name}' is not an agent's name; use letters, digits, '.', '_' and '-'")
    return name


FunctionName = Annotated[str, AfterValidator(_is_function_name)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BaseSection(_Section):
    """The base: a function that makes it, and its arguments."""

    make: FunctionName
    args: dict[str, Any] = Field(default_factory=dict)


class AgentSection(_Section):
    """An agent: its task, the trainer, and the trainer's own arguments (for `grpo`, those of TRL's `GRPOConfig`)."""

    name: Annotated[str, AfterValidator(_is_agent_name)]
    task: FunctionName
    trainer: Literal["grpo"] = "grpo"
    args: dict[str, Any] = Field(default_factory=dict)


class ScoringSection(_Section):
    """How many prompts of a split score a model, per task."""

    dev: int = Field(ge=1)
    test: int = Field(ge=1)


class MergeRow(_Section):
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


class ContinualRow(_Section):
    """A continual run: its name in tables, and whether agents keep what a round did not consume of their updates."""

    name: str = Field(min_length=1)
    carry: bool = True


class ContinualSection(_Section):
    """
    Merging while agents train, by the rule of the recipe's `merge`.

    Args:
        merge_every (`int`):
            Optimizer steps between merges.
        rows (`list[ContinualRow]`):
            The runs. The hub of the first one is kept.
    """

    merge_every: int = Field(ge=1)
    rows: list[ContinualRow] = Field(min_length=1)


class FastSection(_Section):
    """What `--fast` changes: single arguments of the base, of every agent's trainer, of scoring and merging."""

    base: dict[str, Any] = Field(default_factory=dict)
    trainer: dict[str, Any] = Field(default_factory=dict)
    scoring: dict[str, int] = Field(default_factory=dict)
    continual: dict[str, int] = Field(default_factory=dict)


class Recipe(_Section):
    """
    A recipe.

    Args:
        base ([`BaseSection`]):
            What every agent starts from.
        agents (`list[AgentSection]`):
            The agents.
        scoring ([`ScoringSection`]):
            How many prompts score a model.
        merge ([`MergeRow`]):
            The merge that makes the generalist. It is never tuned.
        compare (`list[MergeRow]`, *optional*):
            The merges it is compared with.
        continual ([`ContinualSection`], *optional*):
            The same agents trained again, merging while they train.
        fast ([`FastSection`], *optional*):
            What a quick test run changes.
    """

    base: BaseSection
    agents: list[AgentSection] = Field(min_length=1)
    scoring: ScoringSection
    merge: MergeRow
    compare: list[MergeRow] = Field(default_factory=list)
    continual: ContinualSection | None = None
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
            *(row.name for row in self.rows),
            *(run.name for run in self.runs),
        ]
        for name in models:
            if models.count(name) > 1:
                raise ValueError(f"two models of the comparison are called '{name}'; give each merge its own name")
        if "average" in agents:
            raise ValueError("an agent is called 'average', which is the column of the mean over tasks; rename it")
        if self.fast.continual and self.continual is None:
            raise ValueError("fast.continual changes the section continual, which the recipe does not have")
        if self.merge.tune:
            raise ValueError("merge has a tune grid; the generalist is not tuned, tune rows of compare instead")
        return self

    @property
    def rows(self) -> list[MergeRow]:
        """All merges of the trained agents, the generalist's last."""
        return [*self.compare, self.merge]

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


def load_recipe(path: Path) -> Recipe:
    """
    Read and check a recipe.

    Raises:
        `ValueError`: if the file cannot be read or a field is wrong; the message names file and field.
    """
    try:
        return Recipe(**read_yaml(path))
    except ValidationError as error:
        raise ValueError(f"{path}: {_sentences(error)}") from error


def load_function(name: str, folder: Path) -> Callable[..., Any]:
    """
    The function that `file.py:function` names, the file taken relative to `folder`.

    Files of one folder import each other with `from .other import …`.

    Raises:
        `ValueError`: if there is no such file, it cannot be imported, or it has no such function.
    """
    file, _, function = name.rpartition(":")
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
        raise ValueError(_sentences(error)) from error


def _sentences(error: ValidationError) -> str:
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
