"""Fixtures shared by all tests."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
# A DeepSpeed build that was killed leaves a lock that hangs all later ones; no two sessions share the folder.
_extensions = tempfile.TemporaryDirectory(prefix="torch-extensions-")  # removed when the session ends
os.environ["TORCH_EXTENSIONS_DIR"] = _extensions.name
torch.set_num_threads(1)

from tests import models  # noqa: E402  (after the environment is set)


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A folder with a base and agents `tool` and `code`, as save_pretrained writes them."""
    base = models.tiny_model()
    base.save_pretrained(tmp_path / "base")
    models.tokenizer().save_pretrained(tmp_path / "base")
    models.trained(base, seed=1).save_pretrained(tmp_path / "tool")
    models.trained(base, seed=2).save_pretrained(tmp_path / "code")
    return tmp_path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of PPO are left out where TRL has no PPOTrainer; `make test-ppo` runs them where it has."""
    if importlib.util.find_spec("trl.experimental.ppo") is None:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("ppo")])
        items[:] = [item for item in items if not item.get_closest_marker("ppo")]
