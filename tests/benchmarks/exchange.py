"""
Size and speed of publications: python -m tests.benchmarks.exchange [--json PATH] [--entries N]

Size is bits per parameter beside the bound 1.5 · (H(p) + bits · p), H the binary entropy. Speed is in MB of the dense
equivalent per second of CPU time of one core; reading includes the copy of the reference it is laid over.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import torch

from ram_trl.weights import whole
from ram_trl.weights.memory import StateDict
from ram_trl.weights.sparse import BlockFile, Blocks, BlockWriter, blocks


def measure(dtype: torch.dtype, density: float, entries: int, folder: Path) -> dict[str, float]:
    """One publication of a random update, written and read once."""
    generator = torch.Generator().manual_seed(0)
    reference = StateDict({"w": torch.randn(entries, generator=generator)})
    theta = torch.randn(entries, generator=generator).to(dtype)
    active = torch.rand(entries, generator=generator) < density
    path = folder / f"{dtype}-{density}.safetensors"

    start = time.process_time()
    with BlockWriter(path, {"w": dtype}) as writer:
        for span in blocks(whole(reference)):
            writer.add(span, theta[span.start : span.stop], active[span.start : span.stop])
    written = time.process_time() - start

    start = time.process_time()
    publication = Blocks([BlockFile(path)], {"w": (entries,)}, reference)
    found = [publication.read("w", span.start, span.stop) for span in blocks(whole(reference))]
    read = time.process_time() - start

    expected = torch.where(active, theta.float(), reference.read("w", 0, entries))
    assert torch.equal(torch.cat(found), expected), "the publication does not give back what was published"
    bits = 8 * dtype.itemsize
    entropy = -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    dense = entries * dtype.itemsize / 1e6
    return {
        "bits_per_parameter": path.stat().st_size * 8 / entries,
        "bound": 1.5 * (entropy + bits * density),
        "write_mb_s": dense / written,
        "read_mb_s": dense / read,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--entries", type=int, default=20_000_000, help="parameters of the model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    print("| values | density | bits/parameter | bound | write MB/s | read MB/s |\n|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.bfloat16, torch.float32):
            for density in (0.01, 0.05, 0.2, 0.5):
                row = measure(dtype, density, arguments.entries, Path(folder))
                name = f"{str(dtype).removeprefix('torch.')}@{density:g}"
                rows[name] = row
                numbers = f"{row['bits_per_parameter']:.3f} | {row['bound']:.3f} | {row['write_mb_s']:.0f}"
                print(f"| {name.split('@')[0]} | {density:.0%} | {numbers} | {row['read_mb_s']:.0f} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
