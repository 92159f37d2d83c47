"""Every knob of a merge: its default, its allowed range, its source.

`MergeConfig` is what users write (in Python, in YAML, on the command line); the engine and the rules in `methods/`
read it and nothing else. A knob that the chosen method does not use is refused rather than ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MethodName = Literal["ram", "average", "task_arithmetic", "ties", "dare"]
PresetName = Literal["paper", "released", "mergekit"]

CRITERION_KNOBS = frozenset({"epsilon", "top", "ulp"})

METHOD_KNOBS: dict[str, frozenset[str]] = {
    "ram": frozenset({"r", "alpha", "rho"}),
    "average": frozenset(),
    "task_arithmetic": frozenset({"scale"}),
    "ties": frozenset({"scale"}),
    "dare": frozenset({"scale", "drop", "seed"}),
}

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2601.13572, Eq. 1-7 and its section on hyperparameters.
    "paper": {"method": "ram", "epsilon": 1e-5, "r": 0.1, "alpha": 2.0, "rho": "global"},
    # The authors' script: 1 + (R - 1)·min(2, min(1, ρ)) with the README's R = 1.2; the inner clip always wins.
    "released": {"method": "ram", "epsilon": 1e-5, "r": 0.2, "alpha": 1.0, "rho": "global"},
    # mergekit 0.1.5 `ramplus_tl`.
    "mergekit": {"method": "ram", "epsilon": 1e-5, "r": 0.1, "alpha": 0.2, "rho": "tensor"},
}

AGENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class MergeConfig(BaseModel):
    """
    How task vectors are thinned and combined.

    At most one of `epsilon`, `top` and `ulp` is given; it is the criterion that decides which entries of an agent
    are active. Without one, `ram` and `ties` use `top=0.2` and the other methods `epsilon=0` (all that changed).

    Args:
        method (`str`, *optional*, defaults to `"ram"`):
            One of `"ram"`, `"average"`, `"task_arithmetic"`, `"ties"`, `"dare"`.
        epsilon (`float`, *optional*):
            Active iff |τ| > epsilon, compared in fp32 (the paper uses 1e-5). 0 means "the fp32 bits of the
            weight differ from the base's", so that an agent merged alone comes back bit for bit, −0.0 included.
        top (`float`, *optional*):
            Active iff τ ≠ 0 and |τ| is at least the k-th largest of the agent's entries, k = round(top · entries),
            at least 1. Ties at the k-th value are all active.
        ulp (`bool`, *optional*, defaults to `False`):
            Active iff agent and base differ once both are rounded to 16 bits (to float16 where the base is
            float16, else to bfloat16).
        r (`float`, *optional*, defaults to `0.2`):
            `ram`: strength of the rescale of unique entries. 0 is RAM, above it RAM+.
        alpha (`float`, *optional*, defaults to `1.0`):
            `ram`: upper clip of ρ.
        rho (`str`, *optional*, defaults to `"global"`):
            `ram`: count ρ over the whole model (`"global"`, the paper's) or over each tensor (`"tensor"`).
        scale (`float`, *optional*, defaults to `1.0`):
            `task_arithmetic`, `ties`, `dare`: factor on the combined task vector.
        drop (`float`, *optional*, defaults to `0.5`):
            `dare`: probability that an active entry is dropped; survivors are divided by 1 − drop.
        seed (`int`, *optional*, defaults to `0`):
            `dare`: seed of the random mask.
        weights (`dict[str, float]`, *optional*):
            Factor on the task vector of an agent, by name; agents that are not named have 1. It multiplies τ after
            the criterion has been applied.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: MethodName = "ram"
    epsilon: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top: float | None = Field(default=None, gt=0, le=1)
    ulp: bool = False
    r: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    alpha: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    rho: Literal["global", "tensor"] = "global"
    scale: float = Field(default=1.0, allow_inf_nan=False)
    drop: float = Field(default=0.5, ge=0, lt=1)
    seed: int = Field(default=0, ge=0)
    weights: dict[str, float] = Field(default_factory=dict)

    @field_validator("epsilon", "top", "r", "alpha", "scale", "drop", mode="before")
    @classmethod
    def _a_number_is_no_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"{value} is not a number")
        return value

    @field_validator("weights")
    @classmethod
    def _weights_are_usable(cls, weights: dict[str, float]) -> dict[str, float]:
        for agent, weight in weights.items():
            if not math.isfinite(weight) or weight == 0:
                raise ValueError(f"the weight of agent '{agent}' is {weight}; give a finite number other than 0")
        return weights

    @model_validator(mode="after")
    def _knobs_fit_the_method(self) -> MergeConfig:
        criteria = [f"epsilon={self.epsilon}"] * (self.epsilon is not None)
        criteria += [f"top={self.top}"] * (self.top is not None) + ["ulp"] * self.ulp
        if len(criteria) > 1:
            raise ValueError(f"{' and '.join(criteria)} are given; an agent has one criterion, keep one of them")
        foreign = frozenset().union(*METHOD_KNOBS.values()) - METHOD_KNOBS[self.method]
        unused = sorted(self.model_fields_set & foreign)
        if unused:
            takers = {knob: sorted(m for m, knobs in METHOD_KNOBS.items() if knob in knobs) for knob in unused}
            told = "; ".join(f"{knob}={getattr(self, knob)} is for {', '.join(takers[knob])}" for knob in unused)
            raise ValueError(f"method '{self.method}' does not use {', '.join(unused)} ({told}); leave it out")
        return self

    @property
    def criterion(self) -> str:
        """The criterion in words, such as `top 0.2`, `epsilon 1e-05` or `ulp`."""
        if self.ulp:
            return "ulp"
        if self.top_fraction is not None:
            return f"top {self.top_fraction:g}"
        return f"epsilon {self.fixed_epsilon:g}"

    @property
    def top_fraction(self) -> float | None:
        """Fraction of the `top` criterion, given or by default; `None` when another criterion is in force."""
        if self.top is None and self.epsilon is None and not self.ulp and self.method in ("ram", "ties"):
            return 0.2
        return self.top

    @property
    def fixed_epsilon(self) -> float:
        """ε of the `epsilon` criterion, given or by default."""
        return 0.0 if self.epsilon is None else self.epsilon

    def weight(self, agent: str) -> float:
        """Factor on the task vector of `agent`."""
        return self.weights.get(agent, 1.0)

    def settled(self) -> dict[str, Any]:
        """The knobs in force, defaults included, as JSON: equal for configs that mean the same."""
        knobs: dict[str, Any] = {knob: getattr(self, knob) for knob in sorted(METHOD_KNOBS[self.method])}
        if self.ulp:
            criterion: dict[str, Any] = {"ulp": True}
        elif self.top_fraction is not None:
            criterion = {"top": self.top_fraction}
        else:
            criterion = {"epsilon": self.fixed_epsilon}
        return {"method": self.method, **criterion, **knobs, "weights": dict(sorted(self.weights.items()))}

    def as_published(self) -> MergeConfig:
        """These knobs for updates that hold active entries only: everything that differs is active."""
        knobs = {knob: getattr(self, knob) for knob in self.model_fields_set - CRITERION_KNOBS}
        return MergeConfig(**knobs, epsilon=0)

    @classmethod
    def preset(cls, name: PresetName) -> MergeConfig:
        """
        The knobs of a published program: `"paper"`, `"released"` (the authors' script) or `"mergekit"`.

        Raises:
            `ValueError`: if there is no such preset.
        """
        return cls.layered({"preset": name})

    @classmethod
    def layered(cls, *layers: Mapping[str, Any]) -> MergeConfig:
        """
        One config from several sources, the later ones winning, as the command line wins over a YAML file.

        A layer may hold `preset`, which stands for that preset's knobs. A criterion in a later layer replaces the
        criterion of an earlier one, of whatever kind; weights are merged by agent.

        Raises:
            `ValueError`: if the knobs do not fit together (`pydantic.ValidationError`), or the preset is unknown.
        """
        values: dict[str, Any] = {}
        for layer in layers:
            name = layer.get("preset")
            if name is not None and (not isinstance(name, str) or name not in PRESETS):
                raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
            own = {knob: value for knob, value in layer.items() if knob != "preset"}
            for knobs in (PRESETS[name] if name else {}, own):
                # A criterion that is off says nothing about the others.
                knobs = {k: v for k, v in knobs.items() if k not in CRITERION_KNOBS or not (v is None or v is False)}
                if CRITERION_KNOBS & knobs.keys():
                    values = {knob: value for knob, value in values.items() if knob not in CRITERION_KNOBS}
                weights = knobs.get("weights") or {}
                if not isinstance(weights, Mapping):
                    raise ValueError(f"weights is {weights!r}, expected a factor by agent name")
                values |= {**knobs, "weights": {**values.get("weights", {}), **weights}}
        return cls(**values)


class ContinualConfig(BaseModel):
    """
    How an agent merges while it trains.

    Args:
        merge_every (`int`):
            Optimizer steps between merges.
        merge (`MergeConfig`, *optional*):
            The merge rule and its knobs; the same in all jobs of a run.
        resync (`str`, *optional*, defaults to `"generalist"`):
            `"generalist"`: agents load every round. `"none"`: they only publish (observe mode). The same in all jobs.
        carry (`bool`, *optional*, defaults to `True`):
            Keep what a round did not consume of the agent's update, to be merged in a later round.
        wait (`str` or `int`, *optional*, defaults to `"all"`):
            A round closes when all agents that are alive and not done have published (`"all"`), at once
            (`"available"`), or with that many publications (a number).
        timeout (`float`, *optional*, defaults to `1800`):
            Seconds to wait for a round; then it closes with what is there.
        agents (`tuple[str, ...]`, *optional*):
            Agents that the first round waits for even before they have joined.
        moments (`str`, *optional*, defaults to `"keep"`):
            Optimizer moments after loading: `"keep"` or `"reset"` (moments and their step count).
        reference (`str`, *optional*, defaults to `"keep"`):
            The trainer's reference model (β > 0): `"keep"` leaves it as the trainer made it, `"generalist"` loads
            every round into it, so that the KL term holds agents near the generalist they loaded.
        lora (`str`, *optional*, defaults to `"fold"`):
            How a round goes into a model with a LoRA adapter: `"fold"` puts it into the base and starts the adapter at
            zero, `"svd"` makes the adapter its best fit.
        export_rank (`int`, *optional*):
            Export generalists as LoRA adapters of this rank in place of models: the best fit of what they change of
            the base. The same in all jobs.
        on_hub_error (`str`, *optional*, defaults to `"skip"`):
            A hub that cannot be read or written (full disk, lost mount): `"skip"` trains on and publishes at the next
            merge; `"raise"` stops. Wrong numbers always raise.
        keep_rounds (`int`, *optional*, defaults to `3`):
            Generalists and states to keep in the hub.
        heartbeat (`float`, *optional*, defaults to `10`):
            Seconds between signs of life.
        patience (`float`, *optional*, defaults to `120`):
            Seconds without a sign of life after which other agents go on without this one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    merge_every: int = Field(ge=1)
    merge: MergeConfig = MergeConfig()
    resync: Literal["generalist", "none"] = "generalist"
    carry: bool = True
    wait: Literal["all", "available"] | Annotated[int, Field(ge=1)] = "all"
    timeout: float = Field(default=1800, gt=0)
    agents: tuple[str, ...] = ()
    moments: Literal["keep", "reset"] = "keep"
    reference: Literal["keep", "generalist"] = "keep"
    lora: Literal["fold", "svd"] = "fold"
    export_rank: int | None = Field(default=None, ge=1)
    on_hub_error: Literal["skip", "raise"] = "skip"
    keep_rounds: int = Field(default=3, ge=1)
    heartbeat: float = Field(default=10, gt=0)
    patience: float = Field(default=120, gt=0)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, where YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' stands twice", key_node.start_mark
                )
            seen.append(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """
    The mapping in a YAML file.

    Raises:
        `ValueError`: if the file is missing, is not YAML, or holds something else than a mapping.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such file") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds {type(values).__name__}, expected a mapping such as `method: ram`")
    odd = [key for key in values if not isinstance(key, str)]
    if odd:
        raise ValueError(f"{path}: the key {odd[0]!r} is not a name")
    return values
