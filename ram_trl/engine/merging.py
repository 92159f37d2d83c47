"""
The merge engine: count → plan → merge, chunk by chunk, over any stores.

Base and agents come in as stores (`weights/`), merged chunks go out through a function of the caller. Nothing larger
than a few chunks is held. All arithmetic is fp32; the result of an entry depends on that entry and on the plan only,
so every chunk size, thread count and shard layout gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ram_trl.config import MergeConfig
from ram_trl.engine.counting import CHUNK, Compared, compare, find_non_finite, make_plan
from ram_trl.engine.elementwise import largest
from ram_trl.engine.plan import Plan
from ram_trl.engine.workers import Workers
from ram_trl.methods import Chunk, rule
from ram_trl.problems import MergeInputError, Problem, agent_place
from ram_trl.telling.report import MergeReport, make_report
from ram_trl.weights import Span, Store, cut, whole
from ram_trl.weights.memory import StateDict
from ram_trl.weights.preflight import check_layout, check_names

Result = TypeVar("Result")


def merge_spans(
    base: Store,
    agents: Mapping[str, Store],
    plan: Plan,
    finish: Callable[[Span, Tensor], Result],
    workers: Workers,
    *,
    references: Mapping[str, Store] | None = None,
    spans: Iterable[Span] | None = None,
    chunk: int = CHUNK,
) -> Iterator[Result]:
    """
    Merges chunk by chunk.

    Args:
        base (`Store`), agents (`Mapping[str, Store]`), references (`Mapping[str, Store]`, *optional*):
            As given to `make_plan`.
        plan (`Plan`):
            What `make_plan` decided.
        finish (`Callable[[Span, Tensor], Result]`):
            Takes the merged entries of a span: flat, float32. Called from several threads, once per chunk.
        workers (`Workers`):
            An entered pool.
        spans (`Iterable[Span]`, *optional*):
            What to merge; by default the whole model.
        chunk (`int`, *optional*):
            Entries per chunk.

    Returns:
        `Iterator[Result]`: what `finish` returned, in the order of the spans; nothing is merged unless it is
        iterated over.
    """
    compared = compare(base, agents, references)
    merge = rule(plan)

    def work(span: Span) -> Result:
        return finish(span, merge(_load(base, compared, plan, span)))

    return workers.map(work, cut(whole(base) if spans is None else spans, chunk))


def merge_state_dicts(
    base: Mapping[str, Tensor],
    agents: Mapping[str, Mapping[str, Tensor]],
    config: MergeConfig | None = None,
    *,
    threads: int | None = None,
    chunk: int = CHUNK,
) -> tuple[dict[str, Tensor], MergeReport]:
    """
    Merges agents held in memory.

    Args:
        base (`Mapping[str, Tensor]`):
            State dict of the checkpoint the agents started from. Entries that share memory are tied.
        agents (`Mapping[str, Mapping[str, Tensor]]`):
            State dicts by agent name, with the base's names and shapes.
        config (`MergeConfig`, *optional*):
            The knobs; by default RAM+ with our defaults.
        threads (`int`, *optional*):
            Number of threads; by default the CPUs this process may use.
        chunk (`int`, *optional*):
            Entries per chunk; changes no bit of the result.

    Returns:
        `tuple[dict[str, Tensor], MergeReport]`: the merged state dict, in the base's dtypes and on its devices, tied
        entries sharing memory as in the base; and the report.

    Raises:
        `MergeInputError`: naming everything that cannot be merged.

    Example:

    ```python
    >>> from ram_trl import MergeConfig, merge_state_dicts
    >>> base = {"w": torch.tensor([1.0, 2.0, 3.0])}
    >>> agents = {"tool": {"w": torch.tensor([1.5, 2.0, 3.5])}, "code": {"w": torch.tensor([1.0, 2.0, 4.5])}}
    >>> merged, report = merge_state_dicts(base, agents, MergeConfig(epsilon=1e-5, r=0))
    >>> merged["w"]
    tensor([1.5000, 2.0000, 4.0000])
    ```
    """
    config = config or MergeConfig()
    problems = _not_tensors("base", base)
    for name, tensors in agents.items():
        problems += _not_tensors(agent_place(name), tensors)
    if problems:
        raise MergeInputError(problems)
    base_store = StateDict(base)
    stores: dict[str, Store] = {name: StateDict(tensors) for name, tensors in agents.items()}
    problems = check_names(stores, config)
    if not base_store.names():
        problems.append(Problem("base", "it holds no tensors"))
    for name, store in stores.items():
        problems += check_layout(base_store, store, agent_place(name))
    if problems:
        for where, store in {
            "base": base_store,
            **{agent_place(name): store for name, store in stores.items()},
        }.items():
            problems += find_non_finite(where, store, whole(store))
        raise MergeInputError(problems)

    merged = {name: base[name].detach().clone(memory_format=torch.contiguous_format) for name in base_store.names()}
    flat = {name: tensor.view(-1) for name, tensor in merged.items()}

    def keep(span: Span, values: Tensor) -> None:
        flat[span.name][span.start : span.stop] = stored(values, base_store.dtype(span.name), span)

    with Workers(threads) as workers:
        plan = make_plan(base_store, stores, config, workers, chunk=chunk)
        for _ in merge_spans(base_store, stores, plan, keep, workers, chunk=chunk):
            pass
    tied = {alias: merged[name] for alias, name in base_store.aliases.items()}
    return {name: (merged | tied)[name] for name in base}, make_report(base_store, stores, plan)


def _not_tensors(where: str, tensors: Mapping[str, Tensor]) -> list[Problem]:
    if not isinstance(tensors, Mapping):
        return [Problem(where, f"it is {type(tensors).__name__}, expected a state dict")]
    return [
        Problem(where, f"'{name}' is {type(value).__name__}, expected a dense tensor with values", str(name))
        for name, value in tensors.items()
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type == "meta"
    ]


def stored(values: Tensor, dtype: torch.dtype, span: Span) -> Tensor:
    """
    Merged fp32 entries in the dtype they are stored in, rounded to nearest.

    Raises:
        `MergeInputError`: if an entry overflows to Inf.
    """
    result = values.to(dtype)
    peak, limit = largest(values), torch.finfo(dtype).max
    if not peak <= limit and not torch.isfinite(result).all():
        what = f"'{span.name}' merges to {peak:.6g}, beyond what {dtype} holds ({limit:.6g}); "
        what += "a weight, r or scale is too large" if dtype == torch.float32 else "save the base in a wider dtype"
        raise MergeInputError([Problem("output", what, span.name)])
    return result


def _load(base: Store, compared: Sequence[Compared], plan: Plan, span: Span) -> Chunk:
    before = span.of(base)
    pairs = zip(compared, plan.thresholds, strict=True)
    changes = (against.on(span, base, before, plan.config, threshold) for against, threshold in pairs)
    return Chunk(span.name, span.start, before, changes, len(compared))
