"""Sweeps over flat tensors: compiled or as on a GPU, to the same bits, special numbers included."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ram_trl.engine import elementwise
from ram_trl.engine.elementwise import thin
from tests.reference import PROPERTY
from tests.sweeps import assert_same_bits, both, finite, row, tensors


@PROPERTY
@given(tau=row(65), threshold=st.sampled_from([0.0, 1e-45, 1e-5, 1.0]))
def test_thin(tau, threshold):
    (mask, thinned), (other_mask, other) = both(lambda: thin(tau, threshold))
    expected = [abs(x) > np.float32(threshold) for x in tau.numpy()]
    assert mask.tolist() == expected
    assert_same_bits(thinned, torch.tensor([x if a else 0.0 for x, a in zip(tau.tolist(), expected, strict=True)]))
    known = ~tau.isnan()
    assert torch.equal(mask[known], other_mask[known])
    assert_same_bits(thinned[known], other[known])


@PROPERTY
@given(rows=tensors(4), unchanged=st.booleans(), consumed=st.booleans())
def test_carry(rows, unchanged, consumed):
    """As semantics.py says it, entry by entry in numpy's float32."""
    theta, before, state, taken = (finite(held) for held in rows)
    state = before.clone() if unchanged else state
    taken = taken if consumed else torch.zeros_like(taken)
    found, other = both(lambda: elementwise.carry(theta, before, state, taken))
    expected = []
    with np.errstate(all="ignore"):
        for t, b, s, c in zip(*(held.numpy() for held in (theta, before, state, taken)), strict=True):
            left = (t - b) - c
            same = s.tobytes() == b.tobytes() and c == 0
            expected.append(t if same else s if left == 0 else s + left)
    expected = torch.from_numpy(np.array(expected, np.float32))
    assert_same_bits(found, expected)
    assert_same_bits(found, other)


@PROPERTY
@given(values=tensors(1), start=st.sampled_from([0, 1, 65536, 10**12]), cut=st.integers(0, 130))
def test_fingerprint(values, start, cut):
    """A sum over entries: of pieces it adds up; in exact integers it is the same."""
    held = values[0]
    found, other = both(lambda: elementwise.fingerprint(held, start))
    cut = min(cut, len(held))
    pieces = elementwise.fingerprint(held[:cut], start) + elementwise.fingerprint(held[cut:], start + cut)

    def wrapped(word: int) -> int:
        return (word + 2**63) % 2**64 - 2**63

    total = 0
    for i, bits in enumerate(held.view(torch.int32).tolist()):
        mixed = wrapped(bits + (start + i) * elementwise.INDEX_KEY)
        mixed = wrapped((mixed ^ (mixed >> 32)) * elementwise.MIX_KEY)
        total += (mixed ^ (mixed >> 29)) * elementwise.INDEX_KEY
    assert found == other == pieces % 2**64 == total % 2**64
