"""The installed package stands alone: the demo runs from an empty folder, without the clone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def test_demo_runs_from_an_empty_folder_with_the_wheel_alone(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet"]
    wheels, site, empty = tmp_path / "wheels", tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, REPOSITORY], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", site, *wheels.glob("*.whl")], check=True)

    # PYTHONPATH comes before the clone that this environment has installed.
    environment = os.environ | {"PYTHONPATH": str(site)}
    where = [sys.executable, "-c", "import ram_trl.recipe as r; print(r.__file__, r.RECIPES)"]
    printed = subprocess.run(where, cwd=empty, env=environment, check=True, capture_output=True, text=True).stdout
    assert all(path.startswith(str(site)) for path in printed.split())

    demo = [sys.executable, "-m", "ram_trl.cli", "demo", "--fast"]
    finished = subprocess.run(demo, cwd=empty, env=environment, check=False, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    out = empty / "runs" / "demo"
    assert set(json.loads((out / "report.json").read_text())["models"]) >= {"base", "agent:tool", "ram+"}
    for name in ("report.md", "scores.png", "overlap.png", "generalist/config.json"):
        assert (out / name).exists()
        assert finished.stdout.count(f"runs/demo/{name.split('/')[0]}") >= 1

    recipe = Path(printed.split()[1]) / "demo.yaml"
    launch = [sys.executable, "-m", "ram_trl.cli", "launch", str(recipe), "--dry-run"]
    told = subprocess.run(launch, cwd=empty, env=environment, check=True, capture_output=True, text=True).stdout
    assert told.count(str(site / "ram_trl" / "launch" / "train.py")) == 3
