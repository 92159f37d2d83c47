"""A merge of folders that is killed: what stays, what `resume` takes up, and what it refuses."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ram_trl import MergeConfig, MergeInputError, merge
from ram_trl.folders.unfinished import Unfinished, workshop
from tests import models
from tests.crash import DIED, calls_of, forked

FILES = "30KB"  # three weight files


def merged(family: Path, resume: bool = False, **options):
    agents = {"tool": family / "tool", "code": family / "code"}
    given = {"max_shard_size": FILES, "threads": 1, "config": MergeConfig(top=0.3), **options}
    return merge(family / "base", agents, family / "out", resume=resume, **given)


@pytest.fixture
def unbroken(family) -> dict[str, bytes]:
    """The output of a merge that nothing disturbed; it is gone again."""
    merged(family)
    contents = models.contents(family / "out")
    shutil.rmtree(family / "out")
    return contents


def finished(family: Path) -> dict[str, tuple[int, int]]:
    """Finished weight files: inode and time of change."""
    folder = workshop(family / "out")
    names = [path.stem for path in (folder / "finished").glob("*.json")]
    return {name: _identity(folder / "model" / name) for name in names if (folder / "model" / name).exists()}


def _identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def resumed_equals(family: Path, unbroken: dict[str, bytes]) -> int:
    """Checks that resuming gives an unbroken merge without redoing finished files; returns how many these were."""
    kept = finished(family)
    if not (family / "out").exists():
        merged(family, resume=True)
    assert models.contents(family / "out") == unbroken
    assert {name: _identity(family / "out" / name) for name in kept} == kept
    assert [path.name for path in family.iterdir() if path.name.startswith(".")] in (
        [],
        [workshop(family / "out").name],
    )
    shutil.rmtree(family / "out")
    shutil.rmtree(workshop(family / "out"), ignore_errors=True)
    return len(kept)


def killed_at(family: Path, unbroken: dict[str, bytes], every: int, when: str) -> None:
    calls = calls_of(lambda: merged(family))
    shutil.rmtree(family / "out")
    counts = set()
    for fatal in range(0, len(calls), every):
        assert forked(lambda: merged(family), fatal, when) is DIED
        counts.add(resumed_equals(family, unbroken))
    assert counts >= {0, 3}


@pytest.mark.parametrize(("when", "every"), [("before", 5), ("after", 11), ("half", 9)])
def test_killed_at_a_system_call_and_resumed_it_equals_an_unbroken_run(family, unbroken, when, every):
    killed_at(family, unbroken, every, when)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after", "half"])
def test_killed_at_every_system_call_and_resumed_it_equals_an_unbroken_run(family, unbroken, when):
    killed_at(family, unbroken, 1, when)


def die_after(family: Path, files: int, **options) -> None:
    """Leaves a merge that was killed when it had finished so many weight files."""
    keep = Unfinished.keep

    def keep_and_die(self, file, differs):
        keep(self, file, differs)
        if len(finished(family)) == files:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Unfinished, "keep", keep_and_die)
        assert forked(lambda: merged(family, **options)) is DIED
    assert len(finished(family)) == files


def test_what_was_counted_is_not_counted_again(family, unbroken, monkeypatch):
    die_after(family, 1)
    monkeypatch.setattr("ram_trl.folders.offline.make_plan", lambda *a, **k: pytest.fail("counted again"))
    assert resumed_equals(family, unbroken) == 1


def test_other_threads_chunks_and_a_second_kill_change_no_bit(family, unbroken):
    die_after(family, 1)
    calls = calls_of(lambda: merged(family, resume=True, threads=2, chunk=777))
    shutil.rmtree(family / "out")
    die_after(family, 1)
    assert forked(lambda: merged(family, resume=True, threads=2, chunk=777), len(calls) // 2) is DIED
    assert resumed_equals(family, unbroken) >= 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("config", ["top is 0.1, was 0.3"]),
        ("dtype", ["dtype is bfloat16, was auto"]),
        ("shards", ["shard size is 10KB, was 30KB"]),
        ("agent", ["agent 'code': model.safetensors", "with header"]),
        ("agents", ["agent 'code': model.safetensors is not there"]),
        ("base config", ["base: config.json is"]),
    ],
)
def test_resuming_another_merge_is_refused_by_name_and_nothing_is_lost(family, unbroken, changed, words):
    die_after(family, 2)
    kept = models.contents(workshop(family / "out"))
    agents = {"tool": family / "tool", "code": family / "code"}
    options = {"max_shard_size": FILES, "config": MergeConfig(top=0.3)}
    if changed == "config":
        options["config"] = MergeConfig(top=0.1)
    elif changed == "dtype":
        options["dtype"] = "bfloat16"
    elif changed == "shards":
        options["max_shard_size"] = "10KB"
    elif changed == "agent":
        models.rewrite(family / "code", lambda t: t["model.norm.weight"].add_(1))
    elif changed == "agents":
        agents = {"tool": family / "tool"}
    elif changed == "base config":
        models.reconfigure(family / "base", rms_norm_eps=1e-3)
    with pytest.raises(MergeInputError) as caught:
        merge(family / "base", agents, family / "out", resume=True, **options)
    for word in [*words, "another merge", "without resume"]:
        assert word in str(caught.value)
    assert models.contents(workshop(family / "out")) == kept
    if changed == "config":
        resumed_equals(family, unbroken)


def test_without_resume_an_earlier_run_is_told_about_and_removed(family, unbroken, caplog):
    die_after(family, 2)
    with caplog.at_level(logging.WARNING, "ram_trl"):
        merged(family)
    assert any("removing an unfinished merge (2 weight files)" in record.message for record in caplog.records)
    assert models.contents(family / "out") == unbroken
    assert not workshop(family / "out").exists()


def test_a_finished_file_that_was_damaged_is_made_again(family, unbroken, caplog):
    die_after(family, 2)
    name = sorted(finished(family))[0]
    path = workshop(family / "out") / "model" / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with caplog.at_level(logging.WARNING, "ram_trl"):
        merged(family, resume=True)
    assert any(name in record.message for record in caplog.records)
    assert models.contents(family / "out") == unbroken


def test_resume_with_nothing_to_resume_merges_from_the_start(family, unbroken):
    merged(family, resume=True)
    assert models.contents(family / "out") == unbroken


def test_two_merges_into_one_folder_at_once_are_refused(family):
    with (
        Unfinished(family / "out", {"a": "b"}, False),
        pytest.raises(MergeInputError, match="another process is making"),
    ):
        merged(family)
    merged(family)


def test_a_full_disk_names_the_file_and_leaves_what_resume_can_use(family, unbroken, monkeypatch, caplog):
    real, calls = os.pwrite, []

    def full(descriptor, content, offset):
        calls.append(offset)
        if len(calls) > 20:
            raise OSError(28, "No space left on device")
        return real(descriptor, content, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*model-0000\d-of-00003.safetensors'"):
            merged(family)
    assert not (family / "out").exists()
    assert any("go on with resume" in record.message for record in caplog.records)
    assert resumed_equals(family, unbroken) >= 1


def test_wrong_input_leaves_nothing_even_if_files_are_finished(family):
    models.rewrite(family / "base", lambda t: t.update({n: x.half() for n, x in t.items()}))
    models.rewrite(family / "code", lambda t: t["model.norm.weight"].fill_(7e4))
    with pytest.raises(MergeInputError, match="65504"):
        merged(family, max_shard_size="1KB", allow_mixed_dtypes=True)
    assert sorted(path.name for path in family.iterdir()) == ["base", "code", "tool"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_the_command_is_stopped_and_resumed(family, number):
    """The real program, at a moment when some files are finished."""
    merged(family, max_shard_size="1KB")
    unbroken = models.contents(family / "out")
    shutil.rmtree(family / "out")
    command = [sys.executable, "-m", "ram_trl.cli", "merge", "--base", f"{family}/base", "--out", f"{family}/out"]
    command += ["--agent", f"tool={family}/tool", "--agent", f"code={family}/code", "--top", "0.3"]
    command += ["--shard-size", "1KB", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    folder = workshop(family / "out") / "finished"
    while process.poll() is None and time.monotonic() < deadline and len(list(folder.glob("*.json"))) < 2:
        time.sleep(0.001)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == (143 if number == signal.SIGTERM else -9)
    assert not (family / "out").exists()
    assert ("go on with resume (--resume)" in told) == (number == signal.SIGTERM)
    kept = finished(family)
    assert len(kept) >= 2
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {name: _identity(family / "out" / name) for name in kept} == kept
    assert models.contents(family / "out") == unbroken
