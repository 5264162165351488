"""Whatever comes in, nothing crashes, nothing is unpickled, and nothing is allocated that was only announced."""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedfa.flower.parcel import MOST_BYTES, STYPE, Malformed, Parcel
from fedfa.flower.wire import Metrics, Reply, ReplyHead, Request, RequestHead, pack, unpack

TENSORS = {"model/w": torch.arange(6.0).reshape(2, 3), "means/m": torch.ones(2), "loss": torch.tensor(0.5)}
HEAD = ReplyHead(kind="train", run="run", round=1, site="north", weight=1, steps=2)
REQUEST = RequestHead(kind="train", run="run", round=1, site="north", experiment="")
GOOD = pack(TENSORS)

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def read(parcel: Parcel) -> None:
    """Read a parcel as a reply and as a request: refused, or understood."""
    for kind in (Reply.of, Request.of):
        try:
            found = kind(parcel)
        except Malformed:
            continue
        if isinstance(found, Reply):
            for part in (found.update, found.share, found.scores):
                try:
                    part()
                except Malformed:
                    continue


@given(st.binary(max_size=400))
def test_any_bytes_for_tensors(data: bytes) -> None:
    read(Parcel(HEAD.model_dump_json(), {"tensors": data}))


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD)))
def test_tensors_with_a_byte_changed_or_cut_off(place: int, byte: int, length: int) -> None:
    read(Parcel(HEAD.model_dump_json(), {"tensors": (GOOD[:place] + bytes([byte]) + GOOD[place + 1 :])[:length]}))


@given(anything)
def test_any_json_for_a_head(value: Any) -> None:
    read(Parcel(json.dumps(value), {"tensors": GOOD}))


@given(st.sampled_from(list(json.loads(HEAD.model_dump_json()))), anything)
def test_a_head_with_any_value_in_one_place(key: str, value: Any) -> None:
    read(Parcel(json.dumps({**json.loads(HEAD.model_dump_json()), key: value}), {"tensors": GOOD}))
    read(Parcel(json.dumps({**json.loads(REQUEST.model_dump_json()), key: value})))


@given(st.text(max_size=60))
def test_any_text_for_a_head(text: str) -> None:
    read(Parcel(text))


def test_a_head_that_is_too_deep() -> None:
    read(Parcel("[" * 200_000))


@given(
    st.dictionaries(
        st.sampled_from(["head", "blobs", "more"]),
        st.sampled_from(
            [
                ConfigRecord({"json": "{}"}),
                ConfigRecord({"json": [1, 2]}),
                ConfigRecord({"json": "x" * (1 << 21)}),
                MetricRecord({"a": 1}),
                ArrayRecord(),
                ArrayRecord({"tensors": Array("uint8", (3,), STYPE, b"abc")}),
                ArrayRecord({"tensors": Array("uint8", (10**15,), STYPE, b"abc")}),
                ArrayRecord({"tensors": Array("object", (1,), "pickle", b"cos\nsystem\n(S'true'\ntR.")}),
                ArrayRecord({str(n): Array("uint8", (0,), STYPE, b"") for n in range(9)}),
            ]
        ),
    )
)
def test_any_records(records: dict[str, Any]) -> None:
    with suppress(Malformed):
        read(Parcel.of(RecordDict(records)))


def test_shapes_that_are_only_announced() -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    with pytest.raises(Malformed, match="cannot be read"):
        unpack(struct.pack("<Q", len(header)) + header, MOST_BYTES)
    with pytest.raises(Malformed, match="cannot be read"):
        unpack(struct.pack("<Q", 1 << 60) + b"{}", MOST_BYTES)


def test_tensors_come_back_as_they_were() -> None:
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    tensors = {str(kind): torch.ones(2, 3).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(7), "empty": torch.zeros(0, 4), "turned": torch.arange(6.0).view(2, 3).T}
    tensors["same"] = tensors["scalar"]
    found = unpack(pack(tensors), MOST_BYTES)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_the_loss_of_a_model_that_diverged_comes_through_and_an_impossible_metric_does_not() -> None:
    losses = {"test": math.inf, "val": math.nan}
    scores = {split: Metrics(metric=0.1, loss=loss, samples=3) for split, loss in losses.items()}
    found = Reply.of(Reply(HEAD.model_copy(update={"scores": scores})).parcel()).scores()
    assert found["test"].loss == math.inf and math.isnan(found["val"].loss)
    for metric in ("NaN", "Infinity", "1.5", "-0.1", "true", "null"):
        text = Reply(HEAD.model_copy(update={"scores": scores})).parcel().head.replace("0.1", metric)
        with pytest.raises(Malformed, match="metric"):
            Reply.of(Parcel(text))


# Over a socket


def through(data: bytes) -> Parcel:
    """A parcel from bytes that someone sent and then hung up."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: (theirs.sendall(data), theirs.shutdown(socket.SHUT_WR)))
        sender.start()
        try:
            return Parcel.receive(ours)
        finally:
            sender.join()


def framed(parcel: Parcel) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parcel.send(theirs)
        theirs.shutdown(socket.SHUT_WR)
        parts = []
        while part := ours.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_a_parcel_goes_through_a_socket() -> None:
    parcel = Parcel("é" * 1000, {"a": b"", "b": bytes(10_000)})
    assert through(framed(parcel)) == parcel


@given(st.binary(max_size=100))
def test_any_bytes_on_a_socket(data: bytes) -> None:
    with suppress(Malformed):
        through(data)


@given(st.integers(0, 60), st.integers(0, 255))
def test_a_frame_with_a_byte_changed(place: int, byte: int) -> None:
    whole = framed(Parcel("{}", {"a": b"12345"}))
    with suppress(Malformed):
        through(whole[:place] + bytes([byte]) + whole[place + 1 :])


@pytest.mark.parametrize("sizes", ['{"a": 1e9}', '{"a": -1}', '{"a": true}', '{"a": 99999999999999}', "[]", "{"])
def test_blobs_that_are_only_announced(sizes: str) -> None:
    with pytest.raises(Malformed):
        through(b"".join(struct.pack("!Q", len(part)) + part for part in (b"{}", sizes.encode())))
