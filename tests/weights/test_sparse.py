"""Block files: what is written is read back by any range, and what was damaged is never read."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ram_trl.weights import Span
from ram_trl.weights.sparse import BLOCK, BlockFile, BlockFileError, Blocks, BlockWriter, blocks
from tests.reference import PROPERTY

SHAPES = {"a": (BLOCK + 100,), "b": (7,), "c": (300, 3)}
DTYPES = {"a": torch.float32, "b": torch.bfloat16, "c": torch.bfloat16}


class Zeros:
    """What lies under the entries of a publication."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return torch.zeros(stop - start)


def written(path: Path, density: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """Writes all tensors with a share of their entries active; what should be read."""
    generator = torch.Generator().manual_seed(seed)
    whole = {}
    with BlockWriter(path, DTYPES) as writer:
        for name, shape in SHAPES.items():
            values = torch.randn(torch.Size(shape).numel(), generator=generator).to(DTYPES[name])
            active = torch.rand(len(values), generator=generator) < density
            for span in blocks([Span(name, 0, len(values))]):
                here = slice(span.start, span.stop)
                writer.add(span, values[here], active[here])
            whole[name] = torch.where(active, values.float(), 0.0)
    return whole


@PROPERTY
@given(density=st.sampled_from([0.0, 0.01, 0.3, 1.0]), ends=st.tuples(st.integers(0, 900), st.integers(0, 900)))
def test_any_range_is_read_back(tmp_path_factory, density, ends):
    path = tmp_path_factory.mktemp("blocks") / "publication.safetensors"
    whole = written(path, density)
    store = Blocks([BlockFile(path)], SHAPES, Zeros())
    for name, values in whole.items():
        start, stop = sorted(min(end, len(values)) for end in ends)
        assert torch.equal(store.read(name, start, stop), values[start:stop])
        assert torch.equal(store.read(name, 0, len(values)), values)


@pytest.mark.parametrize("files", [1, 2])
def test_any_range_of_a_state_is_read_back(tmp_path, files):
    """Within a block, over the edge of two, over the edge of two ranks' files, and of no entries."""
    values = torch.randn(3 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    edges = [0, len(values)] if files == 1 else [0, BLOCK + 77, len(values)]
    for number, (first, last) in enumerate(itertools.pairwise(edges)):
        with BlockWriter(tmp_path / f"{number}.safetensors", {"a": torch.float32}) as writer:
            for span in blocks([Span("a", first, last)]):
                writer.add(span, values[span.start : span.stop])
    store = Blocks([BlockFile(tmp_path / f"{number}.safetensors") for number in range(files)], {"a": values.shape})
    near = [0, 1, 9, BLOCK - 1, BLOCK, BLOCK + 77, BLOCK + 78, 2 * BLOCK, 3 * BLOCK + 4, len(values)]
    for start, stop in itertools.combinations_with_replacement(near, 2):
        assert torch.equal(store.read("a", start, stop), values[start:stop]), (start, stop)


@pytest.mark.parametrize("places", ["positions", "bitmap", "dense"])
def test_a_flipped_bit_is_seen_in_every_block(tmp_path, places):
    path = tmp_path / "publication.safetensors"
    written(path, {"positions": 0.02, "bitmap": 0.3, "dense": 1.0}[places])
    sound, table = path.read_bytes(), BlockFile(path).table
    payload = 8 + int.from_bytes(sound[:8], "little")
    for row in table:
        offset, size = int(row[5]), int(row[6])
        damaged = bytearray(sound)
        damaged[payload + offset + size // 2] ^= 4
        path.write_bytes(damaged)
        store = Blocks([BlockFile(path)], SHAPES, Zeros())
        with pytest.raises(BlockFileError, match="checksum"):
            [store.read(name, 0, torch.Size(shape).numel()) for name, shape in SHAPES.items()]


def test_a_block_is_checked_though_an_empty_one_stands_where_it_starts(tmp_path):
    path = tmp_path / "publication.safetensors"
    values = torch.ones(4)
    with BlockWriter(path, {"empty": torch.float32, "full": torch.float32}) as writer:
        writer.add(Span("empty", 0, 4), values, torch.zeros(4, dtype=torch.bool))
        writer.add(Span("full", 0, 4), values, torch.tensor([True, False, True, False]))
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    path.write_bytes(content)
    store = Blocks([BlockFile(path)], {"empty": (4,), "full": (4,)}, Zeros())
    assert not store.read("empty", 0, 4).any()
    with pytest.raises(BlockFileError, match="'full' entries 0-4"):
        store.read("full", 0, 4)


def test_a_block_that_was_damaged_stays_refused(tmp_path):
    path = tmp_path / "publication.safetensors"
    written(path, 1.0)
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    path.write_bytes(content)
    file = BlockFile(path)
    store = Blocks([file], SHAPES, Zeros())
    for _ in range(2):
        with pytest.raises(BlockFileError, match="checksum"):
            store.read("a", 0, 10)
