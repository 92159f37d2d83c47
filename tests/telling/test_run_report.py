"""The report of a run tells what the hub holds, in HTML that stands alone and in Markdown."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ram_trl.continual.completing import complete
from ram_trl.continual.hub import Hub, HubError
from ram_trl.files import write_json
from ram_trl.recipe import load_recipe
from ram_trl.runs.board import Board, agent_rows
from ram_trl.runs.jobs import make_plan
from ram_trl.telling.run_report import read_times, write_run_report
from tests import models, small_run
from tests.training.test_callback import states, together


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A real run of two agents in turns: three rounds."""
    folder = tmp_path_factory.mktemp("run")
    models.tiny_model().save_pretrained(folder / "base")
    models.tokenizer().save_pretrained(folder / "base")
    together(folder / "base", folder)
    return folder


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.pictures: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.pictures.append(dict(attrs)["src"])

    def handle_data(self, data):
        self.cells.append(data)


def test_the_report_holds_every_round_and_agent(run):
    path = write_run_report(Hub(run / "hub"), run / "report")
    page = Reader()
    page.feed(path.read_text())
    assert len(page.pictures) == 2, "overlap and times; nothing was scored"
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in page.pictures)
    told = (run / "report" / "report.md").read_text()
    hub = Hub(run / "hub")
    rounds = re.findall(r"^\| (\d+) \| code, tool \|", told, re.MULTILINE)
    assert rounds == [str(d.round) for d in hub.decisions()]
    for number in rounds:
        held = json.loads((hub.round_folder(int(number)) / "report.json").read_text())["content"]
        assert f"{held['sign_conflict']:.1%}" in told
        assert f"{held['agents']['tool']['lambda']:.3f}" in told
    for picture in re.findall(r"!\[\w+\]\((.*?)\)", told):
        assert (run / "report" / picture).read_bytes().startswith(b"\x89PNG")


def test_times_add_up_to_shares_of_the_whole(run):
    write_run_report(Hub(run / "hub"), run / "report")
    told = (run / "report" / "report.md").read_text()
    lines = re.findall(r"^\| (?:code|tool) \| [\d.]+ \|(.*)\|$", told, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        shares = [float(share) for share in re.findall(r"\(([\d.]+)%\)", line)]
        assert len(shares) == 5
        assert sum(shares) == pytest.approx(100, abs=0.3)
    times = read_times(Hub(run / "hub"), "tool")
    assert [each.step for each in times] == [2, 4, 6, 6]
    assert [each.round for each in times[:3]] == [1, 2, 3]
    assert all(each.train_s > 0 and each.publish_s > 0 and each.exchange_mb > 0 for each in times[:3])
    assert any(each.turns_s > 0 for each in times), "agents of one job gave each other their turns"
    assert all(each.wait_s >= 0 and each.merge_s > 0 for each in times)


def test_a_line_that_a_killed_process_left_is_left_out(run, tmp_path):
    hub = Hub(run / "hub")
    path = hub.times_file("code")
    whole = path.read_text()
    try:
        path.write_text(whole + '{"step": 9, "rou')
        assert [each.step for each in read_times(hub, "code")] == [2, 4, 6, 6]
    finally:
        path.write_text(whole)


def test_names_are_escaped(run, tmp_path):
    hub = Hub(run / "hub")
    hub.give_up("late", "<script>alert(1)</script>")
    try:
        page = write_run_report(hub, tmp_path).read_text()
        assert "<script>" not in page
        assert "Agent &#x27;late&#x27; was given up: &lt;script&gt;" in page
    finally:
        (hub.agent_folder("late") / "done.json").unlink()
        hub.agent_folder("late").rmdir()


def test_what_is_not_a_hub_is_told(tmp_path):
    with pytest.raises(HubError, match="is not a hub"):
        write_run_report(Hub(tmp_path), tmp_path / "report")


def test_a_lost_end_is_made_up_for_with_the_same_bytes(run, tmp_path):
    """State and export of the last round are removed, as if its jobs had been killed before they made them."""
    shutil.copytree(run / "hub", tmp_path / "hub")
    hub = Hub(tmp_path / "hub")
    last = len(hub.decisions())
    expected = states(run / "hub")[-1]
    shutil.rmtree(hub.state_folder(last))
    shutil.rmtree(hub.generalist_folder(last))
    assert complete(hub, run / "base") == last
    found = states(tmp_path / "hub")[-1]
    assert all((found[name] == expected[name]).all() for name in expected)
    assert hub.latest() == last
    folder = hub.generalist_folder(last)
    (weights,) = folder.glob("*.safetensors")
    assert weights.read_bytes() == (run / "hub" / "generalist" / folder.name / weights.name).read_bytes()


def test_the_board_shows_a_row_per_agent_with_and_without_a_terminal(run, tmp_path):
    path = small_run.recipe(tmp_path, agents=("tool", "code"), hub=str(run / "hub"))
    plan = make_plan(path, load_recipe(path))
    progress = tmp_path / "run" / "agents" / "tool" / "progress.json"
    progress.parent.mkdir(parents=True)
    write_json(progress, {"state": "training", "step": 3, "steps": 6, "reward": 0.25, "counter": 1, "agent": "tool"})
    rows = agent_rows(plan, Hub(run / "hub"), {"tool": "running", "code": "waiting to restart"})
    assert [row["agent"] for row in rows] == ["tool", "code"]
    assert rows[0] | {"density": "", "lambda": ""} == {
        "agent": "tool", "step": "3/6", "reward": "0.25", "round": "3", "density": "", "lambda": "", "age": "0",
        "state": "done",
    }  # fmt: skip
    for terminal in (True, False):
        console = Console(file=StringIO(), width=120, force_terminal=terminal)
        with Board(plan, console) as board:
            board.say("tool", "a line [with brackets]")
            board.show({"tool": "running", "code": "running"})
        shown = console.file.getvalue()
        assert "a line [with brackets]" in shown
        if not terminal:
            assert re.search(r"\[launcher\] agent 'tool': done, step 3/6, reward 0\.25, round 3, density", shown)
        assert "3/6" in shown
