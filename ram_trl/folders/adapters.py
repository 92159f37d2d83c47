"""
Merged agents as a LoRA adapter: the best low-rank fit of what the merge changes, layer by layer.

`average` and `task_arithmetic` of plain LoRA agents are sums of products, so their fit comes from the factors alone;
everything else is merged densely, one parameter at a time, and fitted then. What an adapter cannot hold as a product
(norms, modules that an agent trained whole) goes into it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ram_trl.config import MergeConfig
from ram_trl.engine.counting import CHUNK, make_plan
from ram_trl.engine.low_rank import Fit, fit, fit_product
from ram_trl.engine.merging import merge_spans
from ram_trl.engine.plan import Plan
from ram_trl.engine.workers import Workers
from ram_trl.folders.assembly import AdapterReport, Assembly, Form, MergedAdapter
from ram_trl.problems import MergeInputError, Problem, agent_place
from ram_trl.weights import INPUT_EMBEDDINGS, Span, Store, entries, mergeable
from ram_trl.weights.adapter import Adapter, live_adapter
from ram_trl.weights.adapter_tensors import plain_name
from ram_trl.weights.anatomy import Anatomy, Piece
from ram_trl.weights.edits import LowRank, Replace, ReplaceRows
from ram_trl.weights.memory import StateDict
from ram_trl.weights.preflight import check_names


def merge_adapters(
    model: nn.Module,
    adapters: Sequence[str],
    name: str,
    config: MergeConfig | None = None,
    *,
    rank: int | None = None,
    max_error: float | None = None,
    threads: int | None = None,
) -> AdapterReport:
    """
    Merges LoRA adapters of a PEFT model into one, in the space of their updates ΔW.

    Takes the place of `add_weighted_adapter`. An adapter that has that name is replaced; if it was active, the new one
    is. The others stay as they are.

    Args:
        model (`PeftModel`):
            The model; no adapter may be merged into its weights.
        adapters (`Sequence[str]`):
            Names of the adapters to merge: the agents.
        name (`str`):
            Name of the merged adapter.
        config (`MergeConfig`, *optional*):
            The merge rule; by default RAM+ with our defaults.
        rank (`int`, *optional*):
            Rank of the merged adapter; by default the largest among the agents.
        max_error (`float`, *optional*):
            Instead of a rank: the largest relative error of a layer; each takes the smallest rank that has it.
        threads (`int`, *optional*):
            Number of threads; by default the CPUs this process may use.

    Returns:
        `AdapterReport`: rank and error by layer.

    Raises:
        `MergeInputError`: naming everything that cannot be merged; the model is left as it was.

    Example:

    ```python
    >>> from ram_trl import MergeConfig, merge_adapters
    >>> report = merge_adapters(model, ["tool", "code"], "generalist", MergeConfig(top=0.2), rank=32)
    >>> model.set_adapter("generalist")
    ```
    """
    from peft import LoraConfig

    config = config or MergeConfig()
    peft_configs: dict[str, Any] = model.peft_config  # type: ignore[assignment]
    problems = _check_live(model, peft_configs, adapters, config)
    if problems:
        raise MergeInputError(problems)
    inner = model.get_base_model()  # type: ignore[operator]
    plain = ((plain_name(found), tensor) for found, tensor in inner.named_parameters(remove_duplicate=False))
    base = StateDict({found: tensor for found, tensor in plain if found is not None})
    opened = {agent: live_adapter(model, agent, base, agent_place(agent)) for agent in adapters}
    problems = [problem for one in opened.values() for problem in one.problems]
    if problems:
        raise MergeInputError(problems)
    stores = {agent: one.store for agent, one in opened.items()}
    anatomy = Anatomy(inner.config.to_dict() if hasattr(inner.config, "to_dict") else {}, base, inner)
    if rank is None and max_error is None:
        rank = max(_rank(peft_configs[agent]) for agent in adapters)
    with Workers(threads) as workers:
        merged = merge_low_rank(base, stores, config, workers, anatomy, rank=rank, max_error=max_error)

    task = {"task_type": peft_configs[adapters[0]].task_type}
    _install(model, name, LoraConfig(**merged.settings, **task, inference_mode=True), merged.tensors)
    return merged.report


def merge_low_rank(
    base: Store,
    agents: Mapping[str, Store],
    config: MergeConfig,
    workers: Workers,
    anatomy: Anatomy,
    *,
    rank: int | None = None,
    max_error: float | None = None,
    plan: Plan | None = None,
    chunk: int = CHUNK,
) -> MergedAdapter:
    """
    Merges agents into an adapter.

    Args:
        base (`Store`):
            The checkpoint.
        agents (`Mapping[str, Store]`):
            Adapters or full checkpoints by agent name, of the base's layout.
        config (`MergeConfig`):
            The merge rule.
        workers (`Workers`):
            An entered pool; layers are fitted side by side.
        anatomy (`Anatomy`):
            The base's.
        rank (`int`, *optional*), max_error (`float`, *optional*):
            One of them: the rank of all layers, or the largest relative error of each.
        plan (`Plan`, *optional*):
            What `make_plan` decided, if it has been asked; a merge that needs none makes none.
        chunk (`int`, *optional*):
            Entries per chunk; changes no bit of what is fitted.

    Returns:
        `MergedAdapter`: with its report.

    Raises:
        `MergeInputError`: if the merge changes nothing, or something that an adapter cannot hold.
        `ValueError`: if not exactly one of `rank` and `max_error` is given.
    """
    if (rank is None) == (max_error is None):
        raise ValueError(f"rank is {rank} and max_error is {max_error}; give one of them")
    if (rank is not None and rank < 1) or (max_error is not None and not 0 <= max_error < 1):
        raise ValueError(f"rank={rank}, max_error={max_error}; a rank is 1 or more, an error from 0 to below 1")
    merge = _Merge(base, agents, config, workers, anatomy, rank, max_error, plan, chunk)
    return merge.adapter()


class _Serial(Workers):
    """Works in the thread that asks, within a pool that works on several layers."""

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(work, items)


class _Merge:
    def __init__(
        self,
        base: Store,
        agents: Mapping[str, Store],
        config: MergeConfig,
        workers: Workers,
        anatomy: Anatomy,
        rank: int | None,
        max_error: float | None,
        plan: Plan | None,
        chunk: int,
    ) -> None:
        self._base, self._agents, self._config, self._anatomy = base, agents, config, anatomy
        self._workers, self._rank, self._max_error, self._chunk = workers, rank, max_error, chunk
        self._coefficients = _coefficients(config, sorted(agents))
        self._plan = plan

    def adapter(self) -> MergedAdapter:
        touched = self._touched()
        fitted = [name for name in touched if self._is_fitted(name)]
        dense = [name for name in fitted if not self._from_factors(name)]
        whole = [name for name in touched if name not in fitted]
        self._refuse_non_finite(fitted)
        if self._plan is None and (dense or whole):
            self._plan = make_plan(self._base, self._agents, self._config, self._workers, chunk=self._chunk)
        fits = dict(zip(fitted, self._workers.map(self._fit, fitted), strict=True))
        fits = {name: found for name, found in fits.items() if any(one.norm for one in found)}
        deltas = {name: self._whole_delta(name) for name in whole}
        deltas = {name: delta for name, delta in deltas.items() if bool(delta.any())}
        if not fits and not deltas:
            what = "the merge changes nothing, so there is no adapter to make; see the criterion"
            raise MergeInputError([Problem("output", what)])
        rows = {name: found for name in deltas if (found := self._rows(name)) is not None}
        settings = [agent.settings for agent in self._agents.values() if isinstance(agent, Adapter)]
        forms = {name: self._form(name) for name in fits}
        assembly = Assembly(self._base, self._anatomy, settings, forms, fits, deltas, rows)
        if assembly.problems:
            raise MergeInputError(assembly.problems)
        return assembly.adapter()

    def _touched(self) -> list[str]:
        """Parameters of the model that some agent may change, sorted."""
        stored: set[str] = set()
        for agent in self._agents.values():
            stored |= set(agent.edits if isinstance(agent, Adapter) else mergeable(self._base))
        if self._plan is not None:
            counts = self._plan.counts
            stored = {name for name in stored if name in counts and counts[name].touched}
        return sorted({self._anatomy.parameter(name) for name in stored})

    def _pieces(self, parameter: str) -> list[Piece]:
        pieces = self._anatomy.pieces(parameter)
        aliases = self._base.aliases
        return [Piece(aliases.get(one.stored, one.stored), one.expert, one.start, one.stop) for one in pieces]

    def _edits(self, parameter: str) -> list[Any]:
        return [
            edit
            for agent in self._agents.values()
            if isinstance(agent, Adapter)
            for piece in self._pieces(parameter)
            for edit in agent.edits.get(piece.stored, ())
        ]

    def _is_fitted(self, parameter: str) -> bool:
        """Matrices and experts are fitted, unless an agent trained them whole."""
        shape = self._anatomy.shape(parameter) or ()
        return len(shape) in (2, 3) and not any(
            isinstance(edit, Replace | ReplaceRows) for edit in self._edits(parameter)
        )

    def _from_factors(self, parameter: str) -> bool:
        return self._coefficients is not None and all(
            isinstance(agent, Adapter)
            and all(
                not agent.edits.get(piece.stored)
                or (len(agent.edits[piece.stored]) == 1 and isinstance(agent.edits[piece.stored][0], LowRank))
                for piece in self._pieces(parameter)
            )
            for agent in self._agents.values()
        )

    def _refuse_non_finite(self, parameters: Sequence[str]) -> None:
        """For what is fitted from factors; all else goes through `make_plan`, which looks."""
        problems = []
        for name in filter(self._from_factors, parameters):
            for agent, store in sorted(self._agents.items()):
                edits = store.edits  # type: ignore[attr-defined]
                found = [edit for piece in self._pieces(name) for edit in edits.get(piece.stored, ())]
                if not all(torch.isfinite(edit.left).all() and torch.isfinite(edit.right).all() for edit in found):
                    what = f"its factors of '{name}' hold NaN or Inf; train or save it again"
                    problems.append(Problem(agent_place(agent), what, name, "not finite"))
        if problems:
            raise MergeInputError(problems)

    def _fit(self, parameter: str) -> list[Fit]:
        """By expert; one for a matrix."""
        shape = self._anatomy.shape(parameter) or ()
        experts = range(shape[0] if len(shape) == 3 else 1)
        found = [
            self._fit_product(parameter, expert)
            if self._from_factors(parameter)
            else fit(self._matrix(parameter, expert, shape), self._rank, self._max_error)
            for expert in experts
        ]
        rank = self._rank if self._rank is not None else max(1, *(one.rank for one in found))
        return [one.padded(rank) for one in found]

    def _fit_product(self, parameter: str, expert: int) -> Fit:
        assert self._coefficients is not None
        rows, columns = (self._anatomy.shape(parameter) or ())[-2:]
        lefts: list[Tensor] = []
        rights: list[Tensor] = []
        for agent, coefficient in zip(sorted(self._agents), self._coefficients, strict=True):
            edits = self._agents[agent].edits  # type: ignore[attr-defined]
            for piece in self._pieces(parameter):
                if piece.expert not in (None, expert) or piece.stored not in edits:
                    continue
                product = edits[piece.stored][0]
                place, start = (expert, 0) if piece.expert is None else (0, piece.start)
                left = torch.zeros(rows, product.left.shape[2], dtype=torch.float64)
                left[start : start + product.rows] = product.left[place].double() * coefficient
                if rights and torch.equal(rights[-1], product.right[place].double()):
                    lefts[-1] += left  # other rows of the same product
                else:
                    lefts.append(left)
                    rights.append(product.right[place].double())
        if not lefts:
            return fit(torch.zeros(rows, columns), self._rank, self._max_error)
        return fit_product(torch.cat(lefts, 1), torch.cat(rights, 0), self._rank, self._max_error)

    def _matrix(self, parameter: str, expert: int, shape: Sequence[int]) -> Tensor:
        """ΔW of the merge, (rows, columns), float32."""
        rows, columns = shape[-2:]
        parts = []
        for piece in self._pieces(parameter):
            if piece.expert is None:
                size = rows * columns
                parts.append(self._delta(piece, expert * size, (expert + 1) * size))
            elif piece.expert == expert:
                parts.append(self._delta(piece))
        return torch.cat(parts).view(rows, columns)

    def _whole_delta(self, parameter: str) -> Tensor:
        """ΔW of the merge in the shape of the parameter, float32."""
        shape = self._anatomy.shape(parameter) or ()
        if len(shape) == 3:
            return torch.stack([self._matrix(parameter, expert, shape) for expert in range(shape[0])])
        return self._delta(self._pieces(parameter)[0]).view(shape)

    def _rows(self, parameter: str) -> Tensor | None:
        """The rows that agents trained one by one, if nothing else of the parameter was trained; ascending."""
        edits = self._edits(parameter)
        if not all(isinstance(agent, Adapter) for agent in self._agents.values()):
            return None
        if not all(isinstance(edit, ReplaceRows) for edit in edits):
            return None
        return torch.cat([edit.rows for edit in edits]).unique()

    def _delta(self, piece: Piece, start: int = 0, stop: int | None = None) -> Tensor:
        span = Span(piece.stored, start, entries(self._base, piece.stored) if stop is None else stop)
        delta = torch.empty(len(span))
        assert self._plan is not None

        def keep(part: Span, values: Tensor) -> None:
            torch.sub(values, part.of(self._base), out=delta[part.start - start : part.stop - start])

        for _ in merge_spans(self._base, self._agents, self._plan, keep, _Serial(1), spans=[span], chunk=self._chunk):
            pass
        return delta

    def _form(self, parameter: str) -> Form:
        """How peft adapts a parameter: by the kind of its module, or as a parameter of its own."""
        module, _, own = parameter.rpartition(".")
        adapters = [agent.settings for agent in self._agents.values() if isinstance(agent, Adapter)]
        if any(settings.targets(parameter) for settings in adapters):
            return "parameter"
        kind = self._anatomy.kind(module)
        if kind in ("linear", "conv1d", "embedding") and own == "weight":
            return kind
        if kind is None and own == "weight":
            if parameter.endswith(INPUT_EMBEDDINGS):
                return "embedding"
            return "conv1d" if any(settings.flipped for settings in adapters) else "linear"
        return "parameter"


def _coefficients(config: MergeConfig, agents: Sequence[str]) -> list[float] | None:
    """Factors on the updates, where the rule is their weighted sum; `None` for other rules."""
    if config.ulp or config.top_fraction is not None or config.fixed_epsilon != 0:
        return None
    scale = {"average": 1 / len(agents), "task_arithmetic": config.scale}.get(config.method)
    return None if scale is None else [scale * config.weight(agent) for agent in agents]


def _install(model: Any, name: str, config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Adds an adapter to a PEFT model, or replaces it; puts things back if peft does not take it."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    active = list(model.active_adapters)
    before = None
    if name in model.peft_config:
        held = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        before = model.peft_config[name], {key: tensor.clone() for key, tensor in held.items()}
    try:
        if before:
            model.delete_adapter(name)
        model.add_adapter(name, config)
        result = set_peft_model_state_dict(model, dict(tensors), adapter_name=name)
        if result.unexpected_keys:
            raise ValueError(f"it has no place for {result.unexpected_keys[0]}")
    except Exception as error:
        if name in model.peft_config:
            model.delete_adapter(name)
        if before:
            model.add_adapter(name, before[0])
            set_peft_model_state_dict(model, before[1], adapter_name=name)
        what = f"peft does not take the merged adapter beside the others ({error}); save them all and merge folders"
        raise MergeInputError([Problem("output", what)]) from error
    finally:
        if name in active:
            model.set_adapter(name, inference_mode=True)


def _rank(config: Any) -> int:
    return max([int(config.r), *(int(rank) for rank in (config.rank_pattern or {}).values())])


def _check_live(
    model: nn.Module, configs: Mapping[str, Any], adapters: Sequence[str], config: MergeConfig
) -> list[Problem]:
    problems = check_names(adapters, config)
    for agent in adapters:
        if agent not in configs:
            what = f"the model has no adapter of that name; it has {', '.join(sorted(configs))}"
            problems.append(Problem(agent_place(agent), what))
    held = sorted({one for module in model.modules() for one in getattr(module, "merged_adapters", ())})
    if held:
        what = f"adapter '{held[0]}' is merged into the model's weights; call unmerge_adapter() first"
        problems.append(Problem("base", what))
    if any(parameter.device.type == "meta" or parameter.numel() == 0 for parameter in model.parameters()):
        what = "parameters of the model have no values here (sharded or offloaded); merge saved adapters instead"
        problems.append(Problem("base", what))
    return problems
