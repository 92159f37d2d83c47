"""
What is counted before a merge: what agents changed and how that overlaps, the thresholds of `top`, what is not finite.

Chunk by chunk and thread by thread, over any stores; over the shards of several ranks with a `reduce` that combines
their counts. The same numbers come out whatever the chunks, threads and shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ram_trl.config import MergeConfig
from ram_trl.engine import criterion
from ram_trl.engine.compiled import tally
from ram_trl.engine.elementwise import how_many
from ram_trl.engine.plan import Counts, Plan
from ram_trl.engine.workers import Workers
from ram_trl.methods.change import Change
from ram_trl.problems import MergeInputError, Problem, agent_place
from ram_trl.weights import Span, Store, cut, entries, mergeable, whole

CHUNK = 1 << 19
"""Entries per chunk: the working set of a few agents stays in the cache of a core."""

SAMPLE = 1 << 11
"""Entries of each chunk that tell about where the `top` threshold lies."""

AT_ONCE = 16
"""Samples that are tallied into one histogram, which is larger than a sample and takes longer to add up."""

Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]
"""Combines a tensor elementwise over the ranks of a job; every rank gets the result."""

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
    compared = compare(base, agents, references)
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


def reads(config: MergeConfig) -> int:
    """How often `make_plan` reads each entry: once to count, once more to find the `top` thresholds."""
    return 2 if config.top_fraction is not None else 1


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


def compare(base: Store, agents: Mapping[str, Store], references: Mapping[str, Store] | None) -> list[Compared]:
    """By sorted name."""
    return [Compared(name, agents[name], (references or {}).get(name, base)) for name in sorted(agents)]


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
