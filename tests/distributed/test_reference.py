"""A reference model (β > 0) that follows the generalist in jobs of two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import models
from tests.distributed.launching import finish
from tests.distributed.test_shards import ALL, MIXED, QUICK, SPLIT, ZERO3, Case, alone, assert_same, seen, state

CASES = {
    "ddp-fp32": ALL["ddp-fp32"],
    "zero2-bf16": QUICK["zero2-bf16"],
    "zero3-bf16": QUICK["zero3-bf16"],
    "zero3-fp32-mixed": Case(3, ZERO3, False, MIXED),
    "zero3-bf16-split": Case(3, ZERO3, True, SPLIT),
    "fsdp2-bf16": QUICK["fsdp2-bf16"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_rank_refers_to_the_generalist_it_loaded(tmp_path: Path, name: str):
    models.tiny_model().save_pretrained(tmp_path / "base")
    models.tokenizer().save_pretrained(tmp_path / "base")
    case = replace(CASES[name], settings={"ram": {"reference": "generalist"}})
    finish(alone(case, tmp_path, odd=False, still=False, training={"beta": 0.1}), tmp_path)
    for number in (1, 2, 3):
        generalist = state(tmp_path, number)
        for rank in (0, 1):
            found = seen(tmp_path, f"after-{2 * number}", rank, "reference")
            dtypes = {tensor.dtype for tensor in found.values()}
            assert_same(found, {n: t.to(*dtypes) for n, t in generalist.items()}, (number, rank))
