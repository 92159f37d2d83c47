"""Figures: written, sized for what is in them, and drawn to scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from ram_trl import MergeReport, merge_state_dicts
from ram_trl.telling.plots import (
    HEAT,
    INACTIVE,
    SHARED,
    STRONG,
    TASK_COLOURS,
    UNIQUE,
    RoundPoint,
    plot_layers,
    plot_overlap,
    plot_pairs,
    plot_rounds,
    plot_scores,
    save_merge_plots,
)
from ram_trl.telling.report import AgentReport, PairReport


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


def pair(one: str, other: str, jaccard: float, chance: float, agreement: float | None) -> PairReport:
    return PairReport(
        agents=(one, other), both=10, jaccard=jaccard, jaccard_by_chance=chance, sign_agreement=agreement
    )  # fmt: skip


def test_pairs_are_drawn_to_scale(tmp_path: Path) -> None:
    plot_pairs([pair("a", "b", 0.8, 0.3, 1.0), pair("a", "c", 0.2, 0.3, 0.25)], tmp_path / "pairs.png")
    picture = imread(tmp_path / "pairs.png")
    (long, short), (agreed, opposed) = (
        [area(row, colour) for row in np.split(picture[80:-80], 2)] for colour in (UNIQUE, TASK_COLOURS[2])
    )
    assert long / short == pytest.approx(4, rel=0.15)
    # Of the longer bar, the line at one half covers a piece.
    assert agreed / opposed == pytest.approx(4, rel=0.15)
    assert area(picture, SHARED) > 2 * 50, "the ticks that mark chance"


def test_pairs_that_share_nothing_or_everything_or_have_long_names(tmp_path: Path) -> None:
    pairs = [pair("none", "x" * 80, 0.0, 0.0, None), pair("all", "y" * 80, 1.0, 1.0, 1.0)]
    plot_pairs(pairs, tmp_path / "pairs.png")
    picture = imread(tmp_path / "pairs.png")
    assert picture.shape[1] == 1080
    assert area(picture, UNIQUE) > 30 * 150, "a name leaves room for the bars"


def report(layers: int, agents: int) -> MergeReport:
    """A merge in which agent `i` changed only the first matrix of layer `i`, and that wholly."""
    words = ("self_attn.q_proj", "mlp.up_proj")
    names = [
        "model.embed_tokens.weight",
        *(f"model.layers.{n}.{word}.weight" for n in range(layers) for word in words),
    ]
    base = {name: torch.zeros(8) for name in names}
    changed = {
        f"agent-number-{i}": base | {f"model.layers.{i}.self_attn.q_proj.weight": torch.ones(8)} for i in range(agents)
    }
    return merge_state_dicts(base, changed)[1]


def heat(path: Path, share: float) -> np.ndarray:
    """Where a heat map has the colour of this share of the highest density; without the bar that explains colours."""
    picture = imread(path)[:-100, :, :3]
    return (np.abs(picture - np.array(colormaps[HEAT](share)[:3])) < 2 / 255).all(axis=2)


def test_the_heat_map_shows_each_layer_and_kind_where_it_belongs(tmp_path: Path) -> None:
    plot_layers(report(layers=4, agents=2), tmp_path / "layers.png")
    hot = heat(tmp_path / "layers.png", 1.0)
    drawn = hot | heat(tmp_path / "layers.png", 0.0)
    rows, columns = (np.flatnonzero(drawn.sum(axis=axis) > 50) for axis in (1, 0))
    (gap,) = np.flatnonzero(np.diff(columns) > 1)
    for agent, panel in enumerate((columns[: gap + 1], columns[gap + 1 :])):
        across = (np.flatnonzero(hot[:, panel].any(axis=0)) + 0.5) / len(panel)
        down = (np.flatnonzero(hot[:, panel].any(axis=1)) - rows[0] + 0.5) / len(rows)
        # Layer `agent` of 4; the second kind (attention q) of 3.
        assert (across[0], across[-1]) == pytest.approx((agent / 4, (agent + 1) / 4), abs=0.02)
        assert (down[0], down[-1]) == pytest.approx((1 / 3, 2 / 3), abs=0.04)


def test_the_heat_map_of_many_layers_and_agents_keeps_its_width_and_grows_downwards(tmp_path: Path) -> None:
    shapes = []
    for agents in (1, 3, 8):
        plot_layers(report(layers=64, agents=agents), tmp_path / "layers.png")
        shapes.append(imread(tmp_path / "layers.png").shape)
    assert {width for _, width, _ in shapes} == {1080}
    assert shapes[0][0] == shapes[1][0] < shapes[2][0] < 1080


def test_the_heat_map_of_a_model_without_layers_or_changes(tmp_path: Path) -> None:
    base = {"lm_head.weight": torch.zeros(4), "model.norm.weight": torch.zeros(2)}
    for changed in (base, base | {"lm_head.weight": torch.ones(4)}):
        plot_layers(merge_state_dicts(base, {"tool": changed})[1], tmp_path / "layers.png")
        assert (heat(tmp_path / "layers.png", 1.0).sum() > 10_000) == (changed is not base)


def test_a_merge_has_pictures_of_overlap_pairs_and_layers(tmp_path: Path) -> None:
    two, one = tmp_path / "a" / "two", tmp_path / "one"
    assert save_merge_plots(report(2, 2), two) == [two / "overlap.png", two / "pairs.png", two / "layers.png"]
    assert save_merge_plots(report(2, 1), one) == [one / "overlap.png", one / "layers.png"]
    assert {path.name for path in one.iterdir()} == {"overlap.png", "layers.png"}
    assert all(path.stat().st_size for path in two.iterdir())


def test_no_global_figure_is_left_behind(tmp_path: Path) -> None:
    from matplotlib import pyplot

    plot_rounds({"continual": rounds(2)}, tmp_path / "rounds.png", BASE, ("ram+", 90.0))
    plot_scores(scores(2), tmp_path / "scores.png")
    plot_overlap({"tool": agent(400, 100)}, tmp_path / "overlap.png")
    save_merge_plots(report(2, 2), tmp_path / "plots")
    assert pyplot.get_fignums() == []
