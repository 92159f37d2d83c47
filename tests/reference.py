"""
What the numerics are compared with: the merge rules written from their specification, slow and obviously right.

Nothing here uses ram_trl. The first part merges entry by entry in fp32, in the order of operations the specification
fixes (sums in sorted order of agent names, multiply and add apart, θ itself where λ is 1); the second is the paper's
Eq. 1-7 on whole tensors in float64; then come random small models to compare on, and a job of ranks that are threads.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
StateDict = dict[str, Tensor]
Mask = dict[str, np.ndarray]
"""Per tensor, which entries are active (flat, bool)."""


# --- the rules, entry by entry in fp32 -------------------------------------------------------------------------------


class Change(NamedTuple):
    """One agent's active entry: its name, its weight, its task vector times its factor."""

    agent: str
    theta: np.float32
    tau: np.float32


def numbers(tensor: Tensor) -> np.ndarray:
    """The entries of a tensor in fp32, row-major."""
    return tensor.detach().to(torch.float32).contiguous().view(-1).numpy()


def trained(model: Mapping[str, Tensor]) -> list[str]:
    """Sorted names of the tensors that are merged, tied ones once."""
    names, seen = [], set()
    for name in sorted(model):
        if model[name].dtype in FLOATS and model[name].data_ptr() not in seen:
            names.append(name)
            seen.add(model[name].data_ptr())
    return names


def task_vector(base: Mapping[str, Tensor], agent: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """τ = θ − base, fp32, flat, by tensor."""
    return {name: numbers(agent[name]) - numbers(base[name]) for name in trained(base)}


def mask(
    base: Mapping[str, Tensor],
    agent: Mapping[str, Tensor],
    *,
    epsilon: float | None = None,
    top: float | None = None,
    ulp: bool = False,
) -> Mask:
    """Where one agent is active, by the criterion that is given."""
    tau = task_vector(base, agent)
    if top is not None:
        everything = sorted((abs(float(t)) for name in tau for t in tau[name]), reverse=True)
        kth = everything[max(1, round(top * len(everything))) - 1]
        return {name: (np.abs(t) >= np.float32(kth)) & (t != 0) for name, t in tau.items()}
    if ulp:
        return {name: numbers(_halved(agent, base, name)) != numbers(_halved(base, base, name)) for name in tau}
    if epsilon == 0:
        return {name: _bits(agent[name]) != _bits(base[name]) for name in tau}
    return {name: np.abs(t) > np.float32(epsilon) for name, t in tau.items()}


def masks(
    base: StateDict, agents: Mapping[str, StateDict], references: Mapping[str, StateDict] | None = None, **knobs: Any
) -> dict[str, Mask]:
    """The mask of every agent under the criterion of a config, given or by default; `references` as in `merge`."""
    criterion = {knob: knobs[knob] for knob in ("epsilon", "top", "ulp") if knob in knobs}
    if not criterion:
        criterion = {"top": 0.2} if knobs.get("method", "ram") in ("ram", "ties") else {"epsilon": 0.0}
    return {agent: mask((references or {}).get(agent, base), agents[agent], **criterion) for agent in sorted(agents)}


def overlap(masks: Mapping[str, Mask], names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Per agent: its shared and its unique entries within the tensors `names`."""
    counted = {agent: [0, 0] for agent in masks}
    for name in names:
        for column in zip(*(masks[agent][name] for agent in masks), strict=True):
            for agent, active in zip(masks, column, strict=True):
                if active:
                    counted[agent][0 if sum(column) >= 2 else 1] += 1
    return {agent: (shared, unique) for agent, (shared, unique) in counted.items()}


def rescale(shared: int, unique: int, r: float, alpha: float) -> np.float32:
    """λ = 1 + r · clip(ρ, 0, α), ρ = shared / unique; 1 without unique entries."""
    return np.float32(1) if unique == 0 else np.float32(1 + r * min(max(shared / unique, 0.0), alpha))


def merge(
    base: StateDict, agents: Mapping[str, StateDict], references: Mapping[str, StateDict] | None = None, **knobs: Any
) -> StateDict:
    """
    The merge that `MergeConfig(**knobs)` describes, with the names, order, dtypes and ties of the base.

    The task vector of an agent that has a model in `references` is measured against that, and added to the base.
    """
    references = references or {}
    active = masks(base, agents, references, **knobs)
    names = trained(base)
    merged = {name: tensor.detach().clone() for name, tensor in base.items()}
    for name in names:
        counted_over = names if knobs.get("rho", "global") == "global" else [name]
        lambdas = {
            agent: rescale(shared, unique, knobs.get("r", 0.2), knobs.get("alpha", 1.0))
            for agent, (shared, unique) in overlap(active, counted_over).items()
        }
        before = numbers(base[name])
        after = before.copy()
        for i in range(len(before)):
            changes = []
            for agent in sorted(agents):
                if active[agent][name][i]:
                    theta = numbers(agents[agent][name])[i]
                    weight = knobs.get("weights", {}).get(agent, 1.0)
                    if agent in references:
                        tau = theta - numbers(references[agent][name])[i]
                        theta = before[i] + tau
                    else:
                        tau = theta - before[i]
                    changes.append(_weighted(Change(agent, theta, tau), before[i], weight))
            after[i] = _merge_entry(before[i], changes, len(agents), lambdas, name, i, knobs)
        merged[name] = torch.from_numpy(after).view(base[name].shape).to(base[name].dtype)
    for name in base:
        for first in names:
            if base[name].data_ptr() == base[first].data_ptr():
                merged[name] = merged[first]
    return merged


def _weighted(change: Change, base: np.float32, weight: float) -> Change:
    if weight == 1:
        return change
    tau = change.tau * np.float32(weight)
    return Change(change.agent, base + tau, tau)


def _merge_entry(
    base: np.float32,
    changes: Sequence[Change],
    agents: int,
    lambdas: Mapping[str, np.float32],
    name: str,
    index: int,
    knobs: Mapping[str, Any],
) -> np.float32:
    scale = knobs.get("scale", 1.0)
    match knobs.get("method", "ram"):
        case "ram":
            return ram(base, changes, lambdas)
        case "average":
            return average(base, changes, agents)
        case "task_arithmetic":
            return task_arithmetic(base, changes, scale)
        case "ties":
            return ties(base, changes, scale)
        case "dare":
            drop, seed = knobs.get("drop", 0.5), knobs.get("seed", 0)
            return task_arithmetic(base, dare(base, changes, name, index, drop, seed), scale)


def ram(base: np.float32, changes: Sequence[Change], lambdas: Mapping[str, np.float32]) -> np.float32:
    """Nobody: the base. One agent: its change, times λ. Several: the mean over them."""
    if not changes:
        return base
    if len(changes) == 1:
        return _add(base, changes[0], lambdas[changes[0].agent])
    return base + _sum(changes) / np.float32(len(changes))


def average(base: np.float32, changes: Sequence[Change], agents: int) -> np.float32:
    """The mean over all agents, whether they changed the entry or not."""
    if not changes:
        return base
    return changes[0].theta if agents == 1 else base + _sum(changes) / np.float32(agents)


def task_arithmetic(base: np.float32, changes: Sequence[Change], scale: float) -> np.float32:
    """base + scale · Σ τ."""
    if not changes:
        return base
    if len(changes) == 1:
        return _add(base, changes[0], np.float32(scale))
    return base + _sum(changes) * np.float32(scale)


def ties(base: np.float32, changes: Sequence[Change], scale: float) -> np.float32:
    """base + scale · mean of the τ that have the sign of Σ τ."""
    elected = np.sign(_sum(changes))
    agreeing = [change for change in changes if np.sign(change.tau) == elected]
    if not agreeing:
        return base
    if len(agreeing) == 1:
        return _add(base, agreeing[0], np.float32(scale))
    return base + _sum(agreeing) / np.float32(len(agreeing)) * np.float32(scale)


def dare(
    base: np.float32, changes: Sequence[Change], name: str, index: int, drop: float, seed: int
) -> Sequence[Change]:
    """The changes that survive the random mask, divided by the probability to survive."""
    if drop == 0:
        return changes
    kept = [change for change in changes if not dropped(change.agent, name, index, drop, seed)]
    thinned = [(change.agent, change.tau / np.float32(1 - drop)) for change in kept]
    return [Change(agent, base + tau, tau) for agent, tau in thinned]


def dropped(agent: str, name: str, index: int, drop: float, seed: int) -> bool:
    """The mask of DARE: a hash of seed, agent, tensor and flat index falls below the share to drop."""
    key = hashlib.sha256(f"{seed}\0{agent}\0{name}".encode()).digest()
    hashed = lowbias32(index % 2**32 ^ int.from_bytes(key[:4], "little"))
    hashed = lowbias32(hashed ^ index // 2**32 ^ int.from_bytes(key[4:8], "little"))
    return hashed < round(drop * 2**32)


def lowbias32(x: int) -> int:
    """Wellons' 32-bit integer hash."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def _add(base: np.float32, change: Change, coefficient: np.float32) -> np.float32:
    return change.theta if coefficient == 1 else base + change.tau * coefficient


def _sum(changes: Sequence[Change]) -> np.float32:
    total = np.float32(0)
    for change in changes:
        total = total + change.tau
    return total


def _halved(model: Mapping[str, Tensor], base: Mapping[str, Tensor], name: str) -> Tensor:
    return model[name].float().to(torch.float16 if base[name].dtype == torch.float16 else torch.bfloat16)


def _bits(tensor: Tensor) -> np.ndarray:
    return numbers(tensor).view(np.int32)


# --- the paper, whole tensors in float64 -----------------------------------------------------------------------------


def paper(
    base: StateDict, agents: Mapping[str, StateDict], rescaling: Callable[[int, int], float], epsilon: float = 1e-5
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """
    Eq. 1-7 of arXiv 2601.13572: the merged tensors, flat, and λ of every agent.

    `rescaling` is the paper's λ: λ from the counts of shared and of unique entries (at least one of these).
    """
    names = sorted(base)
    before = {name: numbers(base[name]).astype(np.float64) for name in names}
    tau = {a: {name: numbers(agents[a][name]).astype(np.float64) - before[name] for name in names} for a in agents}
    active = {a: {name: np.abs(tau[a][name]) > epsilon for name in names} for a in agents}
    many = {name: sum(active[a][name].astype(int) for a in agents) for name in names}
    lambdas = {}
    for a in agents:
        shared = sum(int((active[a][name] & (many[name] >= 2)).sum()) for name in names)
        unique = sum(int((active[a][name] & (many[name] == 1)).sum()) for name in names)
        lambdas[a] = rescaling(shared, unique) if unique else 1.0
    merged = {}
    for name in names:
        mean = sum(tau[a][name] * active[a][name] for a in agents) / np.maximum(many[name], 1)
        alone = sum(lambdas[a] * tau[a][name] * active[a][name] for a in agents)
        merged[name] = before[name] + np.where(many[name] >= 2, mean, alone)
    return merged, lambdas


def paper_lambda(shared: int, unique: int, r: float = 0.1, alpha: float = 2.0) -> float:
    """λ (Eq. 1-7) with the paper's r and α."""
    return 1 + r * float(np.clip(shared / unique, 0, alpha))


def released_lambda(shared: int, unique: int, big_r: float = 1.2) -> float:
    """The formula of the authors' script."""
    return 1 + (big_r - 1) * min(2, min(1, shared / unique))


# --- random small models ---------------------------------------------------------------------------------------------

PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=100)

TINY = [2.0**-149, -(2.0**-149), 2.0**-140, -1.5 * 2**-133, 2.0**-126, 2.0**-24, 3 * 2.0**-20, 1e-20, -1e-30]
NUMBERS = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, 0.1, -0.3, 3.1415927, 1 + 2**-23, 1e-5, -1e-5, 1.00001, 200.0, 1e30, -3e30, *TINY],
    np.float32,
)
"""Weights to draw from: both zeros, denormals of all three dtypes, tiny, ordinary and huge ones."""

NUDGES: list[Callable[[np.float32], np.float32]] = [
    lambda x: np.nextafter(x, np.float32(np.inf)),
    lambda x: np.nextafter(x, np.float32(-np.inf)),
    lambda x: x + np.float32(1e-5),
    lambda x: x - np.float32(0.01),
    lambda x: x + np.float32(0.01),
    lambda x: x * np.float32(1.5),
    lambda x: x + np.float32(2.0**-149),
    lambda x: -x,
]
"""Small changes to a weight, on both sides of the thresholds that are tested; equal ones make ties."""

LARGEST_FP16 = 256.0
"""No merge of a few fp16 weights up to this overflows fp16."""

SHAPES = [(1,), (7,), (3, 5), (), (2, 1, 4), (13,)]
NAMES = ["norm.weight", "embed.weight", "lm_head.weight", "layers.0.w"]
AGENTS = ["tool", "code", "Memory", "9.a-b"]


@dataclass
class Family:
    """A base and its agents."""

    base: StateDict
    agents: dict[str, StateDict]


@st.composite
def families(
    draw: st.DrawFn, agents: st.SearchStrategy[int] | None = None, dtypes: Sequence[torch.dtype] = FLOATS
) -> Family:
    """
    Models of a few dozen weights: odd sizes, mixed dtypes, tied tensors, buffers, names in no order.

    Args:
        agents: how many agents; 1 to 4 unless given.
        dtypes: what tensors are stored in, base and agents apart.
    """
    dtype = st.sampled_from(dtypes)
    base: StateDict = {}
    count = draw(st.integers(1, 4) if agents is None else agents)
    trained_by: dict[str, StateDict] = {name: {} for name in draw(st.permutations(AGENTS))[:count]}
    for name in draw(st.permutations(NAMES))[: draw(st.integers(1, 4))]:
        shape = draw(st.sampled_from(SHAPES))
        kind = draw(dtype)
        before = _drawn(draw, np.zeros(shape, np.float32).ravel(), new=True)
        base[name] = _stored(before, shape, kind, limited=kind == torch.float16)
        for agent in trained_by.values():
            theirs = draw(dtype)
            after = _drawn(draw, numbers(base[name]), new=False)
            agent[name] = _stored(after, shape, theirs, limited=torch.float16 in (kind, theirs))
    if "embed.weight" in base and "lm_head.weight" in base and draw(st.booleans()):
        base["lm_head.weight"] = base["embed.weight"]
        for agent in trained_by.values():
            saved = draw(st.sampled_from(["tied", "apart", "once"]))
            agent["lm_head.weight"] = agent["embed.weight"] if saved == "tied" else agent["embed.weight"].clone()
            if saved == "once":
                del agent["lm_head.weight"]
    if draw(st.booleans()):
        buffers = {
            "positions": torch.arange(3),
            "causal": torch.tensor([True, False]),
            "inv_freq": torch.tensor([1.0, 0.1]).double(),
        }
        base |= buffers
        for agent in trained_by.values():
            agent |= {name: tensor.clone() for name, tensor in buffers.items()}
    return Family(base, trained_by)


def _drawn(draw: st.DrawFn, old: np.ndarray, new: bool) -> np.ndarray:
    """Weights by one random byte each; unless they are `new`, low bytes leave the `old` weight as it is."""
    codes = draw(st.binary(min_size=len(old), max_size=len(old)))
    values = old.copy()
    for i, code in enumerate(codes):
        if new or 64 <= code < 144:
            values[i] = NUMBERS[code % len(NUMBERS)]
        elif code >= 144:
            values[i] = NUDGES[code % len(NUDGES)](old[i])
    return values


def _stored(values: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype, limited: bool) -> Tensor:
    values = np.clip(values, -LARGEST_FP16, LARGEST_FP16) if limited else values
    return torch.from_numpy(values).view(shape).to(dtype)


CRITERIA: list[dict[str, Any]] = [
    {},
    {"epsilon": 0.0},
    {"epsilon": 1e-5},
    {"epsilon": 0.005},
    {"epsilon": 2.0**-140},
    {"top": 1e-9},
    {"top": 0.3},
    {"top": 1.0},
    {"ulp": True},
]


@st.composite
def configs(draw: st.DrawFn, agents: Iterable[str]) -> dict[str, Any]:
    """Knobs of any rule, with any criterion and with weights for some of the agents."""
    scale = st.sampled_from([1.0, 0.7, 1.5])
    knobs = draw(
        st.one_of(
            st.fixed_dictionaries(
                {
                    "method": st.just("ram"),
                    "r": st.sampled_from([0.0, 0.1, 0.2, 0.7]),
                    "alpha": st.sampled_from([0.0, 0.2, 1.0, 2.0]),
                    "rho": st.sampled_from(["global", "tensor"]),
                }
            ),
            st.just({"method": "average"}),
            st.fixed_dictionaries({"method": st.sampled_from(["task_arithmetic", "ties"]), "scale": scale}),
            st.fixed_dictionaries(
                {
                    "method": st.just("dare"),
                    "scale": scale,
                    "drop": st.sampled_from([0.0, 0.3, 0.5, 0.9]),
                    "seed": st.integers(0, 3),
                }
            ),
        )
    )
    weights = draw(st.dictionaries(st.sampled_from(sorted(agents)), st.sampled_from([-1.0, 0.5, 0.3, 2.0, 1.0])))
    return knobs | draw(st.sampled_from(CRITERIA)) | ({"weights": weights} if weights else {})


@st.composite
def merges(draw: st.DrawFn, **limits: Any) -> tuple[Family, dict[str, Any]]:
    """A family (`limits` as in `families`) and the knobs to merge it with."""
    family = draw(families(**limits))
    return family, draw(configs(family.agents))


def normal_family(
    seed: int,
    shapes: Mapping[str, tuple[int, ...]],
    agents: Mapping[str, float],
    size: float = 0.01,
    dtype: torch.dtype = torch.float32,
) -> Family:
    """
    Weights as language models have them, and per agent a random share of them moved by about `size`.

    No update lies near 1e-5, so float64 and fp32 agree on what is active there.
    """
    generator = torch.Generator().manual_seed(seed)
    base = {name: (0.05 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}
    trained_by: dict[str, StateDict] = {}
    for agent, share in agents.items():
        trained_by[agent] = {}
        for name, before in base.items():
            sign = torch.randint(0, 2, before.shape, generator=generator) * 2 - 1
            step = sign * size * (0.1 + torch.rand(before.shape, generator=generator))
            moved = torch.rand(before.shape, generator=generator) < share
            trained_by[agent][name] = torch.where(moved, before.float() + step, before.float()).to(dtype)
    return Family(base, trained_by)


def bits(tensor: Tensor) -> bytes:
    """The raw bytes of a tensor, row-major."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Names, their order, dtypes, shapes and every bit agree."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), f"{name}: {found[name].tolist()} is not {tensor.tolist()}"


# --- a job whose ranks are threads -----------------------------------------------------------------------------------

Result = TypeVar("Result")
RankReduce = Callable[[Tensor, str], Tensor]
PATIENCE_SECONDS = 20


def run_ranks(world: int, work: Callable[[int, RankReduce], Result]) -> list[Result]:
    """
    Runs `work(rank, reduce)` on `world` threads at once; `reduce` is a collective that really adds over the ranks.

    A rank that enters a collective the others do not enter raises `threading.BrokenBarrierError`.
    """
    barrier = threading.Barrier(world, timeout=PATIENCE_SECONDS)
    given: list[Any] = [None] * world

    def rank(number: int) -> Result:
        def reduce(tensor: Tensor, operation: str) -> Tensor:
            given[number] = tensor
            barrier.wait()
            stacked = torch.stack(given)
            result = {"sum": lambda: stacked.sum(0), "max": lambda: stacked.amax(0)}[operation]()
            barrier.wait()
            return result

        return work(number, reduce)

    with ThreadPoolExecutor(world) as pool:
        return [future.result() for future in [pool.submit(rank, number) for number in range(world)]]


@st.composite
def shards(draw: st.DrawFn, model: Mapping[str, Tensor]) -> list[list[tuple[str, int, int]]]:
    """Per rank of a job of 2 to 4, the flat ranges (tensor, start, stop) it owns; some ranks may own nothing."""
    world = draw(st.integers(2, 4))
    owned: list[list[tuple[str, int, int]]] = [[] for _ in range(world)]
    for name in trained(model):
        entries = model[name].numel()
        cuts = sorted(draw(st.lists(st.integers(0, entries), min_size=world - 1, max_size=world - 1)))
        for rank, (start, stop) in enumerate(zip([0, *cuts], [*cuts, entries], strict=True)):
            if start < stop:
                owned[rank].append((name, start, stop))
    return owned
