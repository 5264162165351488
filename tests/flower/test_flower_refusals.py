"""What a bad site does: it is left out, counted and shown, and the model is what the others make of it."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from hospitals import Quiet, federate, grid_of, node, settings

import fedfa
from fedfa.errors import UserError
from fedfa.flower import server_app
from fedfa.flower.parcel import STYPE, Parcel
from fedfa.flower.wire import pack, unpack

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]
BAD = "south"


def altered(change: Change, kind: str = "train") -> Callable[[Message, Message], Message]:
    """Change the head and the tensors of every reply of the bad site to requests of a kind."""

    def tamper(message: Message, reply: Message) -> Message:
        if reply.has_error():
            return reply
        parcel = Parcel.of(reply.content)
        head = json.loads(parcel.head)
        if head["site"] != BAD or head["kind"] != kind:
            return reply
        tensors = unpack(parcel.blobs["tensors"], 1 << 40) if parcel.blobs else {}
        other = change(head, tensors)
        if isinstance(other, RecordDict):
            return Message(other, reply_to=message)
        blobs = {"tensors": pack(tensors)} if tensors else {}
        return Message(Parcel(json.dumps(head), blobs).records(), reply_to=message)

    return tamper


def first(tensors: dict[str, torch.Tensor], prefix: str = "model/") -> str:
    return next(name for name in tensors if name.startswith(prefix))


def set_to(prefix: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        name = first(tensors, prefix)
        tensors[name] = value(tensors[name])

    return change


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, torch.nan)


UPDATES: dict[str, tuple[Change, str]] = {
    "a wrong shape": (set_to("model/head", lambda t: t[:1]), r"is \(1,\) torch.float32, not \(3,\)"),
    "a wrong type": (set_to("model/", lambda t: t.double()), "float64"),
    "a NaN": (set_to("model/", with_nan), "is not finite"),
    "an infinity in a statistic": (set_to("spreads/augments.0.mean", lambda t: t / 0), "is not finite"),
    "a negative std": (set_to("spreads/augments.0.std", lambda t: t - 5), "std is negative"),
    "a statistic with a weight of 2": (set_to("weights/", lambda t: t + 1), "weight is not 0 or 1"),
    "a huge update": (lambda h, t: t.update({"model/more": torch.zeros(1 << 20)}), "bytes, more than"),
    "no tensors": (lambda h, t: t.clear(), "loss is not a finite number"),
    "an unknown tensor": (lambda h, t: t.update({"model/more": torch.zeros(1)}), "its entries are not the model's"),
    "one tensor less": (lambda h, t: t.pop(first(t)), "its entries are not the model's"),
    "one statistic less": (lambda h, t: t.pop(first(t, "spreads/")), "do not go together"),
    "an old round": (lambda h, t: h.update(round=0), "it answers for round 0, not 1"),
    "a weight of its choice": (lambda h, t: h.update(weight=10**9), "its weight is 1000000000, not 1"),
    "no step": (lambda h, t: h.update(steps=0), "it made no step"),
    "another name": (lambda h, t: h.update(site="north"), "another run, site or kind"),
    "another run": (lambda h, t: h.update(run="other"), "another run, site or kind"),
    "other data": (lambda h, t: h.update(division="0" * 16), "not those that it joined with"),
    "a loss that is not finite": (set_to("loss", with_nan), "loss is not a finite number"),
    "a head that is no JSON": (lambda h, t: Parcel("{").records(), "head: Invalid JSON"),
    "a head with more in it": (lambda h, t: h.update(more=1), "more: Extra inputs"),
    "tensors as a pickle": (
        lambda h, t: Parcel(json.dumps(h), {"tensors": pickle.dumps(t)}).records(),
        "its tensors cannot be read",
    ),
    "an object array": (
        lambda h, t: RecordDict(
            {"head": ConfigRecord({"json": "{}"}), "blobs": ArrayRecord({"tensors": Array("object", (1,), "x", b"1")})}
        ),
        f"not {STYPE!r}",
    ),
    "nothing": (lambda h, t: RecordDict(), "the message has no head"),
}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The model after a round of the two good sites alone."""
    folder = tmp_path_factory.mktemp("good")
    run = federate(folder, EXPERIMENT, grid_of(folder, ("north", "west")), wait=0.2)
    latest = run.latest()
    assert latest is not None
    return dict(latest[0].model)


EXPERIMENT = {
    "name": "tiny", "source": "tiny", "network": "tiny-net", "algorithm": "fedfa", "rounds": 1, "batch_size": 4,
    "lr": 0.05, "threads": 1, "device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize("what", list(UPDATES))
def test_a_bad_update_is_left_out(what: str, without: dict[str, torch.Tensor], tmp_path: Path) -> None:
    change, reason = UPDATES[what]
    run = federate(tmp_path, EXPERIMENT, grid_of(tmp_path, tamper=altered(change)))
    (line,) = run.metrics
    assert list(line["refused"]) == [BAD]
    assert re.search(reason, line["refused"][BAD])
    latest = run.latest()
    assert latest is not None
    assert latest[0].model.keys() == without.keys()
    assert not [name for name, tensor in latest[0].model.items() if not torch.equal(tensor, without[name])]


def test_a_server_whose_last_round_is_lost_does_not_go_back(tmp_path: Path) -> None:
    """Sites train no round that is over: rounds without them would be recorded."""
    run = federate(tmp_path, {**EXPERIMENT, "rounds": 2, "checkpoint_every": 1})
    (run.folder / "done").unlink()
    damaged = run.folder / "checkpoints" / "round-00002.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(b"")
    with pytest.raises(UserError, match=r"round-00002.safetensors is damaged .*: put it back, or start another run"):
        federate(tmp_path, {**EXPERIMENT, "rounds": 2, "checkpoint_every": 1})
    damaged.write_bytes(whole)
    again = federate(tmp_path, {**EXPERIMENT, "rounds": 2, "checkpoint_every": 1})
    assert again.done and again.metrics == run.metrics


def test_an_error_of_a_site_and_one_that_never_answers(tmp_path: Path) -> None:
    def fail(message: Message, reply: Message) -> Message:
        bad = message.metadata.message_type == "train" and message.metadata.dst_node_id == 2
        return Message(Error(1, "boom\n\x1b[31m"), reply_to=message) if bad else reply

    run = federate(tmp_path, EXPERIMENT, grid_of(tmp_path, tamper=fail))
    assert run.metrics[0]["refused"] == {"south": "boom  [31m"}

    class Deaf(type(grid_of(tmp_path))):  # type: ignore[misc]  # a base that is found at run time
        def pull_messages(self, message_ids: Any) -> Any:
            trains = {id for id, m in self._waiting.items() if m.metadata.message_type == "train"}
            silent = {id for id in trains if self._waiting[id].metadata.dst_node_id == 2}
            return super().pull_messages([id for id in message_ids if id not in silent])

    deaf = grid_of(tmp_path)
    deaf.__class__ = Deaf
    run = federate(tmp_path / "deaf", EXPERIMENT, deaf, **{"round-timeout": 0.5})
    assert run.metrics[0]["refused"] == {"south": "it did not answer within 0.5 s"}


def test_a_reply_that_flower_cannot_put_together_harms_nobody_else(tmp_path: Path) -> None:
    def damaged(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 2:
            raise ValueError("objects do not fit")
        return reply

    grid = grid_of(tmp_path)
    pull = grid.pull_messages

    def pull_messages(ids: list[str]) -> Any:
        for id in ids:
            if id in grid._waiting:
                damaged(grid._waiting[id], grid._waiting[id])
        return pull(ids)

    grid.pull_messages = pull_messages  # type: ignore[method-assign]  # a grid that lies, for this test
    run = federate(tmp_path, EXPERIMENT, grid)
    assert run.metrics[0]["refused"] == {"south": "its message cannot be read"}


def test_a_superlink_that_is_too_busy_is_asked_again(tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    pull, refused = grid.pull_messages, iter([503, 500])

    def pull_messages(ids: list[str]) -> Any:
        code = next(refused, None)
        if code is not None:
            request = httpx.Request("POST", "https://127.0.0.1/v1/runtime/pull-messages")
            raise httpx.HTTPStatusError("busy", request=request, response=httpx.Response(code))
        return pull(ids)

    grid.pull_messages = pull_messages  # type: ignore[method-assign]  # a grid that lies, for this test
    assert federate(tmp_path, EXPERIMENT, grid).metrics[0]["refused"] == {}
    refused = iter([403])
    with pytest.raises(httpx.HTTPStatusError):
        federate(tmp_path / "again", EXPERIMENT, grid)


JOINS: dict[str, tuple[Change, str]] = {
    "other classes": (lambda h, t: h["facts"].update(classes=["a", "b", "d"]), "its classes are not the others': c, d"),
    "another size": (lambda h, t: h["facts"].update(height=13), "its images have height 13, not 12"),
    "huge images": (lambda h, t: h["facts"].update(height=60000, width=60000), "more than 67,108,864 values"),
    "too many samples": (lambda h, t: h["facts"].update(samples=[10**12, 1, 1]), "less than or equal to 10000000"),
    "a name that is not in the run": (lambda h, t: h.update(site="east"), "east is not among this run's sites"),
    "a name that is taken": (lambda h, t: h.update(site="north"), "another node is north already"),
    "nothing of its data": (lambda h, t: h.update(facts=None), "it says nothing of its data"),
    "a refusal": (lambda h, t: h.update(refused="no\n\x1b[31m"), "no  [31m"),
    "tensors": (lambda h, t: t.update(a=torch.zeros(1)), "bytes, more than 0"),
}


@pytest.mark.parametrize("what", list(JOINS))
def test_a_site_that_is_turned_away(what: str, tmp_path: Path) -> None:
    change, reason = JOINS[what]
    operator = Quiet()
    grid = grid_of(tmp_path, tamper=altered(change, "join"))
    run = server_app.play(grid, settings(tmp_path, EXPERIMENT, wait=0.3), operator)
    assert [line for line in operator.lines if reason in line and line.startswith("node 2 is turned away")]
    assert run.metrics[0]["refused"] == {"south": "it is not connected"}
    status = json.loads((run.folder / "status.json").read_text())
    assert reason in status["turned_away"]["node 2"] and status["in"] == ["north", "west"]


def test_too_few_sites_stop_the_run_after_a_while(tmp_path: Path) -> None:
    operator = Quiet()
    with pytest.raises(UserError, match=r"1 of at least 2 sites are in after 0\.3 s, without south, west: stopped"):
        server_app.play(grid_of(tmp_path, ("north",)), settings(tmp_path, EXPERIMENT, wait=0.3), operator)
    assert not (tmp_path / "flower").exists()


def test_the_app_says_why_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"sites": "north,south", "experiment": fedfa.load(EXPERIMENT).toml(), "wait": 0.1, "out": str(tmp_path)}
    with pytest.raises(UserError, match="0 of at least 2 sites"):
        server_app.main(grid_of(tmp_path, ()), Context(1, 1, {}, RecordDict(), run))
    assert capsys.readouterr().err.startswith("0 of at least 2 sites are in after 0.1 s, without north, south: stopped")


def test_it_says_whom_it_waits_for(tmp_path: Path) -> None:
    operator = Quiet()
    with pytest.raises(UserError, match="stopped"):
        server_app.play(grid_of(tmp_path, ()), settings(tmp_path, EXPERIMENT, wait=1.5), operator)
    assert re.search("0 of 3 sites are in; waiting [01] s for north, south, west", operator.lines[0])


def test_a_node_is_not_taken_for_another_whose_key_is_registered(tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    named = {1: "north", 2: "west", 3: "west"}
    plain = grid.get_nodes

    def get_nodes() -> Any:
        nodes = list(plain())
        for known in nodes:
            known.name = named[known.node_id]
        return nodes

    grid.get_nodes = get_nodes  # type: ignore[method-assign]  # a grid that lies, for this test
    operator = Quiet()
    server_app.play(grid, settings(tmp_path, EXPERIMENT, wait=0.3), operator)
    assert "west is turned away: its key is registered for west, and it calls itself south" in operator.lines


def test_a_run_of_a_federation_is_not_resumed_as_a_simulation(tmp_path: Path) -> None:
    run = federate(tmp_path, EXPERIMENT)
    (run.folder / "done").unlink()
    with pytest.raises(UserError, match="a run of a real federation"):
        fedfa.resume(run.folder)
    alone = fedfa.run(EXPERIMENT, root=tmp_path / "alone")
    with pytest.raises(UserError, match="is a simulation with the same settings"):
        federate(tmp_path, EXPERIMENT, out=str(alone.folder.parent))


def test_a_site_that_does_not_know_its_data(tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    grid.nodes[2] = node("south", tmp_path, client="nobody")
    grid.nodes[3] = node("west", tmp_path, source="image_folders", path=str(tmp_path / "secret"))
    operator = Quiet()
    with pytest.raises(UserError, match="1 of at least 2"):
        server_app.play(grid, settings(tmp_path, EXPERIMENT, wait=0.3), operator)
    told = [line for line in operator.lines if "turned away" in line]
    assert len(told) == 2 and not [line for line in told if "secret" in line or "nobody" in line]
    assert all("the site's log says why" in line for line in told)
