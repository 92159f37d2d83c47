"""Accelerate configs: the shipped ones of `launch/accelerate/` or a user's own, read, checked, and made explicit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ram_trl.config import read_yaml


def _shipped_launch() -> Path:
    package = Path(__file__).resolve().parents[1]
    installed = package / "launch"
    return installed if installed.is_dir() else package.parent / "launch"


LAUNCH: Path = _shipped_launch()
"""What `accelerate launch` takes: `train.py` and `accelerate/`; inside the package once installed."""

KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP")

ONE_PLACE = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "mixed_precision": "bf16.enabled, fp16.enabled",
}
"""Keys of accelerate's DeepSpeed section, and what says the same in a DeepSpeed config file."""


@dataclass(frozen=True)
class Hardware:
    """
    An accelerate config.

    Args:
        source (`Path`):
            Its file.
        values (`dict[str, Any]`):
            What it says.
        deepspeed (`dict[str, Any]`):
            The DeepSpeed config file it names.
        shipped (`bool`):
            Whether it is one of ours.
    """

    source: Path
    values: dict[str, Any]
    deepspeed: dict[str, Any] = field(default_factory=dict)
    shipped: bool = False

    @property
    def kind(self) -> str:
        """Accelerate's distributed type."""
        return str(self.values.get("distributed_type", "NO")).upper()

    @property
    def on_cpu(self) -> bool:
        return bool(self.values.get("use_cpu", False)) or self.kind == "MULTI_CPU"

    @property
    def precision(self) -> str:
        """`no`, `bf16` or `fp16`."""
        for name in ("bf16", "fp16"):
            if self.deepspeed.get(name, {}).get("enabled") is True:
                return name
        return str(self.values.get("mixed_precision") or "no")

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 without DeepSpeed."""
        if self.kind != "DEEPSPEED":
            return 0
        section = self.values.get("deepspeed_config") or {}
        return int(self.deepspeed.get("zero_optimization", {}).get("stage", section.get("zero_stage", 2)))

    @property
    def offloads(self) -> bool:
        """Whether optimizer states are kept on the CPU."""
        section = self.values.get("deepspeed_config") or {}
        own = self.deepspeed.get("zero_optimization", {}).get("offload_optimizer", {}).get("device")
        return str(own or section.get("offload_optimizer_device") or "none") != "none"

    @property
    def processes(self) -> int | None:
        """What it says about the number of processes."""
        number = self.values.get("num_processes")
        return None if number in (None, -1) else int(number)

    def explicit(self, processes: int, machines: int, port: int | None) -> dict[str, Any]:
        """Every value, with those of a job set."""
        own: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": self.kind,
            "use_cpu": self.on_cpu,
            "mixed_precision": self.precision,
            "num_processes": processes,
            "num_machines": machines,
            "machine_rank": 0,
            "main_process_port": port,
            "rdzv_backend": self.values.get("rdzv_backend", "static"),
            "same_network": self.values.get("same_network", True),
            "main_training_function": "main",
        }
        if self.deepspeed:
            # DeepSpeed's file says it; accelerate refuses to hear it twice.
            del own["mixed_precision"]
        return {**self.values, **own, "gpu_ids": None if self.on_cpu else "all"}  # CUDA_VISIBLE_DEVICES says which


def read_hardware(name: str, folder: Path) -> Hardware:
    """
    An accelerate config by the name of a shipped one, or by a path relative to `folder`.

    Raises:
        `ValueError`: if there is none, or it or the DeepSpeed file it names cannot be read.
    """
    shipped = LAUNCH / "accelerate" / f"{name}.yaml"
    own = (folder / Path(name).expanduser()).resolve()
    if not shipped.is_file() and not own.is_file():
        known = ", ".join(sorted(path.stem for path in (LAUNCH / "accelerate").glob("*.yaml")))
        raise ValueError(f"launch.accelerate is '{name}': there is no file {own}, and shipped are {known}")
    source = shipped if shipped.is_file() else own
    values = read_yaml(source)
    file = (values.get("deepspeed_config") or {}).get("deepspeed_config_file")
    deepspeed: dict[str, Any] = {}
    if file is not None:
        path = (source.parent / Path(str(file)).expanduser()).resolve()
        try:
            deepspeed = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{source}: its deepspeed_config_file {path} cannot be read: {error}") from error
        values = {**values, "deepspeed_config": {**values["deepspeed_config"], "deepspeed_config_file": str(path)}}
    return Hardware(source, values, deepspeed, source == shipped)


def hardware_problems(hardware: Hardware, processes: int) -> Iterator[str]:
    """What is wrong with an accelerate config by itself, for jobs of that many processes."""
    kind, values = hardware.kind, hardware.values
    name = hardware.source.name
    if kind not in KINDS:
        yield f"{name}: distributed_type is {kind}; ram_trl runs {', '.join(KINDS)}"
        return
    if kind == "NO" and processes > 1:
        yield (
            f"{name}: distributed_type is NO, so accelerate would start one process, but {processes} are asked for; "
            f"take {'cpu_ddp' if hardware.on_cpu else 'ddp'} or a ZeRO config"
        )
    if values.get("use_cpu") and kind in ("MULTI_GPU", "FSDP"):
        yield (
            f"{name}: use_cpu with distributed_type {kind}: accelerate would silently start one process and ignore "
            f"{kind}; take cpu_ddp, cpu_zero2 or cpu_zero3, or leave use_cpu out"
        )
    if values.get("gpu_ids") not in (None, "all"):
        yield f"{name}: gpu_ids is {values['gpu_ids']}; say which GPUs an agent uses in the recipe (agents[].devices)"
    if kind == "MULTI_GPU" and processes == 1:
        yield f"{name}: distributed_type is MULTI_GPU, but jobs have one process; take single_gpu"
    if kind == "FSDP" and (values.get("fsdp_config") or {}).get("fsdp_version", 1) != 2:
        yield f"{name}: FSDP version 1 shards in a way that is not supported; set fsdp_config.fsdp_version: 2"
    if hardware.precision == "fp16":
        yield f"{name}: mixed precision fp16 is not supported (its loss scale skips steps); take bf16"
    if values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        yield f"{name}: compute_environment is {values['compute_environment']}, expected LOCAL_MACHINE"
    section = values.get("deepspeed_config") or {}
    if hardware.deepspeed:
        for key, theirs in ONE_PLACE.items():
            said = section.get(key, values.get(key) if key == "mixed_precision" else None)
            if said is not None:
                yield (
                    f"{name}: {key} is {said!r} here, and the DeepSpeed config file has its own {theirs} "
                    f"({_shown(hardware.deepspeed, theirs)}); say it in one of them"
                )
        if kind != "DEEPSPEED":
            yield f"{name}: names a DeepSpeed config file, but distributed_type is {kind}"


def agent_clashes(hardware: Hardware, args: Mapping[str, Any], processes: int, agent: str) -> Iterator[str]:
    """Where an agent's trainer arguments and the accelerate or DeepSpeed config say different things."""
    section = hardware.values.get("deepspeed_config") or {}
    source = hardware.source.name
    for precision in ("bf16", "fp16"):
        said = args.get(precision)
        if said is not None and bool(said) != (hardware.precision == precision):
            yield (
                f"agent '{agent}': args.{precision} is {said!r}, but {source} has mixed_precision "
                f"{hardware.precision}; leave it out of args, or change the accelerate config"
            )
    if args.get("deepspeed") is not None:
        yield f"agent '{agent}': args.deepspeed is set, but the layout comes from launch.accelerate ({source})"
    if args.get("fsdp"):
        yield f"agent '{agent}': args.fsdp is set, but the layout comes from launch.accelerate ({source})"
    engine = hardware.deepspeed
    batch, steps = args.get("per_device_train_batch_size", 8), args.get("gradient_accumulation_steps", 1)
    said = {
        "gradient_accumulation_steps": (steps, engine.get("gradient_accumulation_steps")),
        "per_device_train_batch_size": (batch, engine.get("train_micro_batch_size_per_gpu")),
        "max_grad_norm": (args.get("max_grad_norm", 1.0), engine.get("gradient_clipping")),
        "learning_rate": (args.get("learning_rate"), engine.get("optimizer", {}).get("params", {}).get("lr")),
        "batch of all ranks": (batch * steps * processes, engine.get("train_batch_size")),
    }
    for key, theirs in (
        ("gradient_accumulation_steps", section.get("gradient_accumulation_steps")),
        ("max_grad_norm", section.get("gradient_clipping")),
    ):
        if theirs is not None:
            said[key] = (said[key][0], theirs)
    for key, (ours, theirs) in said.items():
        if theirs in (None, "auto") or ours is None or float(ours) == float(theirs):
            continue
        yield (
            f"agent '{agent}': {key} is {ours} in the recipe (or TRL's default), but {theirs} for DeepSpeed ({source})"
        )


def _shown(values: Mapping[str, Any], path: str) -> str:
    told = []
    for one in path.split(", "):
        held: Any = values
        for key in one.split("."):
            held = held.get(key) if isinstance(held, Mapping) else None
        told.append("not set" if held is None else repr(held))
    return ", ".join(told)
