"""The engine: what no layout, order, thread count or setting of the caller may change, and what comes out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ram_trl import MergeConfig, MergeInputError, merge_state_dicts
from ram_trl.engine.counting import make_plan, reads
from ram_trl.engine.merging import merge_spans
from ram_trl.engine.plan import Plan
from ram_trl.engine.workers import Workers
from ram_trl.weights import Span
from ram_trl.weights.memory import StateDict
from tests import reference
from tests.reference import PROPERTY, Family, assert_same_bits, bits, families, merges, normal_family, run_ranks

Case = tuple[Family, dict[str, Any]]

RULES_THAT_KEEP_A_LONE_AGENT = [
    {"method": "ram"},
    {"method": "ram", "r": 0.0},
    {"method": "ram", "rho": "tensor"},
    {"method": "average"},
    {"method": "task_arithmetic"},
    {"method": "ties"},
    {"method": "dare", "drop": 0.0},
]


def merged(family: Family, knobs: Mapping[str, Any], **how: Any) -> dict[str, Tensor]:
    return merge_state_dicts(family.base, family.agents, MergeConfig(**knobs), **how)[0]


def is_zero(tensor: Tensor) -> bool:
    return bool((tensor == 0).all())


def denormals_are_flushed() -> bool:
    return is_zero(torch.tensor([2.0**-126]) * torch.tensor([0.25]))


@contextmanager
def caller_flushes_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def caller_uses_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", reference.FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("knobs", RULES_THAT_KEEP_A_LONE_AGENT, ids=lambda knobs: " ".join(map(str, knobs.values())))
@settings(PROPERTY, max_examples=40)
@given(data=st.data())
def test_an_agent_alone_comes_back_bit_for_bit(dtype: torch.dtype, knobs: dict[str, Any], data: st.DataObject):
    family = data.draw(families(agents=st.just(1), dtypes=[dtype]))
    (agent,) = family.agents.values()
    found = merged(family, knobs | {"epsilon": 0.0}, threads=1)
    names = reference.trained(family.base)
    assert_same_bits({name: found[name] for name in names}, {name: agent[name] for name in names})


@PROPERTY
@given(merges())
def test_an_entry_active_nowhere_is_the_base_bit_for_bit(case: Case):
    family, knobs = case
    found = merged(family, knobs, threads=1)
    masks = reference.masks(family.base, family.agents, **knobs)
    for name in reference.trained(family.base):
        untouched = torch.from_numpy(~np.any([mask[name] for mask in masks.values()], axis=0))
        before, after = (model[name].reshape(-1)[untouched] for model in (family.base, found))
        assert bits(after) == bits(before), name


# --- what changes no bit ---------------------------------------------------------------------------------------------


@PROPERTY
@given(merges(), st.data())
def test_the_order_of_agents_changes_no_bit(case: Case, data: st.DataObject):
    family, knobs = case
    order = data.draw(st.permutations(list(family.agents)))
    config = MergeConfig(**knobs)
    result, report = merge_state_dicts(family.base, family.agents, config, threads=1)
    agents = {name: family.agents[name] for name in order}
    permuted, permuted_report = merge_state_dicts(family.base, agents, config, threads=1)
    assert_same_bits(permuted, result)
    assert permuted_report.model_dump_json() == report.model_dump_json()
    assert list(permuted_report.agents) == sorted(order)


@PROPERTY
@given(merges(), st.integers(1, 50), st.integers(1, 4))
def test_chunk_size_and_thread_count_change_no_bit(case: Case, chunk: int, threads: int):
    family, knobs = case
    expected = merged(family, knobs, threads=1)
    assert_same_bits(merged(family, knobs, threads=threads, chunk=chunk), expected)


@pytest.mark.parametrize("method", ["ram", "average", "task_arithmetic", "ties", "dare"])
def test_many_chunks_on_many_threads_change_no_bit(method: str):
    shapes = {"w": (311, 67), "v": (4099,), "u": (1,)}
    family = normal_family(1, shapes, {"tool": 0.5, "code": 0.1, "memory": 0.6})
    expected = merged(family, {"method": method}, threads=1)
    for threads, chunk in ((1, 1 << 10), (3, 997), (4, 4099)):
        assert_same_bits(merged(family, {"method": method}, threads=threads, chunk=chunk), expected)


def merged_on_ranks(
    family: Family, config: MergeConfig, owned: list[list[tuple[str, int, int]]], chunk: int
) -> tuple[list[Plan], dict[str, Tensor]]:
    """The plan of every rank, and the fp32 entries all ranks wrote together, flat."""
    base, agents = StateDict(family.base), {name: StateDict(agent) for name, agent in family.agents.items()}
    names = reference.trained(family.base)
    written = {name: torch.zeros(family.base[name].numel()) for name in names}
    times = {name: torch.zeros(family.base[name].numel(), dtype=torch.int64) for name in names}

    def write(span: Span, values: Tensor) -> None:
        written[span.name][span.start : span.stop] = values
        times[span.name][span.start : span.stop] += 1

    with Workers(2) as workers:

        def work(rank: int, reduce: reference.RankReduce) -> Plan:
            spans = [Span(*span) for span in owned[rank]]
            plan = make_plan(base, agents, config, workers, spans=spans, reduce=reduce, chunk=chunk)
            for _ in merge_spans(base, agents, plan, write, workers, spans=spans, chunk=chunk):
                pass
            return plan

        plans = run_ranks(len(owned), work)
    assert all(bool((count == 1).all()) for count in times.values())
    return plans, written


def counted(plan: Plan) -> dict[str, tuple[Any, ...]]:
    """What a plan counted, per tensor, as plain numbers; sums of squares left out, which are rounded."""
    counted = {}
    for name, c in plan.counts.items():
        arrays = [array.tolist() for array in (c.both, c.agree, c.shared, c.largest)]
        counted[name] = (c.entries, c.touched, c.touched_by_many, c.conflicting, *arrays)
    return counted


@PROPERTY
@given(merges(), st.integers(1, 20), st.data())
def test_the_layout_of_shards_changes_no_bit(case: Case, chunk: int, data: st.DataObject):
    family, knobs = case
    config = MergeConfig(**knobs)
    owned = data.draw(reference.shards(family.base))
    plans, written = merged_on_ranks(family, config, owned, chunk)

    whole = merged(family, knobs, threads=1)
    for name, flat in written.items():
        stored = flat.view(family.base[name].shape).to(family.base[name].dtype)
        assert_same_bits({name: stored}, {name: whole[name]})

    base, agents = StateDict(family.base), {name: StateDict(agent) for name, agent in family.agents.items()}
    with Workers(1) as workers:
        expected = make_plan(base, agents, config, workers)
    for plan in plans:
        assert plan.agents == expected.agents
        assert plan.thresholds == expected.thresholds
        assert counted(plan) == counted(expected)
        for name in expected.counts:
            assert plan.lambdas(name) == expected.lambdas(name)
        assert plan.total.square == pytest.approx(expected.total.square, rel=1e-5)
        assert plan.total.square_active == pytest.approx(expected.total.square_active, rel=1e-5)
        assert plan.total.square.tolist() == plans[0].total.square.tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["base", "tool"])
def test_every_rank_refuses_what_is_not_finite_on_one(place: str, value: float):
    family = normal_family(1, {"w": (20,), "v": (9,)}, {"tool": 0.5, "code": 0.5})
    ({"base": family.base} | family.agents)[place]["w"][13] = value
    base, agents = StateDict(family.base), {name: StateDict(agent) for name, agent in family.agents.items()}
    owned = [[Span("w", 0, 10)], [Span("w", 10, 20), Span("v", 0, 4)], [Span("v", 4, 9)]]

    with Workers(1) as workers:

        def work(rank: int, reduce: reference.RankReduce) -> MergeInputError | None:
            try:
                make_plan(base, agents, MergeConfig(), workers, spans=owned[rank], reduce=reduce)
            except MergeInputError as error:
                return error
            return None

        errors = run_ranks(len(owned), work)
    assert all(error is not None for error in errors)
    assert {problem.tensor for error in errors for problem in error.problems} == {"w"}
    assert "flat index 13" in str(errors[1])


def test_ranks_agree_when_one_owns_nothing():
    family = normal_family(1, {"w": (20,)}, {"tool": 0.5, "code": 0.5})
    plans, written = merged_on_ranks(family, MergeConfig(), [[], [("w", 0, 20)]], chunk=8)
    assert_same_bits(written, merged(family, {}))
    assert counted(plans[0]) == counted(plans[1])


@PROPERTY
@given(merges())
def test_denormals_flushed_by_the_caller_change_no_bit(case: Case):
    family, knobs = case
    expected = merged(family, knobs, threads=1)
    with caller_flushes_denormals():
        found = merged(family, knobs, threads=1)
        still_flushed = denormals_are_flushed()
    assert_same_bits(found, expected)
    assert still_flushed


@pytest.mark.parametrize("criterion", [{"top": 0.5}, {"epsilon": 2.0**-140}])
def test_a_denormal_threshold_holds_when_the_caller_flushes_denormals(criterion: dict[str, float]):
    updates = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 2.0**-141
    family = Family({"w": torch.zeros(4)}, {"tool": {"w": updates}})
    expected = [0.0, 0.0, 3 * 2.0**-141, 2.0**-139]
    assert merged(family, criterion)["w"].tolist() == expected
    with caller_flushes_denormals():
        found = merged(family, criterion)
    assert found["w"].tolist() == expected


def test_denormals_kept_by_the_caller_are_kept_afterwards():
    merged(normal_family(1, {"w": (20,)}, {"tool": 0.5}), {})
    assert not denormals_are_flushed()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_set_by_the_caller_change_no_bit_and_stay_set(threads: int):
    family = normal_family(1, {"w": (311, 67)}, {"tool": 0.5, "code": 0.2})
    expected = merged(family, {}, threads=1)
    with caller_uses_threads(threads):
        found = merged(family, {})
        assert torch.get_num_threads() == threads
    assert_same_bits(found, expected)


def test_settings_of_the_caller_survive_a_merge_that_fails():
    family = normal_family(1, {"w": (20,)}, {"tool": 0.5})
    family.agents["tool"]["w"][3] = torch.nan
    with caller_uses_threads(3), caller_flushes_denormals():
        with pytest.raises(MergeInputError):
            merged(family, {})
        assert torch.get_num_threads() == 3
        assert denormals_are_flushed()


# --- what goes in and what comes out ---------------------------------------------------------------------------------


@PROPERTY
@given(merges())
def test_the_output_has_the_names_order_dtypes_and_shapes_of_the_base(case: Case):
    family, knobs = case
    found = merged(family, knobs, threads=1)
    assert [(name, t.dtype, t.shape) for name, t in found.items()] == [
        (name, t.dtype, t.shape) for name, t in family.base.items()
    ]


@PROPERTY
@given(merges())
def test_inputs_stay_as_they_were_and_share_no_memory_with_the_output(case: Case):
    family, knobs = case
    models = [family.base, *family.agents.values()]
    before = copy.deepcopy(models)
    found = merged(family, knobs, threads=1)
    for model, old in zip(models, before, strict=True):
        assert_same_bits(model, old)
    inputs = {tensor.untyped_storage().data_ptr() for model in models for tensor in model.values()}
    assert not inputs & {tensor.untyped_storage().data_ptr() for tensor in found.values()}


def test_tied_entries_stay_tied_and_untied_ones_stay_apart():
    embed = torch.zeros(3, 2)
    base = {"head": embed, "w": torch.zeros(2), "embed": embed, "v": torch.zeros(2)}
    moved = torch.ones(3, 2)
    agent = {"head": moved, "w": torch.ones(2), "embed": moved, "v": torch.ones(2)}
    found, _ = merge_state_dicts(base, {"tool": agent})
    assert found["head"].data_ptr() == found["embed"].data_ptr()
    assert found["w"].data_ptr() != found["v"].data_ptr()
    assert found["head"].tolist() == found["embed"].tolist() == moved.tolist()


@pytest.mark.parametrize("saved", ["once", "apart"])
def test_an_agent_may_have_saved_its_tied_weights_differently(saved: str):
    embed = torch.zeros(3)
    agent = {"embed": torch.ones(3)} | ({"head": torch.ones(3)} if saved == "apart" else {})
    found, _ = merge_state_dicts({"embed": embed, "head": embed}, {"tool": agent})
    assert found["head"].data_ptr() == found["embed"].data_ptr()
    assert found["head"].tolist() == [1.0] * 3


def test_buffers_are_taken_from_the_base():
    buffers = {
        "positions": torch.arange(5),
        "causal": torch.tensor([True, False]),
        "inv_freq": torch.tensor([1.0, 1e-300], dtype=torch.float64),
        "steps": torch.tensor(7, dtype=torch.int32),
    }
    base = buffers | {"w": torch.zeros(2)}
    agent = copy.deepcopy(buffers) | {"w": torch.ones(2)}
    found, report = merge_state_dicts(base, {"tool": agent})
    assert_same_bits({name: found[name] for name in buffers}, buffers)
    assert report.agents["tool"].entries == 2


def test_parameters_and_strided_tensors_are_merged_in_row_major_order():
    family = normal_family(2, {"w": (5, 7), "v": (6, 4)}, {"tool": 0.5, "code": 0.5})
    expected = merged(family, {})
    strided = copy.deepcopy(family)
    for model in (strided.base, *strided.agents.values()):
        model["w"] = nn.Parameter(model["w"])
        model["v"] = model["v"].t().contiguous().t()
    assert not strided.base["v"].is_contiguous()
    found = merged(strided, {}, chunk=5)
    assert_same_bits(found, expected)
    assert not found["w"].requires_grad


def test_the_output_of_16_bit_models_is_rounded_once_to_nearest():
    base = {"w": torch.tensor([1.0], dtype=torch.bfloat16)}
    # (2⁻⁷ + 2⁻⁸) / 2 = 3 · 2⁻⁹ on top of 1: between 1 and 1 + 2⁻⁷, nearer to the latter
    agents = {"tool": {"w": torch.tensor([1 + 2.0**-7])}, "code": {"w": torch.tensor([1 + 2.0**-8])}}
    found, _ = merge_state_dicts(base, agents, MergeConfig(epsilon=0))
    assert found["w"].tolist() == [1 + 2.0**-7]


def test_the_default_config_is_ram_plus_on_the_top_fifth():
    family = normal_family(3, {"w": (200,)}, {"tool": 0.5, "code": 0.5})
    found, _ = merge_state_dicts(family.base, family.agents)
    expected = reference.merge(family.base, family.agents, method="ram", top=0.2, r=0.2, alpha=1.0, rho="global")
    assert_same_bits(found, expected)


def test_a_model_without_weights_to_merge_is_the_base():
    base = {"positions": torch.arange(3)}
    found, _ = merge_state_dicts(base, {"tool": {"positions": torch.arange(3)}})
    assert_same_bits(found, base)


# --- task vectors measured against another model than the base -------------------------------------------------------


@PROPERTY
@given(merges(), st.data())
def test_a_task_vector_measured_against_a_reference_is_applied_to_the_base(case: Case, data: st.DataObject):
    family, knobs = case
    shapes = {name: family.base[name].shape for name in reference.trained(family.base)}
    family = Family({name: family.base[name].float() for name in shapes}, family.agents)
    late = data.draw(st.sets(st.sampled_from(sorted(family.agents)), min_size=1))
    loaded = {name: tensor + 0.25 for name, tensor in family.base.items()}
    references = dict.fromkeys(late, loaded)
    base, agents = StateDict(family.base), {name: StateDict(agent) for name, agent in family.agents.items()}
    against = {name: StateDict(model) for name, model in references.items()}

    found = {name: torch.zeros(shape).view(-1) for name, shape in shapes.items()}

    def write(span: Span, values: Tensor) -> None:
        found[span.name][span.start : span.stop] = values

    with Workers(1) as workers:
        plan = make_plan(base, agents, MergeConfig(**knobs), workers, references=against)
        for _ in merge_spans(base, agents, plan, write, workers, references=against):
            pass
    expected = reference.merge(family.base, family.agents, references, **knobs)
    assert_same_bits({name: found[name].view(shape) for name, shape in shapes.items()}, expected)
    masks = reference.masks(family.base, family.agents, references, **knobs)
    for name, counts in plan.counts.items():
        assert counts.active.tolist() == [int(masks[agent][name].sum()) for agent in plan.agents]


# --- progress and workers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{}, {"epsilon": 1e-5}, {"ulp": True}])
def test_progress_adds_up_to_what_reads_announces(knobs: dict[str, Any]):
    family = normal_family(3, {"w": (20,), "v": (13,)}, {"tool": 0.5, "code": 0.5})
    base, agents = StateDict(family.base), {name: StateDict(agent) for name, agent in family.agents.items()}
    read: list[int] = []
    with Workers(2) as workers:
        make_plan(base, agents, MergeConfig(**knobs), workers, chunk=7, advance=read.append)
    assert sum(read) == reads(MergeConfig(**knobs)) * 33


def test_merged_chunks_come_in_the_order_of_the_spans():
    family = normal_family(3, {"w": (20,), "v": (13,)}, {"tool": 0.5, "code": 0.5})
    base, agents = StateDict(family.base), {name: StateDict(agent) for name, agent in family.agents.items()}
    spans = [Span("w", 3, 20), Span("v", 0, 13)]
    with Workers(3) as workers:
        plan = make_plan(base, agents, MergeConfig(), workers)
        found = list(merge_spans(base, agents, plan, lambda s, values: (s, values), workers, spans=spans, chunk=10))
    pieces = [Span("w", 3, 13), Span("w", 13, 20), Span("v", 0, 10), Span("v", 10, 13)]
    assert [span for span, _ in found] == pieces
    whole = merged(family, {})
    for span, values in found:
        assert_same_bits({span.name: values}, {span.name: whole[span.name][span.start : span.stop]})


def test_workers_give_results_in_order_and_raise_what_the_work_raises():
    def work(item: int) -> int:
        if item == 77:
            raise KeyError(item)
        return item * item

    with Workers(3) as workers:
        assert list(workers.map(work, range(70))) == [item * item for item in range(70)]
        with pytest.raises(KeyError, match="77"):
            list(workers.map(work, range(100)))


def test_fewer_than_one_thread_is_refused():
    with pytest.raises(ValueError, match="threads is 0"):
        Workers(0)
