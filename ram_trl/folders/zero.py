"""
DeepSpeed ZeRO checkpoints made into `save_pretrained` folders.

The shards are pickles, which run whatever code they hold when they are read; so this is done by a command of its own
(`ram-trl convert-zero`), for checkpoints that the user trusts, and never on the way of a merge. DeepSpeed's own
converter puts the shards together.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from ram_trl.files import folder_in_one_piece
from ram_trl.weights import OUTPUT_EMBEDDINGS
from ram_trl.weights.checkpoint import side_files, zero_checkpoint
from ram_trl.weights.writer import CheckpointWriter


def convert_zero(checkpoint: Path, out: Path, base: Path | None = None, max_shard_size: int | str = "5GB") -> None:
    """
    Writes the fp32 weights of a ZeRO checkpoint as `save_pretrained` would. Reads pickles: only for files you trust.

    Tied weights, which DeepSpeed's program cannot store as safetensors, are stored once.

    Args:
        checkpoint (`Path`):
            A folder saved by `engine.save_checkpoint` or by a Trainer under ZeRO-1, 2 or 3.
        out (`Path`):
            Folder to make; it must not exist yet.
        base (`Path`, *optional*):
            Where config.json and the tokenizer come from if the checkpoint has none.
        max_shard_size (`int` or `str`, *optional*, defaults to `"5GB"`):
            Largest size of one weight file.

    Raises:
        `ValueError`: if it is no ZeRO checkpoint, or nothing tells its config.
        `FileExistsError`: if `out` exists.
    """
    folder = zero_checkpoint(checkpoint)
    if folder is None:
        raise ValueError(f"{checkpoint} holds no ZeRO shards (*_optim_states.pt), itself or one folder below")
    described = next((f for f in (folder, base) if f is not None and (f / "config.json").exists()), None)
    if described is None:
        raise ValueError(f"{folder} has no config.json; name the base it was trained from (--base FOLDER)")
    if out.exists():
        raise FileExistsError(f"{out} exists; name a new folder, or remove it")
    tensors = _once(_gathered(folder))
    with folder_in_one_piece(out) as temporary:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        writer = CheckpointWriter(temporary, shapes, dict.fromkeys(shapes, torch.float32), max_shard_size)
        try:
            for name in sorted(tensors):
                writer.write(name, 0, tensors[name].contiguous().detach().float().reshape(-1))
            writer.close()
        finally:
            writer.abandon()
        for source in side_files(described):
            target = temporary / source.relative_to(described)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)


def _gathered(folder: Path) -> dict[str, Any]:
    """By name, tensors or DeepSpeed's stand-ins, which are gathered one at a time by `contiguous()`."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), lazy_mode=True))


def _once(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tied weights, which are one object under several names, under the input embedding's name alone."""
    names: dict[int, str] = {}
    for name in sorted(tensors, key=lambda name: (name.endswith(OUTPUT_EMBEDDINGS), name)):
        names.setdefault(id(tensors[name]), name)
    return {name: tensors[name] for name in names.values()}
