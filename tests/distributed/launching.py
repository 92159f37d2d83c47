"""Starts jobs of several ranks the way users do: `accelerate launch` for DeepSpeed, torchrun for DDP and FSDP2."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
ACCELERATE = REPOSITORY / "launch" / "accelerate"

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def deepspeed_config(folder: Path, stage: int, ranks: int, zero: dict[str, Any], engine: dict[str, Any]) -> Path:
    """An accelerate config like the shipped one of that stage, with DeepSpeed's own settings in a file beside it."""
    engine = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage} | zero,
    } | engine
    if stage == 3:
        engine["zero_optimization"].setdefault("stage3_gather_16bit_weights_on_model_save", True)
    (folder / "deepspeed.json").write_text(json.dumps(engine))
    config = yaml.safe_load((ACCELERATE / f"cpu_zero{max(1, stage)}.yaml").read_text())
    config["num_processes"] = ranks
    config["deepspeed_config"] = {
        "deepspeed_multinode_launcher": "standard",
        "deepspeed_config_file": str(folder / "deepspeed.json"),
        "zero3_init_flag": stage == 3,
    }
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def launch(
    folder: Path,
    settings: dict[str, Any],
    config: Path | None,
    ranks: int = 2,
    environment: dict[str, str] | None = None,
    module: str = "tests.distributed.sharded",
    first: str = "",
    flags: tuple[str, ...] = (),
) -> subprocess.Popen:
    """Starts a module on every rank; with an accelerate config by `accelerate launch`, else by torchrun, or alone."""
    job = [module, *([first] if first else []), str(folder), json.dumps(settings)]
    if config is not None:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        command += ["--main_process_port", str(free_port()), *flags, "-m", *job]
    elif ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        command += job
    else:
        command = [sys.executable, "-m", *job]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | (environment or {})
    log = (folder / "log.txt").open("w")
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(job: subprocess.Popen, folder: Path, timeout: float = 240) -> None:
    """Waits for a job to end well; whatever happens, nothing of it is left running."""
    try:
        assert job.wait(timeout) == 0, (folder / "log.txt").read_text()[-6000:]
    finally:
        end(job)


def end(job: subprocess.Popen) -> None:
    """Ends a job with all its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
