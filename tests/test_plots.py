"""Figures: written, sized for what is in them, and drawn to scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from ram_trl.plots import (
    INACTIVE,
    SHARED,
    STRONG,
    TASK_COLOURS,
    UNIQUE,
    RoundPoint,
    plot_overlap,
    plot_rounds,
    plot_scores,
)
from ram_trl.report import AgentReport


def scores(models: int, tool: float = 80.0, code: float = 40.0) -> dict[str, dict[str, float]]:
    return {f"model_{i}@x": {"tool": tool, "code": code, "average": (tool + code) / 2} for i in range(models)}


def agent(active: int, shared: int, rho: float | None = 0.5, lambda_: float | None = 1.1) -> AgentReport:
    return AgentReport(
        entries=1000, active=active, shared=shared, unique=active - shared, density=active / 1000, rho=rho,
        lambda_=lambda_, weight=1.0, threshold=0.0, norm=1.0, kept=1.0, largest=1.0, dtypes=["float32"],
    )  # fmt: skip


def rounds(count: int, agents: tuple[str, ...] = ("tool", "code"), last: float | None = 1.1) -> list[RoundPoint]:
    """Rounds that all look the same; in the last one λ is `last`."""
    flat, shared = dict.fromkeys(agents, 0.2), dict.fromkeys(agents, 0.4)
    scores = dict.fromkeys((*agents, "average"), 50.0)
    lambdas = [*[1.1] * (count - 1), last]
    return [RoundPoint(n, scores, flat, shared, dict.fromkeys(agents, x)) for n, x in enumerate(lambdas, 1)]


BASE = {"tool": 10.0, "code": 20.0, "average": 15.0}


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


def test_rounds_have_a_row_of_panels_per_run_and_every_agent_in_each(tmp_path: Path) -> None:
    runs = {"continual": rounds(4), "other": rounds(3)}
    plot_rounds(dict(list(runs.items())[:1]), tmp_path / "one.png", BASE, ("ram+", 90.0))
    plot_rounds(runs, tmp_path / "two.png", BASE, ("ram+", 90.0))
    one, two = (imread(tmp_path / name) for name in ("one.png", "two.png"))
    assert (one.shape[:2], two.shape[:2]) == ((456, 1500), (828, 1500))
    for panel in range(3):
        strip = two[:, panel * 500 : (panel + 1) * 500]
        for colour in TASK_COLOURS[:2]:
            upper, lower = area(strip[:414], colour), area(strip[414:], colour)
            assert upper > 50, (panel, colour)
            assert lower > 50, (panel, colour)


def test_lines_on_top_of_each_other_can_all_be_seen(tmp_path: Path) -> None:
    agents = ("tool", "code", "mem")
    base = dict.fromkeys((*agents, "average"), 10.0)
    plot_rounds({"continual": rounds(4, agents)}, tmp_path / "rounds.png", base, ("ram+", 90.0))
    # The legend is at the bottom or top here, the lines of λ are in between.
    panel = imread(tmp_path / "rounds.png")[180:300, 1060:]
    assert all(area(panel, colour) > 50 for colour in TASK_COLOURS[:3])


def test_rounds_where_nothing_was_active_or_known(tmp_path: Path) -> None:
    plot_rounds({"continual": rounds(3, last=None)}, tmp_path / "a.png", BASE, ("ram+", 90.0))
    plot_rounds({"continual": rounds(1, last=None)}, tmp_path / "b.png", BASE, ("ram+", 90.0))
    assert all((tmp_path / name).stat().st_size for name in ("a.png", "b.png"))


def test_no_global_figure_is_left_behind(tmp_path: Path) -> None:
    from matplotlib import pyplot

    plot_rounds({"continual": rounds(2)}, tmp_path / "rounds.png", BASE, ("ram+", 90.0))
    plot_scores(scores(2), tmp_path / "scores.png")
    plot_overlap({"tool": agent(400, 100)}, tmp_path / "overlap.png")
    assert pyplot.get_fignums() == []
