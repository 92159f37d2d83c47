"""Recipes without training: agents are checkpoints that somebody trained, on the Hub or in folders, merged once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from pydantic import Field, ValidationError, model_validator
from rich.console import Console

from ram_trl.folders.offline import merge
from ram_trl.recipe import AGENT, MergeRow, Section, sentences
from ram_trl.telling.tables import show_report


class Source(Section):
    """A checkpoint: a folder, or a name on the Hugging Face Hub and its revision."""

    model: str
    revision: str | None = None

    def folder(self) -> Path:
        """The folder, downloaded if it has to be."""
        own = Path(self.model).expanduser()
        if own.is_dir():
            return own
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
        return Path(snapshot_download(self.model, revision=self.revision, allow_patterns=patterns))


class Trained(Source):
    """An agent: a name, and its checkpoint."""

    name: AGENT


class OfflineRecipe(Section):
    """
    A recipe of checkpoints.

    Args:
        base ([`Source`]), agents (`list[Trained]`):
            What is merged.
        merge ([`MergeRow`]):
            How.
        out (`Path`, *optional*):
            Folder to make; `runs/<name of the recipe>` by default.
        parameters (`float`, *optional*):
            Parameters of the model, for `--dry-run` to tell sizes where it is not at hand.
    """

    base: Source
    agents: list[Trained] = Field(min_length=1)
    merge: MergeRow
    out: Path | None = None
    parameters: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _names_are_different(self) -> OfflineRecipe:
        names = [agent.name for agent in self.agents]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two agents are called '{name}'; give each its own name")
        return self


def is_offline(values: dict[str, Any]) -> bool:
    """Whether a recipe names checkpoints in place of tasks."""
    agents = values.get("agents")
    return isinstance(agents, list) and all(isinstance(agent, dict) and "model" in agent for agent in agents)


def run_offline(path: Path, values: dict[str, Any], dry_run: bool, console: Console) -> int:
    """
    Merges the checkpoints of a recipe, or tells how.

    Raises:
        `ValueError`: if the recipe is wrong, or the checkpoints cannot be merged.
    """
    try:
        recipe = OfflineRecipe(**values)
    except ValidationError as error:
        raise ValueError(f"{path}: {sentences(error)}") from error
    out = recipe.out or Path("runs") / path.stem
    if dry_run:
        sources = [recipe.base, *recipe.agents]
        for source in sources:
            if not Path(source.model).expanduser().is_dir():
                revision = f" --revision {source.revision}" if source.revision else ""
                console.print(f"$ hf download {source.model}{revision}", highlight=False, soft_wrap=True)
        knobs = recipe.merge.config.settled()
        told = ", ".join(f"{name} {value}" for name, value in knobs.items() if value not in ({}, None))
        names = ", ".join(agent.name for agent in recipe.agents)
        console.print(f"merge {names} into {out}: {told}", markup=False, highlight=False, soft_wrap=True)
        said = "about 0.5 GB, whatever the model: files are mapped, and merged in chunks"
        console.print(f"  memory: {said}; one process", highlight=False, soft_wrap=True)
        if recipe.parameters is not None:
            size = 2 * recipe.parameters / 1e9
            said = f"about {size * len(sources):.0f} GB to read, {size:.0f} GB to write"
            console.print(f"  disk: {said}", highlight=False, soft_wrap=True)
        return 0
    folders = {agent.name: agent.folder() for agent in recipe.agents}
    report = merge(recipe.base.folder(), folders, out, recipe.merge.config)
    show_report(report, console)
    console.print(f"generalist: {report.out}", soft_wrap=True, highlight=False, markup=False, emoji=False)
    return 0
