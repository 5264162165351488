"""Clients' private tensors: versions, what a repeated round sees, and when they are on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedfa import Run
from fedfa.files import write_tensors
from fedfa.memory import ROOM, Memory, room_on


def value(number: float) -> dict[str, Tensor]:
    return {"v": torch.tensor([number])}


def number(memory: Memory, client: str, round: int) -> float | None:
    tensors = memory.load(client, round)
    return tensors["v"].item() if tensors else None


def versions(folder: Path, client: str = "a") -> list[int]:
    return sorted(int(file.stem) for file in (folder / client).glob("*.safetensors"))


def test_a_client_that_never_saved_has_none(tmp_path: Path) -> None:
    assert Memory(tmp_path / "memory").load("a", 5) == {}
    assert not (tmp_path / "memory").exists()


def test_nothing_to_remember_leaves_no_file(tmp_path: Path) -> None:
    Memory(tmp_path).save("a", 1, {})
    assert list(tmp_path.iterdir()) == []


def test_memory_can_become_empty(tmp_path: Path) -> None:
    memory = Memory(tmp_path, room=0)
    memory.save("a", 1, value(1))
    memory.save("a", 2, {})
    assert memory.load("a", 2) == {} and number(memory, "a", 1) == 1


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    memory = Memory(tmp_path, room=0)
    tensors = {
        "float": torch.randn(3, 4),
        "double": torch.randn(2, dtype=torch.float64),
        "counter": torch.tensor(7),
        "odd/name with spaces.γ": torch.tensor([float("inf"), -0.0]),
        "not contiguous": torch.randn(3, 5).t(),
    }
    memory.save("a", 1, tensors)
    found = Memory(tmp_path).load("a", 1)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def test_load_gives_the_newest_version_up_to_the_round(tmp_path: Path) -> None:
    memory = Memory(tmp_path, room=0)
    memory.restarts = range(20)
    for round in (2, 5, 11):
        memory.save("a", round, value(round))
    assert [number(memory, "a", round) for round in (1, 2, 4, 5, 10, 11, 99)] == [None, 2, 2, 5, 5, 11, 11]
    assert versions(tmp_path) == [2, 5, 11]


def test_kept_are_this_round_s_the_one_before_and_those_of_the_checkpoints(tmp_path: Path) -> None:
    memory = Memory(tmp_path, room=0)
    seen = []
    for round in range(1, 8):
        memory.restarts = {1: [], 2: [], 3: [2], 4: [2], 5: [2, 4], 6: [2, 4], 7: [4, 6]}[round]
        memory.save("a", round, value(round))
        seen.append(versions(tmp_path))
    assert seen == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 4, 5, 6], [4, 6, 7]]


def test_a_client_that_is_seldom_sampled_keeps_what_a_restart_needs(tmp_path: Path) -> None:
    memory = Memory(tmp_path, room=0)
    memory.save("a", 3, value(3))
    memory.restarts = [10]
    memory.save("a", 12, value(12))
    assert versions(tmp_path) == [3, 12] and number(memory, "a", 10) == 3
    memory.restarts = [20]
    memory.save("a", 25, value(25))
    assert versions(tmp_path) == [12, 25] and number(memory, "a", 20) == 12


def test_a_repeated_round_starts_from_the_state_before_it(tmp_path: Path) -> None:
    memory = Memory(tmp_path, room=0)
    memory.save("a", 1, value(1))
    for attempt in (20, 21):
        assert number(memory, "a", 1) == 1
        memory.save("a", 2, value(attempt))
    assert number(memory, "a", 2) == 21 and versions(tmp_path) == [1, 2]


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_rounds_that_did_not_count_are_forgotten(tmp_path: Path, room: int) -> None:
    memory = Memory(tmp_path, room)
    memory.restarts = range(9)
    for round in (1, 2, 3):
        memory.save("a", round, value(round))
    memory.save("b/c", 3, value(3))
    memory.forget_after(2)
    assert [number(memory, "a", round) for round in (1, 2, 9)] == [1, 2, 2]
    assert memory.load("b/c", 9) == {}
    memory.sync()
    assert versions(tmp_path) == [1, 2]
    memory.forget_after(0)
    assert memory.load("a", 9) == {}


def test_other_files_do_no_harm(tmp_path: Path) -> None:
    memory = Memory(tmp_path, room=0)
    memory.save("a", 1, value(1))
    for name in ("._1.safetensors", "notes.safetensors", ".2.safetensors.99.part", "readme.txt"):
        (tmp_path / "a" / name).write_text("not ours")
    (tmp_path / ".DS_Store").write_text("not ours")
    memory.forget_after(0)
    memory.save("a", 2, value(2))
    assert number(memory, "a", 9) == 2


NAMES = [
    "plain",
    "a/b",
    "a%2Fb",
    "..",
    ".",
    "../../up",
    "Zürich",
    "病院",
    "with space",
    "*?[x]",
    "C:\\x",
    "-o",
    "~",
    "a.b",
]


def test_any_name_is_a_client_of_its_own_inside_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "memory"
    memory = Memory(folder, room=0)
    for index, name in enumerate(NAMES):
        memory.save(name, 1, value(index))
    assert [number(memory, name, 1) for name in NAMES] == list(range(len(NAMES)))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["memory"]
    assert len(list(folder.iterdir())) == len(NAMES) and all(path.is_dir() for path in folder.iterdir())
    memory.forget_after(0)
    assert [number(memory, name, 1) for name in NAMES] == [None] * len(NAMES)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_while_writing_leaves_the_old_version_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    memory = Memory(tmp_path, room=0)
    memory.save("a", 1, value(1))
    rename = __import__("os").replace

    def crash(source: Path, target: Path) -> None:
        if moment == "after":
            rename(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedfa.files.os.replace", crash)
        with pytest.raises(KeyboardInterrupt):
            memory.save("a", 2, value(2))
    after = Memory(tmp_path)
    assert number(after, "a", 1) == 1
    assert number(after, "a", 2) == (2 if moment == "after" else 1)


def test_what_is_synced_is_what_is_still_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a checkpoint every version that a restart could need is made durable, once; until then there is no file:
    most versions never need one."""
    waited: list[Path] = []
    monkeypatch.setattr("fedfa.memory.make_durable", waited.append)
    memory = Memory(tmp_path)
    for round in (1, 2, 3):
        memory.save("a", round, value(round))
    memory.save("b", 2, value(1))
    assert not waited and not list(tmp_path.iterdir())
    memory.sync()
    assert sorted(waited) == [
        tmp_path / "a" / "2.safetensors",
        tmp_path / "a" / "3.safetensors",
        tmp_path / "b" / "2.safetensors",
    ]
    memory.sync()
    assert len(waited) == 3


def test_what_is_more_than_there_is_room_for_goes_to_the_disk(tmp_path: Path) -> None:
    memory = Memory(tmp_path, room=3 * 8)  # three versions
    for client in "abc":
        memory.save(client, 1, value(1))
    memory.save("a", 1, value(7))  # takes the other's place
    assert not list(tmp_path.iterdir())
    memory.save("d", 1, value(1))
    assert [versions(tmp_path, client) for client in "abcd"] == [[1]] * 4
    memory.save("a", 2, value(2))
    assert versions(tmp_path, "a") == [1] and [number(memory, "a", round) for round in (1, 2)] == [7, 2]


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_what_others_do_with_their_tensors_later_changes_nothing(tmp_path: Path, room: int) -> None:
    memory, tensors = Memory(tmp_path, room), value(1)
    memory.save("a", 1, tensors)
    tensors["v"] += 1
    memory.load("a", 1)["v"] += 1
    assert number(memory, "a", 1) == 1


CLIENTS = st.sampled_from("ab")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("round"), st.sets(CLIENTS)),  # some clients save
        st.tuples(st.just("broken off"), st.sets(CLIENTS)),  # and the round does not count: it is played again
        st.just(("checkpoint", frozenset())),
        st.just(("crash", frozenset())),
    ),
    max_size=25,
)


@settings(deadline=None)  # of the disk
@given(STEPS, st.sampled_from([0, 8, 20, 1 << 20]))
def test_whatever_happens_a_round_starts_from_what_was_before_it(
    steps: list[tuple[str, frozenset[str]]], room: int
) -> None:
    """Against lists of what was saved: after a crash, everything is as it was at the last checkpoint."""
    with TemporaryDirectory() as folder:
        memory = Memory(Path(folder), room)
        round, checkpoints, saved = 0, [0], dict[str, dict[int, float]](a={}, b={})
        for number_of_step, (what, clients) in enumerate(steps):
            if what == "checkpoint":
                memory.sync()
                checkpoints = sorted({*checkpoints, round})[-2:]
                memory.restarts = checkpoints
            elif what == "crash":
                memory, round = Memory(Path(folder), room), checkpoints[-1]
                memory.restarts = checkpoints
                memory.forget_after(round)
                saved = {client: {r: v for r, v in own.items() if r <= round} for client, own in saved.items()}
            for client in clients:
                memory.save(client, round + 1, value(number_of_step))
                saved[client][round + 1] = number_of_step
            round += what == "round"
            for client, own in saved.items():
                before = [version for version in own if version <= round]
                assert number(memory, client, round) == (own[max(before)] if before else None)


def test_what_waits_may_be_a_part_of_the_machine_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path("/proc/meminfo")
    if not listed.exists():
        pytest.skip("Linux lists its memory in /proc/meminfo, other systems do not")
    kilobytes = int(listed.read_text().splitlines()[0].split()[1])
    monkeypatch.setattr("fedfa.memory.OURS", Path("/nowhere"))  # it may run in a container that has less
    assert room_on(torch.device("cpu")) == max(ROOM, 1024 * kilobytes // 32)
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}.__getitem__)
    assert room_on(torch.device("cpu")) == ROOM, "a small machine has what there was"


@pytest.mark.parametrize(
    ("ours", "file"),
    [
        ("0::/job/step\n", "job/memory.max"),  # a cluster's job
        ("0::/\n", "memory.max"),  # a container with a view of its own
        ("0::/not/seen/from/here\n", "memory.max"),
        ("4:cpu:/x\n3:memory,hugetlb:/job\n0::/y\n", "memory/job/memory.limit_in_bytes"),  # the first version
    ],
)
def test_a_containers_or_jobs_memory_is_what_counts(
    ours: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 27}.__getitem__)  # 512 GiB
    monkeypatch.setattr("fedfa.memory.OURS", tmp_path / "ours")
    monkeypatch.setattr("fedfa.memory.GROUPS", tmp_path / "groups")
    assert room_on(torch.device("cpu")) == 16 << 30
    (tmp_path / "ours").write_text(ours)
    (tmp_path / "groups" / file).parent.mkdir(parents=True)
    (tmp_path / "groups" / file).write_text("max\n")
    assert room_on(torch.device("cpu")) == 16 << 30
    (tmp_path / "groups" / file).write_text(f"{64 << 30}\n")
    assert room_on(torch.device("cpu")) == 2 << 30


@pytest.mark.parametrize(("room", "wanted"), [(1 << 20, {3, 4}), (0, {1, 2, 3, 4})])
def test_between_checkpoints_nothing_is_written_that_has_room(
    room: int, wanted: set[int], play: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: set[int] = set()

    def seen(path: Path, tensors: dict[str, Tensor], durable: bool) -> None:
        written.add(int(path.stem))
        write_tensors(path, tensors, durable)

    monkeypatch.setattr("fedfa.memory.write_tensors", seen)
    monkeypatch.setattr("fedfa.simulate.room_on", lambda device: room)
    play(rounds=4, optimizer="adam", optimizer_state="kept", checkpoint_every=4)
    assert written == wanted
