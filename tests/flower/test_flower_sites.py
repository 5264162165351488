"""A site: its private state, its rounds, what it refuses, and its log of what left it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from hospitals import Quiet, federate, grid_of, node, settings

import fedfa
from fedfa import Run
from fedfa.errors import UserError
from fedfa.flower import server_app
from fedfa.flower.parcel import Malformed, Parcel
from fedfa.flower.settings import Settings, SiteSettings
from fedfa.flower.site import Site
from fedfa.flower.wire import Reply, RequestHead, broadcast_blob, pack
from fedfa.simulate import Parts


class Killed(BaseException):
    """What stands for kill -9: nothing of the server runs after it."""


class Fragile(Quiet):
    """A server that dies at a moment of a test's choice."""

    def __init__(self, round: int, when: str) -> None:
        super().__init__()
        self._moment = (round, when)

    def client_done(self, client: str, loss: Any, refused: str | None) -> None:
        super().client_done(client, loss, refused)
        if self._moment == (self._status["round"], client):
            raise Killed

    def round_done(self, record: Any) -> None:
        super().round_done(record)
        if self._moment == (record.round, "end"):
            raise Killed


@pytest.mark.parametrize(
    ("algorithm", "moment"),
    [
        ("hoard", (1, "south")),
        ("fedbn", (2, "north")),
        ("scaffold", (2, "west")),
        ("fedmix", (1, "west")),
        ("hoard", (2, "end")),
    ],
)
def test_a_server_that_was_killed_goes_on_to_the_same_numbers(
    algorithm: str,
    moment: tuple[int, str],
    tiny: dict[str, Any],
    tmp_path: Path,
    assert_same: Callable[[Run, Run], None],
) -> None:
    experiment = {**tiny, "algorithm": algorithm, "rounds": 3, "optimizer_state": "kept"}
    whole = federate(tmp_path / "whole", experiment)
    with pytest.raises(Killed):
        server_app.play(grid_of(tmp_path), settings(tmp_path, experiment), Fragile(*moment))
    assert_same(whole, federate(tmp_path, experiment))
    for site in ("north", "south", "west"):
        for one in (tmp_path / "whole" / "sites" / site / "runs").glob("*/memory/*/*.safetensors"):
            (other,) = (tmp_path / "sites" / site / "runs").glob(f"*/memory/{site}/{one.name}")
            assert one.read_bytes() == other.read_bytes()


def test_a_site_keeps_the_state_of_two_rounds_and_survives_its_restart(tiny: dict[str, Any], tmp_path: Path) -> None:
    run = federate(tmp_path, {**tiny, "algorithm": "fedbn", "rounds": 4})  # every message is answered by a new Site
    kept = sorted(path.name for path in (tmp_path / "sites" / "north" / "runs").glob("*/memory/north/*"))
    assert kept == ["3.safetensors", "4.safetensors"]
    (folder,) = (tmp_path / "sites" / "north" / "runs").iterdir()
    assert folder.name == run.provenance["federation"] and folder.name.startswith(run.folder.name)


def test_another_run_of_the_same_settings_has_its_own_private_state(
    tiny: dict[str, Any], tmp_path: Path, assert_same: Callable[[Run, Run], None]
) -> None:
    experiment = {**tiny, "algorithm": "fedbn"}
    assert_same(federate(tmp_path, experiment), federate(tmp_path, experiment, out=str(tmp_path / "again")))


def test_a_site_that_goes_and_returns(tiny: dict[str, Any], tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    gone = grid.nodes[2]

    class Comings(Quiet):
        def round_done(self, record: Any) -> None:
            super().round_done(record)
            if record.round == 1:
                del grid.nodes[2]
            if record.round == 2:
                grid.nodes[7] = gone  # the same site, and Flower gives it another id

    operator = Comings()
    run = server_app.play(grid, settings(tmp_path, {**tiny, "rounds": 4}), operator)
    assert [line["refused"] for line in run.metrics][:2] == [{}, {"south": "it is not connected"}]
    assert run.metrics[3]["refused"] == {} and "south" in run.metrics[3]["test"]["clients"]
    assert "south is gone" in operator.lines


def test_a_site_killed_in_a_round(tiny: dict[str, Any], tmp_path: Path) -> None:
    grid = grid_of(tmp_path)

    def dies(message: Message, reply: Message) -> Message:
        if (message.metadata.message_type, message.metadata.dst_node_id) == ("train", 2) and grid.nodes.pop(2, None):
            return grid.answer(message)
        return reply

    grid.tamper = dies
    run = federate(tmp_path, {**tiny, "rounds": 2}, grid)
    assert run.metrics[0]["refused"] == {"south": "the node is gone"}
    assert sorted(run.metrics[0]["test"]["clients"]) == ["north", "west"]


def test_fewer_sites_than_the_minimum_stop_the_run_with_its_last_checkpoint(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    grid = grid_of(tmp_path)

    class Leaving(Quiet):
        def round_done(self, record: Any) -> None:
            super().round_done(record)
            if record.round == 2:
                grid.nodes = {1: grid.nodes[1]}

    given = settings(tmp_path, {**tiny, "rounds": 4}, wait=1.2)
    operator = Leaving()
    with pytest.raises(UserError, match=r"1 of at least 2 sites are in after 1\.2 s, without south, west: stopped"):
        server_app.play(grid, given, operator)
    assert [line for line in operator.lines if line.startswith("1 of 2 sites are in; waiting")]
    run = Run(next((tmp_path / "flower").iterdir()))
    assert (run.rounds, run.restarts(), run.done) == (2, [1, 2], False)
    assert federate(tmp_path, {**tiny, "rounds": 4}).done


def test_what_never_changes_is_sent_once(tiny: dict[str, Any], tmp_path: Path) -> None:
    def sent(grid: Any) -> list[tuple[str, int]]:
        parcels = [(m.metadata, Parcel.of(m.content)) for m in grid.passed]
        return [(meta.message_type, meta.dst_node_id) for meta, parcel in parcels if "constants" in parcel.blobs]

    grid = grid_of(tmp_path)
    federate(tmp_path, {**tiny, "algorithm": "fedmix"}, grid)
    assert sorted(sent(grid)) == [("train", 1), ("train", 2), ("train", 3)]

    def loses(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "evaluate" and message.metadata.dst_node_id == 3:
            for path in (tmp_path / "lost").glob("sites/south/runs/*/constants/*"):
                path.unlink()
        return reply

    grid = grid_of(tmp_path / "lost", tamper=loses)
    assert federate(tmp_path / "lost", {**tiny, "algorithm": "fedmix"}, grid).metrics[1]["refused"] == {}
    assert sorted(sent(grid)) == [("train", 1), ("train", 2), ("train", 2), ("train", 2), ("train", 3)]


# The audit log


def test_everything_that_left_a_site_is_in_its_log(tiny: dict[str, Any], tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    replies: dict[int, list[Parcel]] = {1: [], 2: [], 3: []}

    def listen(message: Message, reply: Message) -> Message:
        replies[message.metadata.dst_node_id].append(Parcel.of(reply.content))
        return reply

    grid.tamper = listen
    federate(tmp_path, {**tiny, "algorithm": "fedmix", "rounds": 2}, grid)
    lines = [json.loads(line) for line in (tmp_path / "sites" / "south" / "audit.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["join", "share", "train", "evaluate", "train", "evaluate"]
    assert {tensor["name"] for tensor in lines[1]["tensors"]} == {"gathered/images", "gathered/labels"}
    for line, parcel in zip(lines, replies[2], strict=True):
        left = Reply.of(parcel).tensors
        assert {tensor["name"]: tensor["sha256"] for tensor in line["tensors"]} == {
            name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in left.items()
        }
        head = json.loads(parcel.head)
        assert all(head[key] == value for key, value in line["numbers"].items() if key != "scores")
    assert (tmp_path / "sites" / "south" / "audit.jsonl").stat().st_mode & 0o077 == 0


# One request at a time


def parcel_for(experiment: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None, **head: Any) -> Parcel:
    config = fedfa.load(experiment)
    model = Parts.build(config).model.state_dict() if tensors is None else tensors
    given = {"kind": "train", "run": "run", "round": 1, "site": "north", "experiment": config.toml(), **head}
    return Parcel(RequestHead(**given).model_dump_json(), {"broadcast": broadcast_blob(model, {})})


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(SiteSettings.of(node("north", tmp_path)))


def refusal(site: Site, parcel: Parcel) -> str:
    return Reply.of(site.answer(parcel)).head.refused


def test_an_old_round_is_refused_and_the_last_one_is_repeated(tiny: dict[str, Any], site: Site) -> None:
    assert refusal(site, parcel_for(tiny, round=1)) == ""
    second = site.answer(parcel_for(tiny, round=2))
    again = site.answer(parcel_for(tiny, round=2))
    assert second == again
    assert refusal(site, parcel_for(tiny, round=1)) == "round 1 is over: it has trained round 2"
    assert refusal(site, parcel_for(tiny, round=1, kind="evaluate")) == "round 1 is over: it has trained round 2"
    assert refusal(site, parcel_for(tiny, round=0, kind="share")) == "round 0 is over: it has trained round 2"
    assert refusal(site, parcel_for(tiny, round=1, run="other")) == ""


def test_requests_that_are_not_for_this_site(tiny: dict[str, Any], site: Site) -> None:
    assert refusal(site, parcel_for(tiny, site="south")) == "this is north, and the request is for south"
    assert refusal(site, parcel_for(tiny, run="")) == "the request names no run"
    assert "is not of this network" in refusal(site, parcel_for(tiny, {"head": torch.zeros(2)}))
    wrong = parcel_for(tiny, constants="0" * 64)
    assert "is not what its name says" in refusal(site, Parcel(wrong.head, {**wrong.blobs, "constants": pack({})}))
    with pytest.raises(Malformed, match="run: String should match pattern"):
        site.answer(Parcel(wrong.head.replace('"run":"run"', '"run":"../../etc"'), wrong.blobs))


def test_an_exception_at_a_site_says_nothing_of_its_files(
    tiny: dict[str, Any], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("/data/patient-17.nii is broken")

    monkeypatch.setattr(site, "_train", fail)
    assert refusal(site, parcel_for(tiny)) == "it failed with RuntimeError; the site's log says why"


def test_the_server_does_not_choose_what_is_read(tiny: dict[str, Any], tmp_path: Path) -> None:
    text = fedfa.load(
        tiny, {"source": {"name": "image_folders", "path": "/etc", "size": 64}, "split.file": "/etc/passwd"}
    )
    mine = SiteSettings.of({"name": "north", "path": str(tmp_path), "settings.channels": 1}).experiment(text.toml())
    assert mine.source == {"name": "image_folders", "path": str(tmp_path), "size": 64, "channels": 1}
    assert mine.split["file"] == ""
    other = SiteSettings.of({"name": "north", "source": "tiny", "device": "cpu"}).experiment(text.toml())
    assert other.source["name"] == "tiny"


def test_a_site_may_hold_out_for_the_experiment_that_was_agreed_on(tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "agreed.toml").write_text(fedfa.load(tiny).toml())
    site = Site(SiteSettings.of(node("north", tmp_path, agreed=str(tmp_path / "agreed.toml"))))
    assert refusal(site, parcel_for(tiny)) == ""
    assert "its data or settings do not allow it" in refusal(site, parcel_for({**tiny, "epochs": 2}, round=2))


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "a site needs a name"),
        ({"name": "../up"}, "a site needs a name"),
        ({"name": "north", "paht": "x"}, "unknown key 'paht'; did you mean 'path'"),
        ({"partition-id": 2, "num-partitions": 3}, "the run names 2 sites"),
    ],
)
def test_node_configs(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        SiteSettings.of(config, {"sites": "a,b"})


def test_simulated_nodes_are_the_runs_sites_by_number() -> None:
    found = SiteSettings.of({"partition-id": 1, "num-partitions": 2}, {"sites": "a, b", "out": "/o"})
    assert (found.name, found.place) == ("b", Path("/o/sites/b"))


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "sites are names"),
        ({"sites": "a b"}, "sites are names"),
        ({"sites": "a,b", "min-sites": 3}, "min-sites is between 1 and 2"),
        ({"sites": "a,b", "wait": "x"}, "are numbers"),
        ({"sites": "a,b", "round-timeout": 0}, "are seconds"),
        ({"sites": "a,b", "siets": 0}, "did you mean 'sites'"),
    ],
)
def test_run_configs(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Settings.of(config)


@pytest.mark.parametrize(
    ("experiment", "overrides", "complaint"),
    [
        ("", "", "there is no experiment"),
        ("a = [", "", "cannot be read"),
        ("digit-sites", "rounds='", "cannot be read"),
        ("digit-sites", "ronds=1", "unknown key 'ronds'"),
    ],
)
def test_experiments_of_run_configs(experiment: str, overrides: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Settings.of({"sites": "a,b", "experiment": experiment, "overrides": overrides}).load()
    assert Settings.of({"sites": "a,b", "experiment": "digit-sites", "overrides": "rounds=7"}).load().rounds == 7
