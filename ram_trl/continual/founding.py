"""The start of a run: every model has to be the base, and the base becomes state 0 of the hub."""

from __future__ import annotations

from pathlib import Path

import torch

from ram_trl.continual.hub import Hub, HubError
from ram_trl.engine.digest import Digest
from ram_trl.problems import MergeInputError
from ram_trl.weights import Span, cut, entries
from ram_trl.weights.block_folders import write_folder
from ram_trl.weights.checkpoint import open_checkpoint
from ram_trl.weights.live.lora import Live
from ram_trl.weights.sparse import BLOCK, BlockWriter, blocks


def compare_with_base(live: Live, folder: Path, agent: str, trained: bool) -> tuple[bool, dict[str, str]]:
    """
    Checks that a model starts from the base.

    Collective: all ranks of the job.

    Args:
        live (`LiveWeights` or `LoraWeights`):
            The model's weights.
        folder (`Path`):
            The base.
        agent (`str`):
            How errors name the agent.
        trained (`bool`):
            The weights are from a later checkpoint; only names and shapes are compared.

    Returns:
        `tuple[bool, dict[str, str]]`: whether the weights are the base's rounded to bfloat16; and the fingerprint of
        the base, by tensor.

    Raises:
        `HubError`: naming a tensor, an entry and both values, if the weights are not the base's.
        `MergeInputError`: if the base cannot be read.
    """
    opened = live.team.together(lambda: open_checkpoint(folder, "base"))
    base = opened.store
    problems = list(opened.problems)
    held = set(base.names())
    missing = [name for name in live.names() if name not in held]
    if missing:
        told = ", ".join(f"'{name}'" for name in missing[:5]) + (", …" if len(missing) > 5 else "")
        raise HubError(
            f"the model trains {told}, which the base {folder} does not have under that name; the base has to "
            "be the checkpoint that the model was loaded from, and of an architecture whose tensors have the same "
            "names in memory as on disk"
        )
    exact = rounded = True
    first = ""
    digest = Digest(live.names())

    def compare() -> None:
        nonlocal exact, rounded, first
        if problems:
            raise MergeInputError(problems)
        for name in live.names():
            if base.shape(name) != live.shape(name):
                raise HubError(
                    f"'{name}' has shape {list(live.shape(name))} in the model and "
                    f"{list(base.shape(name))} in the base {folder}"
                )
        for span in cut(live.owned(), BLOCK):
            want, have = span.of(base), live.read(span.name, span.start, span.stop)
            digest.add(span, want)
            if trained:
                continue
            same = torch.equal(want, have)
            near = torch.equal(want.to(torch.bfloat16).to(torch.float32), have)
            if not (same or near) and not first:
                at = int((want != have).nonzero()[0])
                values = f"{float(have[at])!r}, the base's {float(want[at])!r}"
                first = f"entry {span.start + at} of '{span.name}' is {values}"
            exact, rounded = exact and same, rounded and near

    live.team.together(compare)
    verdicts = live.team.collect((exact, rounded, first, digest.share()))
    exact, rounded = all(v[0] for v in verdicts), all(v[1] for v in verdicts)
    if not (exact or rounded):
        told = next((v[2] for v in verdicts if v[2]), "some tensors are rounded to bfloat16 and others are not")
        raise HubError(
            f"agent '{agent}' does not start from the base {folder}: {told}. Load the model from the "
            "base, or resume from a checkpoint of this run"
        )
    shares = [v[3] for rank, v in enumerate(verdicts) if rank != live.team.rank]
    return not exact, digest.sums(shares)


def check_base(hub: Hub, folder: Path) -> None:
    """
    Checks that a checkpoint is the base of a hub's run; reads all of it.

    Raises:
        `HubError`: naming a tensor that is another.
        `MergeInputError`: if it cannot be read.
    """
    opened = open_checkpoint(folder, "base")
    if opened.problems:
        raise MergeInputError(opened.problems)
    identity = hub.described()["identity"]
    digest, base = Digest(identity["base"]), opened.store
    for name, shape in identity["shapes"].items():
        held = list(base.shape(name)) if name in base.names() else None
        if held != shape:
            has = f"of shape {held}" if held else "missing"
            raise HubError(f"{folder} is not the base of {hub.path}: '{name}' is {has}, the run's is {shape}")
    for span in cut([Span(name, 0, entries(base, name)) for name in identity["base"]], BLOCK):
        digest.add(span, span.of(base))
    found = digest.sums()
    differing = [name for name in found if found[name] != identity["base"][name]]
    if differing:
        raise HubError(
            f"{folder} is not the base of {hub.path}: {len(differing)} of {len(found)} tensors hold other values, "
            f"such as '{differing[0]}'; name the checkpoint that its agents started from"
        )


def write_base_state(live: Live, folder: Path, hub: Hub, rounded: bool) -> None:
    """
    Makes state 0 of the hub, the base, unless it is there.

    Collective: all ranks of the job.

    Args:
        live (`LiveWeights` or `LoraWeights`):
            Tells the tensors and this rank's share.
        folder (`Path`):
            The base.
        hub (`Hub`):
            The hub.
        rounded (`bool`):
            Round the base to bfloat16, as the model of the job that founded the hub was.
    """
    target = hub.state_folder(0)
    if live.team.ask(target.exists):
        return
    base = live.team.together(lambda: open_checkpoint(folder, "base").store)

    def write(writer: BlockWriter) -> None:
        for span in blocks(live.owned()):
            values = span.of(base)
            writer.add(span, values.to(torch.bfloat16).to(torch.float32) if rounded else values)

    write_folder(live.team, target, {"round": 0}, dict.fromkeys(live.names(), torch.float32), write)
