"""Figures: written, sized for what is in them, and drawn to scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from ram_trl.plots import INACTIVE, SHARED, STRONG, TASK_COLOURS, UNIQUE, plot_overlap, plot_scores
from ram_trl.report import AgentReport


def scores(models: int, tool: float = 80.0, code: float = 40.0) -> dict[str, dict[str, float]]:
    return {f"model_{i}@x": {"tool": tool, "code": code, "average": (tool + code) / 2} for i in range(models)}


def agent(active: int, shared: int, rho: float | None = 0.5, lambda_: float | None = 1.1) -> AgentReport:
    return AgentReport(
        entries=1000, active=active, shared=shared, unique=active - shared, density=active / 1000, rho=rho,
        lambda_=lambda_, weight=1.0, threshold=0.0, norm=1.0, kept=1.0, largest=1.0, dtypes=["float32"],
    )  # fmt: skip


def area(picture: np.ndarray, colour: str) -> int:
    """Pixels of exactly this colour."""
    return int((np.abs(picture[:, :, :3] - np.array(to_rgb(colour))) < 1 / 512).all(axis=2).sum())


def test_bars_of_scores_are_drawn_to_scale(tmp_path: Path) -> None:
    plot_scores(scores(6), tmp_path / "scores.png")
    picture = imread(tmp_path / "scores.png")
    tool, code, average = (area(picture, colour) for colour in (*TASK_COLOURS[:2], STRONG))
    assert tool / code == pytest.approx(2.0, rel=0.1)
    # The labels of the averages and the legend have the colour of the average too.
    assert average / code == pytest.approx(1.5, rel=0.2)


def test_scores_get_wider_with_more_models_and_stay_readable(tmp_path: Path) -> None:
    shapes = []
    for models in (2, 11, 20):
        plot_scores(scores(models), tmp_path / "scores.png")
        shapes.append(imread(tmp_path / "scores.png").shape)
    assert shapes[0][1] < shapes[1][1] < shapes[2][1]
    assert {height for height, *_ in shapes} == {552}
    assert shapes[1][1] / 11 > 80, "pixels per model, enough for a label"


def test_error_bars_appear_with_several_seeds(tmp_path: Path) -> None:
    models = scores(3)
    plot_scores(models, tmp_path / "one.png")
    plot_scores(models, tmp_path / "several.png", std={name: dict.fromkeys(row, 5.0) for name, row in models.items()})
    without, drawn = (area(imread(tmp_path / name), TASK_COLOURS[1]) for name in ("one.png", "several.png"))
    assert without - drawn > 3 * 20, "each line covers a piece of its bar"


def test_overlap_is_drawn_to_scale(tmp_path: Path) -> None:
    plot_overlap({"tool": agent(400, 100), "code": agent(200, 100)}, tmp_path / "overlap.png")
    picture = imread(tmp_path / "overlap.png")
    unique, shared, inactive = (area(picture, colour) for colour in (UNIQUE, SHARED, INACTIVE))
    assert unique / shared == pytest.approx(400 / 200, rel=0.1)
    assert inactive / shared == pytest.approx(1400 / 200, rel=0.1)


def test_overlap_of_agents_without_a_rho_or_active_entries(tmp_path: Path) -> None:
    agents = {"none": agent(0, 0, None, None), "all-shared": agent(1000, 1000, None, 1.0), "a-long-name": agent(10, 0)}
    plot_overlap(agents, tmp_path / "overlap.png")
    assert imread(tmp_path / "overlap.png").shape[:2] == (round((1.7 + 0.62 * 3) * 120), 1080)


def test_no_global_figure_is_left_behind(tmp_path: Path) -> None:
    from matplotlib import pyplot

    plot_scores(scores(2), tmp_path / "scores.png")
    plot_overlap({"tool": agent(400, 100)}, tmp_path / "overlap.png")
    assert pyplot.get_fignums() == []
