"""DeepSpeed ZeRO checkpoints: refused by a merge, with the command that makes them readable; and that command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ram_trl import MergeInputError, merge
from tests import models
from tests.distributed.launching import free_port
from tests.test_cli import run


@pytest.mark.parametrize("inside", [False, True])
def test_shards_are_refused_with_the_command_that_converts_them(family, inside):
    shards = family / "zero" / "global_step2"
    shards.mkdir(parents=True)
    (shards / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"never read")
    agents = {"tool": family / "tool", "code": shards if inside else shards.parent}
    with pytest.raises(MergeInputError) as caught:
        merge(family / "base", agents, family / "out")
    assert f"ram-trl convert-zero {family}/zero {family}/zero-fp32" in str(caught.value)
    assert "pickles" in str(caught.value)


def test_a_model_beside_its_shards_is_merged(family):
    """A Trainer checkpoint holds both."""
    (family / "tool" / "global_step2").mkdir()
    (family / "tool" / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"never read")
    merge(family / "base", {"tool": family / "tool"}, family / "out")


def test_what_cannot_be_converted_is_told(family):
    result = run("convert-zero", family / "base", family / "out")
    assert result.exit_code == 1
    assert "holds no ZeRO shards" in result.output
    (family / "zero" / "global_step2").mkdir(parents=True)
    (family / "zero" / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    result = run("convert-zero", family / "zero", family / "out")
    assert result.exit_code == 1
    assert "--base" in result.output
    assert not (family / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_two_ranks_is_converted_and_merged(tmp_path: Path, stage: int, tied: bool):
    base = models.tiny_model(tied=tied)
    base.save_pretrained(tmp_path / "base")
    models.trained(base, seed=1).save_pretrained(tmp_path / "code")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "-m", "tests.distributed.save_zero", str(stage)]
    subprocess.run([*command, f"{tmp_path}/base", f"{tmp_path}/zero"], check=True, timeout=600, env=os.environ)
    before = models.contents(tmp_path / "zero")

    result = run("convert-zero", tmp_path / "zero", tmp_path / "tool")
    assert result.exit_code == 0, result.output
    assert models.contents(tmp_path / "zero") == before
    gathered = load_file(tmp_path / "zero-gathered.safetensors")
    held = load_file(tmp_path / "tool" / "model.safetensors")
    assert held.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    assert all(torch.equal(held[name], gathered[name]) for name in held)

    merge(tmp_path / "base", {"tool": tmp_path / "tool", "code": tmp_path / "code"}, tmp_path / "out")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
