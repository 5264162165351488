"""What a run writes down for reports: its federation in numbers, and how its algorithm's statistics moved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfa import ClientIndex, Federation, Run
from fedfa.data.profile import BINS, profile
from fedfa.server import Watcher
from fedfa.simulate import is_traced, resume

Play = Callable[..., Run]


def by_hand(task: Any = "classification") -> Federation:
    """Two clients: one with black and white images, one with images of one grey."""
    images = torch.zeros(6, 1, 2, 2, dtype=torch.uint8)
    images[:3, :, 0] = 255
    images[3:] = 51
    labels = torch.tensor([0, 0, 1, 1, 1, 0])
    if task == "segmentation":
        labels = torch.zeros(6, 2, 2, dtype=torch.uint8)
        labels[:3, 0, 0] = 1
    index = torch.arange(6)
    clients = {"a": ClientIndex(index[:2], index[2:3], index[:0]), "b": ClientIndex(index[3:5], index[5:], index[:0])}
    return Federation("hand", task, images, labels, ("x", "y"), clients)


def test_a_profile_by_hand() -> None:
    found = profile(by_hand())
    assert (found["name"], found["task"], found["classes"]) == ("hand", "classification", ["x", "y"])
    assert (found["image"], found["channels"], found["population"]) == ([1, 2, 2], ["grey"], 2)
    one, other = found["clients"]["a"], found["clients"]["b"]
    assert one["samples"] == [2, 1, 0] and other["samples"] == [2, 1, 0]
    assert one["labels"] == {"train": [2, 0], "val": [0, 1], "test": [0, 0]}
    assert other["labels"] == {"train": [0, 2], "val": [1, 0], "test": [0, 0]}
    assert one["mean"] == {"mean": [0.5], "sd": [0.0]} and one["std"] == {"mean": [0.5], "sd": [0.0]}
    assert other["mean"] == {"mean": [0.2], "sd": [0.0]} and other["std"] == {"mean": [0.0], "sd": [0.0]}
    wanted = [0.0] * BINS
    wanted[0] = wanted[-1] = 0.5
    assert one["histogram"] == [wanted]
    assert other["histogram"][0][51 // 8] == 1.0
    assert found["apart"] == ["a", "b"] and found["distances"][0][0] == 0 < found["distances"][0][1]
    json.dumps(found, allow_nan=False)


def test_a_profile_of_masks_is_of_areas() -> None:
    found = profile(by_hand("segmentation"))["clients"]
    assert found["a"]["labels"] == {"train": [0.75, 0.25], "val": [0.75, 0.25], "test": [0.0, 0.0]}
    assert found["b"]["labels"]["train"] == [1.0, 0.0]


def test_a_profile_of_large_images_is_of_some_of_their_pixels() -> None:
    shown = torch.arange(256, dtype=torch.uint8).expand(4, 3, 256, 256).contiguous()
    index = torch.arange(4)
    clients = {"a": ClientIndex(index[:2], index[2:3], index[3:])}
    masks = (shown[:, 0] > 127).to(torch.uint8)
    federation = Federation("large", "segmentation", shown, masks, ("x", "y"), clients)
    found = profile(federation)
    assert found["image"] == [3, 256, 256]
    assert found["clients"]["a"]["mean"]["mean"][0] == pytest.approx(0.5, abs=0.01)
    assert found["clients"]["a"]["labels"]["train"] == [0.5, 0.5]


def test_a_profile_of_a_client_without_images() -> None:
    nothing = torch.arange(0)
    federation = by_hand()
    federation = replace(federation, clients={**federation.clients, "c": ClientIndex(nothing, nothing, nothing)})
    found = profile(federation)["clients"]["c"]
    assert found["mean"] == {"mean": [None], "sd": [None]} and sum(found["histogram"][0]) == 0
    json.dumps(found, allow_nan=False)


def test_a_profile_stays_small_where_there_are_many_clients() -> None:
    index = torch.arange(6)
    clients = {f"site{n:04d}": ClientIndex(index[: n % 6 + 1], index[:1], index[:1]) for n in range(1000)}
    found = profile(replace(by_hand(), clients=clients))
    assert found["population"] == 1000 and len(found["clients"]) == 200
    assert len(json.dumps(found)) < 200_000


def test_a_run_keeps_its_federation_s_profile(play: Play) -> None:
    run = play(rounds=1)
    found = run.profile
    assert found is not None and list(found["clients"]) == ["north", "south", "west"]
    assert found["clients"]["north"]["labels"]["train"] == [5, 5, 4]
    assert found["clients"]["north"]["mean"]["mean"][0] < found["clients"]["west"]["mean"]["mean"][0]  # its tint
    (run.folder / "federation.json").write_text("{")
    assert run.profile is None


@pytest.mark.parametrize(
    ("rounds", "wanted"), [(1, [1]), (3, [1, 2, 3]), (50, list(range(1, 51))), (101, [1, *range(3, 100, 3), 101])]
)
def test_traces_are_kept_after_some_fifty_rounds(rounds: int, wanted: list[int]) -> None:
    assert [round for round in range(1, rounds + 1) if is_traced(round, rounds)] == wanted


def test_traces_are_gamma_and_the_running_statistics(play: Play) -> None:
    run = play(algorithm="fedfa", **{"algorithm.p": 1.0})
    traces = dict(run.traces())
    assert list(traces) == [1, 2, 3]
    latest = run.latest()
    assert latest is not None
    server = latest[0]
    assert traces[3].keys() == {f"augments.0.{name}" for name in ("gamma_mean", "gamma_std", "mean", "std")}
    assert all(torch.equal(traces[3][name], tensor) for name, tensor in {**server.memory, **server.centres}.items())
    assert not torch.equal(traces[1]["augments.0.gamma_mean"], traces[3]["augments.0.gamma_mean"])


@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa-c", "fedfa-r", "scaffold"])
def test_where_nothing_is_shared_there_are_no_traces(play: Play, algorithm: str) -> None:
    assert not (play(algorithm=algorithm, rounds=1).folder / "traces").exists()


def test_statistics_as_released_are_traced_too(play: Play) -> None:
    run = play(algorithm="fedfa", rounds=1, **{"algorithm.statistics": "released"})
    assert [list(tensors) for _, tensors in run.traces()] == [["augments.0.mean", "augments.0.std"]]


class Stop(Watcher):
    def round_started(self, round: int, clients: Any) -> None:
        if round == 4:
            raise RuntimeError


def test_traces_resume(play: Play) -> None:
    settings = {"algorithm": "fedfa", "rounds": 5, "checkpoint_every": 2}
    whole = play("whole", **settings)
    with pytest.raises(RuntimeError):
        play("cut", watcher=Stop(), **settings)
    (folder,) = (whole.folder.parents[1] / "cut").iterdir()
    cut = Run(folder)
    assert [round for round, _ in cut.traces()] == [1, 2, 3]
    cut.truncate(2)  # as resuming does: the checkpoint is of round 2
    assert [round for round, _ in cut.traces()] == [1, 2]
    resumed, wanted = dict(resume(folder).traces()), dict(whole.traces())
    assert resumed.keys() == wanted.keys() == {1, 2, 3, 4, 5}
    for round, tensors in wanted.items():
        assert all(torch.equal(tensor, resumed[round][name]) for name, tensor in tensors.items())


def test_a_damaged_trace_is_passed_over(play: Play) -> None:
    run = play(algorithm="fedfa")
    path: Path = run.folder / "traces" / "round-00002.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    assert [round for round, _ in run.traces()] == [1, 3]
