"""The hub folder: decisions, signs of life, identity, sequence numbers, sweeping, `latest`, and disks that fail."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time

import pytest
import torch

from ram_trl.config import ContinualConfig, MergeConfig
from ram_trl.continual import heartbeat as heartbeat_module
from ram_trl.continual import hub as hub_module
from ram_trl.continual.export import Exporter, export_round
from ram_trl.continual.heartbeat import Heartbeat, Watch
from ram_trl.continual.hub import Hub, HubError
from ram_trl.continual.member import Member
from ram_trl.continual.rounds import Rounds
from ram_trl.continual.semantics import Decision, Publication
from ram_trl.files import PARTIAL, DamagedFileError, link_json, write_json
from ram_trl.team import Team
from ram_trl.weights import Span
from ram_trl.weights.block_folders import write_folder
from ram_trl.weights.live import LiveWeights
from ram_trl.weights.sparse import BlockWriter
from tests import crash
from tests.continual.test_crash import decided, one_round, play_round, three_rounds, world_in
from tests.continual.test_member import Toy, World
from tests.models import contents

IDENTITY = {
    "shapes": {"a": [3], "b": [2, 2]},
    "base": {"a": "00", "b": "11"},
    "merge": {"top": 0.2},
    "resync": "generalist",
}


@pytest.fixture
def hub(tmp_path) -> Hub:
    made = Hub(tmp_path / "hub")
    made.create_or_join(IDENTITY, {"rounded": False})
    return made


def beat(hub: Hub, agent: str, counter: int, loaded: int = 0, session: str = "s") -> None:
    hub.agent_folder(agent).mkdir(exist_ok=True)
    content = {"session": session, "counter": counter, "round": loaded, "step": 0}
    write_json(hub.agent_folder(agent) / "heartbeat.json", content)


def publish(hub: Hub, agent: str, sequence: int, base_round: int = 0) -> Publication:
    head = Publication(agent=agent, sequence=sequence, base_round=base_round, step=1)
    make(hub.publication_folder(agent, sequence), head.model_dump())
    return head


def make(folder, head: dict) -> None:
    assert write_folder(Team(), folder, head, {"a": torch.float32}, lambda w: w.add(Span("a", 0, 3), torch.ones(3)))


# ---- identity -------------------------------------------------------------------------------------------------------


def test_joining_another_run_lists_every_difference_with_both_values(hub):
    other = IDENTITY | {"shapes": {"a": [4], "c": [1]}, "merge": {"top": 0.5}, "resync": "none"}
    with pytest.raises(HubError) as error:
        hub.create_or_join(other, {"rounded": True})
    told = str(error.value)
    assert str(hub.path) in told
    for difference in (
        "shapes.a is [4] here, [3] there",
        "shapes.b is None here, [2, 2] there",
        "shapes.c is [1] here, None there",
        "merge.top is 0.5 here, 0.2 there",
        "resync is 'none' here, 'generalist' there",
    ):
        assert difference in told
    assert "base" not in told.replace(str(hub.path), "")


def test_joining_the_same_run_keeps_what_the_first_job_founded(hub):
    first = hub.described()
    assert hub.create_or_join(IDENTITY, {"rounded": True}) == first
    assert first["founding"] == {"rounded": False}


def test_a_folder_without_hub_json_is_not_a_hub(tmp_path):
    with pytest.raises(HubError, match="is not a hub"):
        Hub(tmp_path).described()


def test_another_format_is_refused(tmp_path):
    write_json(tmp_path / "hub.json", {"format": 99})
    with pytest.raises(HubError, match="format 99, expected 1"):
        Hub(tmp_path).described()


def test_a_checkpoint_of_another_run_is_refused_with_both_ids(tmp_path):
    world = world_in(tmp_path)
    world.join("tool")
    state = world.members["tool"].state()
    for changed in ({"run_id": "other"}, {"agent": "code"}):
        member = world.member("tool", Toy(world.base))
        with pytest.raises(HubError, match=r"the checkpoint is of agent .* this is agent 'tool'") as error:
            member.join(0, state.model_copy(update=changed), resume=True)
        assert next(iter(changed.values())) in str(error.value)
        assert state.run_id in str(error.value)


def test_a_name_that_was_in_the_hub_needs_resume(tmp_path):
    world = world_in(tmp_path)
    world.join("tool")
    with pytest.raises(HubError, match=r"'tool' has been in .* resume=True"):
        world.member("tool", Toy(world.base)).join(0, None, resume=False)


# ---- decisions ------------------------------------------------------------------------------------------------------


def decision(*sequences: int, number: int = 1) -> Decision:
    heads = [Publication(agent=f"a{i}", sequence=s, base_round=0, step=1) for i, s in enumerate(sequences)]
    return Decision(round=number, publications=tuple(heads))


def test_the_first_decision_wins_for_good(hub):
    assert hub.decide(decision(1, 1))
    assert not hub.decide(decision(2, 2))
    assert hub.decisions() == [decision(1, 1)]


def test_two_closers_at_once_200_times_make_one_decision(hub):
    def closer(mine: int) -> None:
        for number in range(1, 201):
            barrier.wait()
            won[mine].append(hub.decide(decision(mine + 1, number=number)))

    won: list[list[bool]] = [[], []]
    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=closer, args=(mine,)) for mine in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hub.decisions()) == 200
    for made, first, second in zip(hub.decisions(), *won, strict=True):
        assert first != second
        assert made.publications[0].sequence == (1 if first else 2)


def test_a_stalled_closer_that_wakes_late_changes_nothing(tmp_path, monkeypatch):
    """It decided what to close, slept, and two rounds went by."""
    world = world_in(tmp_path)
    one_round(world)
    decide, before = world.hub.decide, {}

    def wakes_late(stale: Decision) -> bool:
        monkeypatch.setattr(world.hub, "decide", decide)
        world.publish("tool")
        world.close("tool")
        world.load("tool")
        world.train("tool")
        world.publish("tool")
        world.close("tool")
        before.update(contents(world.hub.path))
        return decide(stale)

    monkeypatch.setattr(world.hub, "decide", wakes_late)
    assert not world.members["code"].close(late=True)
    assert contents(world.hub.path) == before
    world.load("code")
    world.check()


def test_a_state_that_is_made_again_has_the_same_bytes(tmp_path):
    world = world_in(tmp_path)
    one_round(world)
    world.hub.decide(Decision(round=2, publications=(world.hub.newest_publication("code"),)))
    world.simulator.agents["tool"].published = None
    world.simulator.close()
    world.load("code")
    first = contents(world.hub.state_folder(2))
    shutil.rmtree(world.hub.state_folder(2))
    world.load("tool")
    assert contents(world.hub.state_folder(2)) == first
    world.check()


def test_a_missing_decision_between_others_is_named(hub):
    for number in (1, 2, 3):
        hub.decide(decision(number, number=number))
    (hub.round_folder(2) / "decision.json").unlink()
    with pytest.raises(DamagedFileError, match=r"rounds: decisions of rounds \[1, 3\] are there"):
        hub.decisions()


def test_a_lost_last_decision_is_noticed_and_never_made_again_with_other_publications(tmp_path):
    """The state of that round is there already, and holds other publications."""
    world = world_in(tmp_path)
    one_round(world)
    (world.hub.round_folder(1) / "decision.json").unlink()
    member = world.members["code"]
    with pytest.raises((DamagedFileError, HubError), match="round-0001"):
        member.close(late=True)


def test_a_moved_decision_is_named(hub):
    hub.decide(decision(1))
    shutil.copytree(hub.round_folder(1), hub.round_folder(2))
    with pytest.raises(DamagedFileError, match=r"round-0002/decision\.json is of round 1"):
        hub.decisions()


# ---- signs of life --------------------------------------------------------------------------------------------------


def test_an_agent_is_dead_when_its_counter_does_not_move_on_the_observers_clock(hub, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(heartbeat_module.time, "monotonic", lambda: now[0])
    watch = Watch(hub, patience=5)
    beat(hub, "code", 1)
    beat(hub, "tool", 1)
    assert watch.alive(["code", "tool"]) == ["code", "tool"]
    now[0] += 4
    beat(hub, "tool", 2)
    assert watch.alive(["code", "tool"]) == ["code", "tool"]
    now[0] += 2
    assert watch.alive(["code", "tool"]) == ["tool"]
    beat(hub, "code", 1, session="came back")
    assert watch.alive(["code", "tool"]) == ["code", "tool"]


def test_clocks_an_hour_apart_change_nothing(tmp_path, monkeypatch):
    """Neither the wall clock nor the times of files are looked at."""
    results = []
    for name, hours in (("same", 0), ("apart", 1)):
        (tmp_path / name).mkdir()
        world = world_in(tmp_path / name)
        with monkeypatch.context() as patched:
            real = time.time
            one_round(world)
            patched.setattr(time, "time", lambda real=real, hours=hours: real() + hours * 3600)
            for path in world.hub.path.rglob("*"):
                os.utime(path, (real() - hours * 3600, real() - hours * 3600))
            assert set(Watch(world.hub, 5).alive(world.hub.agents())) == {"code", "tool"}
            world.publish("tool")
            world.close("tool")
            world.load("tool")
            world.load("code")
            world.check()
            world.hub.sweep(1, ["code", "tool"])
        made = crash.made_things(world.hub.path)
        results.append(made)
    assert results[0] == results[1]


def test_a_second_live_process_of_an_agent_is_refused_by_name(hub):
    first = Heartbeat(hub, "tool", every=0.005)
    first.start()
    try:
        with pytest.raises(HubError, match="'tool' is already running"):
            Heartbeat(hub, "tool", every=0.1).start()
    finally:
        first.close()


def test_a_dead_process_of_the_same_agent_is_replaced(hub):
    beat(hub, "tool", 7)
    second = Heartbeat(hub, "tool", every=0.005)
    second.start()
    second.close()
    second.check()
    assert hub.heartbeat("tool")["session"] != "s"


def test_a_restarted_process_whose_counter_is_the_same_by_chance_is_alive(hub, monkeypatch):
    """The old process left its first heartbeat; another new one writes its own first while this one looks."""
    beat(hub, "tool", 1, session="dead")
    monkeypatch.setattr(heartbeat_module.time, "sleep", lambda seconds: beat(hub, "tool", 1, session="alive"))
    with pytest.raises(HubError, match="'tool' is already running"):
        Heartbeat(hub, "tool", every=30).start()


def test_a_process_whose_name_was_taken_over_stops(hub):
    first = Heartbeat(hub, "tool", every=30)
    first.beat()
    Heartbeat(hub, "tool", every=30).beat()
    first.beat()
    with pytest.raises(HubError, match="a second process of agent 'tool'"):
        first.check()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"content": {}, "crc32": 1}'])
def test_a_damaged_heartbeat_is_harmless(hub, content):
    beat(hub, "tool", 3, loaded=2)
    (hub.agent_folder("tool") / "heartbeat.json").write_bytes(content)
    assert hub.heartbeat("tool") is None
    assert hub.agents() == ["tool"]
    assert Watch(hub, 5).alive(["tool"]) == ["tool"]
    hub.sweep(1, ["tool"])
    own = Heartbeat(hub, "tool", every=30)
    own.beat()
    assert hub.heartbeat("tool")["counter"] == 1


def test_another_file_in_place_of_a_heartbeat_is_harmless(hub):
    beat(hub, "tool", 3)
    hub.finish("tool", 5)
    os.replace(hub.agent_folder("tool") / "done.json", hub.agent_folder("tool") / "heartbeat.json")
    assert Watch(hub, 5).alive(["tool"]) == ["tool"]
    hub.sweep(1, ["tool"])
    Heartbeat(hub, "tool", every=30).beat()
    assert hub.heartbeat("tool")["counter"] == 1


@pytest.mark.parametrize(("module", "failing"), [(hub_module, "read_json"), (heartbeat_module, "write_json")])
def test_a_heartbeat_outlives_a_hub_that_is_gone_for_a_while(hub, monkeypatch, module, failing):
    own = Heartbeat(hub, "tool", every=30)
    own.beat()

    def gone(*args, **kwargs):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(module, failing, gone)
        own.beat()
    own.beat()
    assert hub.heartbeat("tool")["counter"] >= 2


# ---- sequence numbers -----------------------------------------------------------------------------------------------


def test_sequence_numbers_are_never_used_again(hub):
    beat(hub, "a0", 1)
    assert hub.next_sequence("a0") == 1
    publish(hub, "a0", 1)
    publish(hub, "a0", 2)
    assert hub.next_sequence("a0") == 3
    hub.decide(decision(2))
    for number in (1, 2):
        shutil.rmtree(hub.publication_folder("a0", number))
    assert hub.next_sequence("a0") == 3
    (hub.agent_folder("a0") / f".publication-000009{PARTIAL}1-ab").mkdir()
    assert hub.next_sequence("a0") == 3


# ---- sweeping -------------------------------------------------------------------------------------------------------


def numbers(hub: Hub) -> dict[str, list[int]]:
    """What is there of everything that a sweep may remove."""
    found = {
        kind: sorted(int(p.name[-4:]) for p in (hub.path / kind).glob("round-*")) for kind in ("state", "generalist")
    }
    for agent in hub.agents():
        found[agent] = sorted(int(p.name[-6:]) for p in hub.agent_folder(agent).glob("publication-*"))
    return found


@pytest.fixture
def five_rounds(hub) -> Hub:
    """`a0` and `a1`, five rounds, both published for each of them and again; round 5 exported."""
    for agent in ("a0", "a1"):
        beat(hub, agent, 1, loaded=5)
    for number in range(6):
        make(hub.state_folder(number), {"round": number})
        if number:
            make(hub.generalist_folder(number), {})
        heads = tuple(publish(hub, agent, number + 1, base_round=number) for agent in ("a0", "a1"))
        if number < 5:
            hub.decide(Decision(round=number + 1, publications=heads))
    hub.point_latest(5)
    return hub


def test_sweep_keeps_the_base_the_last_rounds_and_the_newest_publications(five_rounds):
    five_rounds.sweep(2, ["a0", "a1"])
    assert numbers(five_rounds) == {"state": [0, 4, 5], "generalist": [4, 5], "a0": [6], "a1": [6]}
    assert five_rounds.latest() == 5
    assert len(five_rounds.decisions()) == 5


def test_sweep_keeps_the_state_a_living_agent_has_loaded_and_what_it_has_to_load_past(five_rounds):
    beat(five_rounds, "a1", 2, loaded=2)
    five_rounds.sweep(1, ["a0", "a1"])
    assert numbers(five_rounds)["state"] == [0, 2, 3, 4, 5]
    assert numbers(five_rounds)["a1"] == [3, 4, 5, 6]  # of rounds 3, 4, 5, and the newest


def test_sweep_does_not_wait_for_the_dead(five_rounds):
    beat(five_rounds, "a1", 2, loaded=2)
    five_rounds.sweep(1, ["a0"])
    assert numbers(five_rounds) == {"state": [0, 5], "generalist": [5], "a0": [6], "a1": [6]}


def test_sweep_keeps_the_state_that_a_publication_still_to_be_merged_is_measured_against(five_rounds):
    beat(five_rounds, "a2", 1, loaded=3)
    publish(five_rounds, "a2", 1, base_round=3)
    five_rounds.sweep(1, ["a0"])
    assert numbers(five_rounds)["state"] == [0, 3, 4, 5]


def test_a_publication_that_was_merged_keeps_no_state(five_rounds):
    """The newest one of an agent that is dead or done; states are as large as the model in fp32."""
    shutil.rmtree(five_rounds.publication_folder("a1", 6))
    for number in (3, 4, 5):
        shutil.rmtree(five_rounds.publication_folder("a1", number))
    five_rounds.sweep(1, ["a0"])
    assert numbers(five_rounds)["state"] == [0, 5]


def test_sweep_removes_states_in_observe_mode(tmp_path):
    """There every publication is measured against the base, which is kept anyway."""
    world = World(tmp_path, "top", carry=True, observe=True)
    for agent in ("code", "tool"):
        world.join(agent)
    for _ in range(4):
        for agent in ("code", "tool"):
            world.train(agent)
            world.publish(agent)
        world.close("tool")
    for agent in ("code", "tool"):
        beat(world.hub, agent, 99, loaded=4)
    world.hub.sweep(1, ["code", "tool"])
    assert numbers(world.hub)["state"] == [0, 4]


def test_sweep_keeps_what_a_round_whose_state_is_not_made_needs(five_rounds):
    shutil.rmtree(five_rounds.state_folder(5))
    five_rounds.sweep(2, ["a0"])
    assert numbers(five_rounds) == {"state": [0, 4], "generalist": [4, 5], "a0": [5, 6], "a1": [5, 6]}


def test_sweep_keeps_the_export_that_latest_names(five_rounds):
    write_json(five_rounds.path / "generalist" / "latest.json", {"round": 2, "folder": "round-0002"})
    five_rounds.sweep(1, ["a0", "a1"])
    assert numbers(five_rounds)["generalist"] == [2, 5]


def test_sweep_goes_on_when_a_newest_publication_is_damaged(five_rounds):
    """Rounds go on without it, so sweeping, which ends every round, has to."""
    path = five_rounds.publication_folder("a1", 6) / "manifest.json"
    path.write_bytes(path.read_bytes()[:-9])
    five_rounds.sweep(1, ["a0", "a1"])
    assert numbers(five_rounds)["a0"] == [6]
    assert numbers(five_rounds)["a1"] == [6]


def test_sweep_goes_on_when_latest_is_damaged(five_rounds):
    (five_rounds.path / "generalist" / "latest.json").write_bytes(b"{")
    five_rounds.sweep(1, ["a0", "a1"])
    assert 5 in numbers(five_rounds)["generalist"]


def test_sweep_removes_what_killed_processes_left_of_old_rounds(five_rounds):
    left = [
        five_rounds.path / kind / f".round-000{n}.partial-1-ab" for kind in ("state", "generalist") for n in (3, 5)
    ]
    for folder in left:
        folder.mkdir()
    five_rounds.sweep(2, ["a0", "a1"])
    assert [folder.exists() for folder in left] == [False, True, False, True]  # round 5 may be in the making


def test_an_agent_that_comes_back_removes_what_it_left_half_made(tmp_path):
    world = world_in(tmp_path)
    one_round(world)
    half = world.hub.agent_folder("tool") / ".publication-000002.partial-1-ab"
    half.mkdir()
    (half / "rank-00000-of-00001.safetensors").write_bytes(b"half")
    of_another = world.hub.agent_folder("code") / half.name
    of_another.mkdir()
    world.restart("tool")
    assert not half.exists()
    assert of_another.exists()  # its process may be alive
    assert world.hub.next_sequence("tool") == 2


def test_sweep_in_the_real_life_of_agents_leaves_the_run_able_to_go_on(tmp_path):
    world = world_in(tmp_path)
    three_rounds(world)
    for _ in range(3):
        world.hub.sweep(1, ["tool", "code"])
        play_round(world)
    world.hub.sweep(1, [])
    for agent in ("tool", "code"):
        world.restart(agent)  # from a checkpoint of round 1, whose state is gone
        assert world.members[agent].round == 6


def test_an_agent_that_stalled_until_its_state_was_swept_goes_on(tmp_path):
    """It was taken for dead; it loads the newest state, and its next publication succeeds."""
    world = world_in(tmp_path)
    one_round(world)
    for _ in range(3):
        world.train("tool")
        world.publish("tool")
        world.close("tool")
        world.load("tool")
    for kept in (1, 2, 3):
        shutil.rmtree(world.hub.state_folder(kept))
    member = world.members["code"]
    member._config = world.config.model_copy(update={"on_hub_error": "skip", "wait": "available"})
    mets = [member.meet(step) for step in (9, 10)]
    assert mets[-1].published
    assert member.round == len(world.hub.decisions())


@pytest.mark.parametrize("dies", [False, True])
def test_a_state_that_takes_long_is_waited_for_as_long_as_it_grows(tmp_path, monkeypatch, dies):
    """Patience is for a job that died in the middle; then, and only then, another makes the state in its place."""
    world = world_in(tmp_path)
    decided(world)
    for member in world.members.values():
        member._config = world.config.model_copy(update={"patience": 2.5})
    real_add, real_make, makers = BlockWriter.add, Rounds.make_state, []

    def add(self, *args, **kwargs):
        if threading.current_thread() is slow:
            if dies:
                wake.wait()
            time.sleep(1)
        return real_add(self, *args, **kwargs)

    def make_state(self, *args, **kwargs):
        makers.append(threading.current_thread())
        return real_make(self, *args, **kwargs)

    monkeypatch.setattr(BlockWriter, "add", add)
    monkeypatch.setattr(Rounds, "make_state", make_state)
    wake = threading.Event()
    slow = threading.Thread(target=lambda: world.members["tool"].load(world.hub.decisions()))
    world.members["tool"]._config = world.config  # no patience at all: it makes the state
    slow.start()
    while not makers:
        time.sleep(0.01)
    time.sleep(0.1)
    world.members["code"].load(world.hub.decisions())
    wake.set()
    slow.join()
    assert makers == ([slow, threading.current_thread()] if dies else [slow])
    world.simulator.load("code")
    world.simulator.load("tool")
    world.check()


# ---- latest ---------------------------------------------------------------------------------------------------------


def test_latest_never_moves_backwards(hub):
    assert hub.latest() is None
    for number, expected in ((2, 2), (1, 2), (3, 3), (2, 3)):
        hub.point_latest(number)
        assert hub.latest() == expected


def test_latest_does_not_move_backwards_when_two_exporters_finish_at_once(hub, monkeypatch):
    """One has looked and not yet written when the other, of a newer round, does both."""
    for number in (1, 2, 3):
        make(hub.generalist_folder(number), {})
    hub.point_latest(1)
    real = hub_module.write_json

    def overtaken(*args, **kwargs):
        monkeypatch.setattr(hub_module, "write_json", real)
        Hub(hub.path).point_latest(3)
        real(*args, **kwargs)

    monkeypatch.setattr(hub_module, "write_json", overtaken)
    hub.point_latest(2)
    assert hub.latest() == 3


def test_agents_of_one_process_share_an_exporter(tmp_path):
    """It lives until the last of them leaves, and what was queued is there then."""
    world = world_in(tmp_path)
    three_rounds(world)
    for number in (1, 2, 3):
        shutil.rmtree(world.hub.generalist_folder(number))
    (world.hub.path / "generalist" / "latest.json").unlink()
    tool, code = (Exporter.shared_by(agent, world.hub.path, world.folder) for agent in ("tool", "code"))
    assert tool is code
    assert Exporter.shared_by("tool", tmp_path / "other", world.folder) is not tool
    tool.start(2)
    tool.leave("tool")
    code.start(3)
    code.leave("code")
    assert world.hub.latest() == 3
    card = (world.hub.generalist_folder(3) / "README.md").read_text()
    assert "publication 3, of step" in card


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"content": {"round": 9}, "crc32": 1}'])
def test_a_damaged_latest_is_named_and_replaced_by_the_next_export(tmp_path, content):
    world = world_in(tmp_path)
    one_round(world)
    path = world.hub.path / "generalist" / "latest.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"latest\.json"):
        world.hub.latest()
    export_round(world.hub, 1, world.folder)
    assert world.hub.latest() == 1
    crash.check_latest(world.hub, world.folder)


# ---- disks that fail ------------------------------------------------------------------------------------------------


def alone(world: World, on_hub_error: str) -> tuple[Member, Toy]:
    """`tool` in its round 1, by itself, meeting for real."""
    world.config = ContinualConfig(
        merge_every=1,
        merge=MergeConfig(top=0.25),
        heartbeat=0.005,
        patience=0.05,
        timeout=0.2,
        on_hub_error=on_hub_error,
    )
    model = Toy(world.base)
    member = world.member("tool", model)
    member.join(0, None, resume=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[0] += 0.5
    return member, model


@pytest.mark.parametrize("call", ["write", "pwrite", "fsync", "rename", "mkdir"])
def test_a_full_disk_during_publish_does_not_stop_training(tmp_path, monkeypatch, call):
    world = world_in(tmp_path)
    member, model = alone(world, "skip")
    before = [p.detach().clone() for p in model.parameters()]
    real = getattr(os, call)

    def full(*args, **kwargs):
        if threading.current_thread() is threading.main_thread():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        met = member.meet(1)
    assert not met.published
    assert met.round is None
    assert member.round == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    left = [path.name for path in world.hub.path.rglob("*") if PARTIAL in path.name and "heartbeat" not in path.name]
    assert left == []
    assert world.hub.newest_publication("tool") is None

    met = member.meet(2)
    member.leave()
    assert met.published
    assert met.round == 1
    assert world.hub.newest_publication("tool").sequence == 1
    crash.replay(world.hub, world.base)


def test_a_full_disk_raises_if_asked_to(tmp_path, monkeypatch):
    world = world_in(tmp_path)
    member, _ = alone(world, "raise")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            member.meet(1)
    member.leave()


def test_a_full_disk_while_the_state_is_made_is_made_up_for_at_the_next_meeting(tmp_path, monkeypatch):
    world = world_in(tmp_path)
    member, _ = alone(world, "skip")
    real, count = os.pwrite, []

    def full(*args, **kwargs):
        count.append(1)
        if len(count) == 1:  # the publication's header
            return real(*args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        met = member.meet(1)
    assert met.published
    assert len(world.hub.decisions()) == 1
    assert not world.hub.state_folder(1).exists()
    met = member.meet(2)
    member.leave()
    assert met.published
    crash.replay(world.hub, world.base)
    assert member.round == len(world.hub.decisions())


def test_a_failed_link_leaves_nothing(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(HubError, match="hard link"):
        Hub(tmp_path / "hub").create_or_join(IDENTITY, {})
    with pytest.raises(OSError, match="not permitted"):
        link_json(tmp_path / "x.json", {})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_member_that_cannot_beat_goes_on(tmp_path, monkeypatch):
    """The end of a meeting tells the others where it is; a hub that is gone by then does not stop training."""
    world = world_in(tmp_path)
    member, _ = alone(world, "skip")
    member.leave()

    def gone(*args, **kwargs):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(hub_module, "read_json", gone)
        patched.setattr(os, "write", gone)
        assert not member.meet(1).published
    assert Member(world.hub, "x", world.folder, LiveWeights(Toy(world.base), Team()), world.config).round == 0
    assert member.meet(2).published
