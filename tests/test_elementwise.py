"""Compiled sweeps on the CPU and what a GPU runs give the same bits, special numbers included."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ram_trl import elementwise
from ram_trl.compiled import compiled
from tests.reference import PROPERTY

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-5,
    -1e-5,
    1e-40,
    -1e-45,
    3.4e38,
    -3.4e38,
    float("inf"),
    float("-inf"),
    float("nan"),
]
NUMBERS = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))


def row(length: int) -> st.SearchStrategy[Tensor]:
    numbers = st.lists(NUMBERS, min_size=length, max_size=length)
    return numbers.map(lambda held: torch.tensor(held, dtype=torch.float32))


def tensors(count: int) -> st.SearchStrategy[tuple[Tensor, ...]]:
    """Float32 tensors of one length, from none to more than two words of bits."""
    return st.sampled_from([0, 1, 2, 63, 64, 65, 130]).flatmap(lambda length: st.tuples(*[row(length)] * count))


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.fixture(scope="module")
def as_on_gpu() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def both(work, as_on_gpu):
    """What `work` returns on the CPU, and when tensors are taken to lie elsewhere."""
    compiled_result = work()
    with as_on_gpu.context() as patch:
        patch.setattr(elementwise, "on_cpu", lambda tensor: False)
        return compiled_result, work()


@PROPERTY
@given(tau=tensors(1), threshold=st.sampled_from([0.0, 1e-45, 1e-5, 1.0]))
def test_thin(tau, threshold, as_on_gpu):
    (mask, thinned), (other_mask, other) = both(lambda: elementwise.thin(tau[0], threshold), as_on_gpu)
    expected = [abs(x) > np.float32(threshold) for x in tau[0].numpy()]
    assert mask.tolist() == expected
    assert_same_bits(thinned, torch.tensor([x if a else 0.0 for x, a in zip(tau[0].tolist(), expected, strict=True)]))
    finite = ~tau[0].isnan()  # which are refused before they are merged
    assert torch.equal(mask[finite], other_mask[finite])
    assert_same_bits(thinned[finite], other[finite])


@PROPERTY
@given(tau=tensors(1), threshold=st.sampled_from([0.0, 1e-5]))
def test_survey(tau, threshold, as_on_gpu):
    mask, thinned = elementwise.thin(tau[0], threshold)
    found, other = both(lambda: elementwise.survey(tau[0], thinned, mask), as_on_gpu)
    values, active = tau[0].double(), thinned.double()
    assert np.array_equal(found.largest, float(tau[0].abs().max()) if len(tau[0]) else 0.0, equal_nan=True)
    for one in (found, other):
        assert one.square == pytest.approx(float((values**2).sum()), rel=1e-12, nan_ok=True)
        assert one.square_active == pytest.approx(float((values[mask] ** 2).sum()), rel=1e-12, nan_ok=True)
        for words, where in ((one.active, mask), (one.up, active > 0), (one.down, active < 0)):
            bits = np.unpackbits(words.view(np.uint8))
            assert bits[: len(where)].tolist() == where.int().tolist()
            assert not bits[len(where) :].any()
    assert np.array_equal(found.largest, other.largest, equal_nan=True)


@PROPERTY
@given(rows=tensors(4), coefficient=st.sampled_from([1.0, 1.2, float(np.float32(1.02)), -1.0]))
def test_gather_and_mean(rows, coefficient, as_on_gpu):
    base, *agents = (torch.nan_to_num(held, nan=2.0, posinf=3.0, neginf=-3.0) for held in rows)

    def work() -> tuple[Tensor, ...]:
        total, count, single = torch.zeros_like(base), torch.zeros_like(base, dtype=torch.uint8), base.clone()
        for theta in agents:
            mask, thinned = elementwise.thin(theta - base, 1e-5)
            elementwise.gather(base, thinned, mask, theta, coefficient, total, count, single)
        return elementwise.mean_where_shared(base, total, count, single), total, count.float()

    for left, right in zip(*both(work, as_on_gpu), strict=True):
        assert torch.equal(left.isnan(), right.isnan())  # Inf − Inf: finite weights whose sum overflows
        assert_same_bits(torch.nan_to_num(left, nan=0.0), torch.nan_to_num(right, nan=0.0))


@PROPERTY
@given(tau=tensors(1), start=st.sampled_from([1, 0x3F800000]), width=st.sampled_from([1, 0x800000]))
def test_split(tau, start, width):
    above, within = elementwise.split(tau[0], start, start + width)
    patterns = [int(p) for p in tau[0].abs().view(torch.int32)]
    assert above == sum(p >= start + width for p in patterns)
    assert within.tolist() == [p - start for p in patterns if start <= p < start + width]


def test_largest_sees_nan_behind_inf():
    tau = torch.tensor([1.0, float("nan"), float("inf")])
    assert np.isnan(elementwise.survey(tau, *reversed(elementwise.thin(tau, 0.0))).largest)


def double(x):
    return x + x


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder in which compiled code is kept."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    return tmp_path


def test_code_is_compiled_where_it_cannot_be_kept(monkeypatch):
    def refuse(function):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("ram_trl.compiled._Kept", refuse)
    assert compiled(lambda x: x + 1)(1) == 2


def test_a_full_disk_costs_kept_code_and_no_merge(cache, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._open_for_write", full)
    assert compiled(double)(1) == 2
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("bytes_left", [0, 60])
def test_kept_code_that_was_cut_short_is_made_again(cache, caplog, kind, bytes_left):
    assert compiled(double)(1) == 2
    (file,) = cache.rglob(kind)
    os.truncate(file, bytes_left)
    assert compiled(double)(1) == 2
    assert "cannot be read" in caplog.text
    caplog.clear()
    assert compiled(double)(1) == 2
    assert not caplog.text
