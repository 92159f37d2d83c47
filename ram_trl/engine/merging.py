"""
The merge engine: count → plan → merge, chunk by chunk, over any stores.

Base and agents come in as stores (`weights/`), merged chunks go out through a function of the caller. Nothing larger
than a few chunks is held. All arithmetic is fp32; the result of an entry depends on that entry and on the plan only,
so every chunk size, thread count and shard layout gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ram_trl.config import MergeConfig
from ram_trl.engine import criterion
from ram_trl.engine.compiled import tally
from ram_trl.engine.elementwise import how_many, largest
from ram_trl.engine.plan import Counts, Plan
from ram_trl.engine.workers import Workers
from ram_trl.methods import Chunk, rule
from ram_trl.methods.change import Change
from ram_trl.problems import MergeInputError, Problem, agent_place
from ram_trl.telling.report import MergeReport, make_report
from ram_trl.weights import Span, Store, cut, entries, mergeable, whole
from ram_trl.weights.memory import StateDict
from ram_trl.weights.preflight import check_layout, check_names

CHUNK = 1 << 19
"""Entries per chunk: the working set of a few agents stays in the cache of a core."""

SAMPLE = 1 << 11
AT_ONCE = 16
"""Entries of each chunk that tell about where the `top` threshold lies."""

Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]
"""Combines a tensor elementwise over the ranks of a job; every rank gets the result."""

Result = TypeVar("Result")

Advance = Callable[[int], None]
"""Told how many entries have just been read, for progress bars."""


def alone(tensor: Tensor, operation: Literal["sum", "max"]) -> Tensor:
    """The `Reduce` of a single process."""
    return tensor


def make_plan(
    base: Store,
    agents: Mapping[str, Store],
    config: MergeConfig,
    workers: Workers,
    *,
    references: Mapping[str, Store] | None = None,
    spans: Sequence[Span] | None = None,
    reduce: Reduce = alone,
    chunk: int = CHUNK,
    advance: Advance = lambda entries: None,
) -> Plan:
    """
    Reads everything and decides the merge: thresholds, counts, λ.

    Collective where `reduce` is: all ranks, with the same tensors in their stores, each over its own spans.

    Args:
        base (`Store`):
            What the agents are compared with.
        agents (`Mapping[str, Store]`):
            Stores by agent name, of the base's layout.
        config (`MergeConfig`):
            The knobs.
        workers (`Workers`):
            An entered pool.
        references (`Mapping[str, Store]`, *optional*):
            By agent name, what its task vector is measured against, where that is not the base.
        spans (`Sequence[Span]`, *optional*):
            What this rank counts; by default the whole model.
        reduce (`Reduce`, *optional*):
            Combines the counts of the ranks.
        chunk (`int`, *optional*):
            Entries per chunk.
        advance (`Advance`, *optional*):
            Called with the number of entries of each chunk read; `reads(config)` tells how often each is read.

    Returns:
        `Plan`: the same on every rank.

    Raises:
        `MergeInputError`: naming every agent and tensor that holds NaN or Inf.
    """
    spans = whole(base) if spans is None else spans
    names = sorted(agents)
    compared = _compared(base, agents, references)
    thresholds = [config.fixed_epsilon] * len(names)
    total = sum(entries(base, name) for name in mergeable(base))
    if config.top_fraction is not None and total:
        k = criterion.wanted(config.top_fraction, total)
        thresholds = _top_thresholds(base, compared, config, k, total, workers, spans, reduce, chunk, advance)
    # ε is compared in fp32, so it is rounded to fp32 once, here.
    thresholds = [float(np.float32(threshold)) for threshold in thresholds]

    local = {name: Counts.zero(len(names)) for name in mergeable(base)}
    pieces = list(cut(spans, chunk))
    count = partial(_count, base, compared, config, thresholds)
    for piece, counts in zip(pieces, workers.map(count, pieces), strict=True):
        local[piece.name] += counts
        advance(len(piece))
    plan = Plan(config, tuple(names), tuple(thresholds), _reduced(local, len(names), reduce))
    _refuse_non_finite(base, agents, plan, spans)
    return plan


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
    compared = _compared(base, agents, references)
    merge = rule(plan)

    def work(span: Span) -> Result:
        return finish(span, merge(_load(base, compared, plan, span)))

    return workers.map(work, cut(whole(base) if spans is None else spans, chunk))


def reads(config: MergeConfig) -> int:
    """How often `make_plan` reads each entry: once to count, once more to find the `top` thresholds."""
    return 2 if config.top_fraction is not None else 1


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


@dataclass(frozen=True)
class Compared:
    """An agent's weights and what its task vector is measured against."""

    agent: str
    store: Store
    reference: Store

    def on(self, span: Span, base: Store, before: Tensor, config: MergeConfig, threshold: float) -> Change:
        """What it may have changed on a span of the base, which has been read already."""
        reference = before if self.reference is base else span.of(self.reference)
        stored = self.store.read(span.name, span.start, span.stop)
        return Change(self.agent, stored, reference, config, threshold, base.dtype(span.name))


def _compared(base: Store, agents: Mapping[str, Store], references: Mapping[str, Store] | None) -> list[Compared]:
    """By sorted name."""
    return [Compared(name, agents[name], (references or {}).get(name, base)) for name in sorted(agents)]


def _load(base: Store, compared: Sequence[Compared], plan: Plan, span: Span) -> Chunk:
    before = span.of(base)
    pairs = zip(compared, plan.thresholds, strict=True)
    changes = (against.on(span, base, before, plan.config, threshold) for against, threshold in pairs)
    return Chunk(span.name, span.start, before, changes, len(compared))


def _count(
    base: Store, compared: Sequence[Compared], config: MergeConfig, thresholds: Sequence[float], span: Span
) -> Counts:
    before = span.of(base)
    agents = len(compared)
    pairs = zip(compared, thresholds, strict=True)
    surveys = [against.on(span, base, before, config, threshold).survey() for against, threshold in pairs]
    # A row per agent, a bit per entry: what several agents changed, and in which direction, is counted 64 at a time.
    active, up, down = (np.stack([getattr(found, kind) for found in surveys]) for kind in ("active", "up", "down"))

    both, agree = np.zeros((agents, agents), np.int64), np.zeros((agents, agents), np.int64)
    one, many = np.zeros_like(active[0]), np.zeros_like(active[0])
    for i in range(agents):
        both[i, i:] = both[i:, i] = _ones(active[i] & active[i:])
        agree[i, i:] = agree[i:, i] = _ones((up[i] & up[i:]) | (down[i] & down[i:]))
        many |= one & active[i]
        one |= active[i]
    conflicting = np.bitwise_or.reduce(up) & np.bitwise_or.reduce(down)
    return Counts(
        entries=len(span),
        both=both,
        agree=agree,
        shared=_ones(active & many),
        touched=int(_ones(one)),
        touched_by_many=int(_ones(many)),
        conflicting=int(_ones(conflicting)),
        largest=np.array([found.largest for found in surveys]),
        square=np.array([found.square for found in surveys]),
        square_active=np.array([found.square_active for found in surveys]),
    )


def _ones(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Number of bits set, along the last axis."""
    return np.bitwise_count(words).sum(axis=-1, dtype=np.int64)


def _top_thresholds(
    base: Store,
    compared: Sequence[Compared],
    config: MergeConfig,
    k: int,
    entries: int,
    workers: Workers,
    spans: Sequence[Span],
    reduce: Reduce,
    chunk: int,
    advance: Advance,
) -> list[float]:
    pieces = list(cut(spans, chunk))
    samples = [Span(piece.name, piece.start, min(piece.start + SAMPLE, piece.stop)) for piece in pieces]
    found: dict[int, int] = {}
    for looked_at in (samples, pieces):  # what the sample misses, the whole finds
        left = [i for i in range(len(compared)) if i not in found]
        if not left:
            break
        agents = [compared[i] for i in left]
        histograms = reduce(_upper_histograms(base, agents, config, workers, looked_at), "sum")
        brackets = [criterion.bracket(histogram, k, entries) for histogram in histograms]
        told = advance if looked_at is samples else lambda n: None
        above, within = _within(base, agents, config, brackets, workers, pieces, told)
        above = reduce(above, "sum")
        for i, bracket, over, counts in zip(left, brackets, above, within, strict=True):
            pattern = criterion.kth_pattern(bracket, k - int(over), reduce(torch.from_numpy(counts), "sum"))
            if pattern is not None:
                found[i] = pattern
    return [criterion.strict_threshold(found[i]) for i in range(len(compared))]


def _changes(base: Store, compared: Sequence[Compared], config: MergeConfig, span: Span) -> Iterator[Change]:
    before = span.of(base)
    return (against.on(span, base, before, config, 0.0) for against in compared)


def _upper_histograms(
    base: Store, compared: Sequence[Compared], config: MergeConfig, workers: Workers, spans: Sequence[Span]
) -> Tensor:
    def work(several: Sequence[Span]) -> Tensor:
        counts = torch.zeros(len(compared), criterion.UPPER_BINS, dtype=torch.int64)
        for span in several:
            for change, row in zip(_changes(base, compared, config, span), counts, strict=True):
                change.tally_upper(row)
        return counts

    totals = torch.zeros(len(compared), criterion.UPPER_BINS, dtype=torch.int64)
    # Histograms are larger than samples: adding them up would take longer than counting.
    for counted in workers.map(work, [spans[at : at + AT_ONCE] for at in range(0, len(spans), AT_ONCE)]):
        totals += counted
    return totals


def _within(
    base: Store,
    compared: Sequence[Compared],
    config: MergeConfig,
    brackets: Sequence[criterion.Bracket],
    workers: Workers,
    spans: Sequence[Span],
    advance: Advance,
) -> tuple[Tensor, list[NDArray[np.int64]]]:
    """How many |τ| of each agent lie above its bracket, and how many have each bit pattern within it."""

    def work(span: Span) -> tuple[int, list[tuple[int, NDArray[np.int32]]]]:
        return len(span), [
            change.split(bracket)
            for change, bracket in zip(_changes(base, compared, config, span), brackets, strict=True)
        ]

    above = torch.zeros(len(compared), dtype=torch.int64)
    within = [np.zeros(bracket.stop - bracket.start, np.int64) for bracket in brackets]
    for done, parts in workers.map(work, spans):
        for i, (over, offsets) in enumerate(parts):
            above[i] += over
            tally(within[i], offsets)
        advance(done)
    return above, within


def _reduced(local: Mapping[str, Counts], agents: int, reduce: Reduce) -> dict[str, Counts]:
    """Counts over all ranks. Collective where `reduce` is: three calls."""
    if reduce is alone:
        return dict(local)
    names = sorted(local)
    whole_numbers = torch.tensor(
        np.array(
            [
                [c.entries, c.touched, c.touched_by_many, c.conflicting, *c.shared, *c.both.flat, *c.agree.flat]
                for c in (local[name] for name in names)
            ],
            np.int64,
        )
    )
    squares = torch.tensor(np.array([[*local[name].square, *local[name].square_active] for name in names]))
    largest = torch.tensor(np.array([local[name].largest for name in names]))
    whole_numbers, squares = reduce(whole_numbers, "sum"), reduce(squares, "sum")
    # A NaN does not survive every backend's max; Inf does.
    largest = reduce(torch.where(torch.isnan(largest), torch.inf, largest), "max")
    merged = {}
    for name, row, real, peak in zip(names, whole_numbers.numpy(), squares.numpy(), largest.numpy(), strict=True):
        shared, both, agree = np.split(row[4:], [agents, agents + agents**2])
        merged[name] = Counts(
            entries=int(row[0]),
            both=both.reshape(agents, agents),
            agree=agree.reshape(agents, agents),
            shared=shared,
            touched=int(row[1]),
            touched_by_many=int(row[2]),
            conflicting=int(row[3]),
            largest=peak,
            square=real[:agents],
            square_active=real[agents:],
        )
    return merged


def _refuse_non_finite(base: Store, agents: Mapping[str, Store], plan: Plan, spans: Sequence[Span]) -> None:
    problems = []
    for name, counts in plan.counts.items():
        bad = [agent for agent, peak in zip(plan.agents, counts.largest, strict=True) if not np.isfinite(peak)]
        if not bad:
            continue
        here = [span for span in spans if span.name == name]
        places = {"base": base} | {agent_place(agent): agents[agent] for agent in bad}
        found = [problem for place, store in places.items() for problem in find_non_finite(place, store, here)]
        if not found:
            what = f"the task vector of '{name}' is not finite: another rank holds the entries, or it overflows fp32"
            found = [Problem(agent_place(agent), what, name, "not finite") for agent in bad]
        problems += found
    if problems:
        raise MergeInputError(problems)


def find_non_finite(where: str, store: Store, spans: Iterable[Span]) -> list[Problem]:
    """Problems of all tensors that hold NaN or Inf within the spans; reads them."""
    count: dict[str, int] = {}
    first: dict[str, int] = {}
    for span in cut(spans, CHUNK):
        bad = ~torch.isfinite(span.of(store))
        if bad.any():
            first.setdefault(span.name, span.start + int(bad.int().argmax()))
            count[span.name] = count.get(span.name, 0) + how_many(bad)
    return [
        Problem(
            where,
            f"'{name}' holds {count[name]} NaN or Inf entries, the first at flat index {first[name]}; train or save "
            "it again",
            name,
            "not finite",
        )
        for name in sorted(count)
    ]
