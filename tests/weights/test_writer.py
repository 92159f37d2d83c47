"""Weight files written range by range."""

from __future__ import annotations

import hashlib
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ram_trl.weights.writer import CheckpointWriter

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (31,), (3, 4, 5), (1,), (64, 9), (13, 2)]
    return {
        f"w{number}": (torch.rand(shape, generator=generator) * 100).to(KINDS[number])
        for number, shape in enumerate(shapes)
    }


def writer(folder: Path, tensors: dict[str, torch.Tensor], size: int | str = 200, **options) -> CheckpointWriter:
    shapes, dtypes = ({n: getattr(t, what) for n, t in tensors.items()} for what in ("shape", "dtype"))
    return CheckpointWriter(folder, shapes, dtypes, size, **options)


def read(folder: Path) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        held |= load_file(file)
    return held


@pytest.mark.parametrize("size", [1, 200, "5GB"])
def test_ranges_in_any_order_from_many_threads_make_the_files(tmp_path, tensors, size):
    pieces = [(n, i, t.reshape(-1)[i : i + 7]) for n, t in tensors.items() for i in range(0, t.numel(), 7)]
    random.Random(0).shuffle(pieces)
    told = []
    made = writer(tmp_path, tensors, size, on_finish=told.append)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda piece: made.write(*piece), pieces))
    files = made.close()
    held = read(tmp_path)
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[name], tensors[name]) for name in tensors)
    assert sorted(told, key=lambda file: file.name) == files
    for file in files:
        content = (tmp_path / file.name).read_bytes()
        assert (file.size, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert {file.name: file.size for file in files} == made.sizes
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_nothing_is_on_disk_before_the_first_write(tmp_path, tensors):
    made = writer(tmp_path, tensors)
    assert list(tmp_path.iterdir()) == []
    made.abandon()


def test_finished_files_are_left_alone_and_not_wanted(tmp_path, tensors):
    first = writer(tmp_path, tensors)
    for name, tensor in tensors.items():
        first.write(name, 0, tensor.reshape(-1))
    files = first.close()
    kept, gone = files[0], files[1:]
    for file in gone:
        (tmp_path / file.name).unlink()
    there = (tmp_path / kept.name).stat()
    second = writer(tmp_path, tensors, finished=[kept])
    assert set(second.wanted) == tensors.keys() - load_file(tmp_path / kept.name).keys()
    for name, tensor in tensors.items():
        second.write(name, 0, tensor.reshape(-1))
    assert second.close() == files
    assert (tmp_path / kept.name).stat() == there


def test_files_that_are_not_full_are_told_with_what_is_missing(tmp_path, tensors):
    made = writer(tmp_path, tensors, "5GB")
    for name, tensor in tensors.items():
        made.write(name, 0, tensor.reshape(-1)[1:])
    missing = sum(tensor.itemsize for tensor in tensors.values())
    with pytest.raises(RuntimeError, match=rf"model.safetensors \({missing} bytes\)"):
        made.close()
    made.abandon()
    with pytest.raises(RuntimeError, match="written to no more"):
        made.write("w1", 0, tensors["w1"][:1])
