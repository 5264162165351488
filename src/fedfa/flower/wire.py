"""Requests of the server and replies of a site, checked as they are read: names, types and sizes before tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import safetensors.torch
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

import fedfa
from fedfa.algorithms.base import Share
from fedfa.data.federation import Federation, Split, TaskName
from fedfa.engines.base import Score
from fedfa.flower.parcel import MOST_BYTES, Malformed, Parcel
from fedfa.records import first_problem
from fedfa.reduction import Report, Update
from fedfa.state import group


def one_line(text: str) -> str:
    """Text from outside as it may be shown: one line, no control characters, not long."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:300]


Kind = Literal["join", "share", "train", "evaluate"]
TYPES: dict[Kind, str] = {"join": "query.join", "share": "query.share", "train": "train", "evaluate": "evaluate"}
"""Flower's names for our kinds of messages."""

Name = Annotated[str, Field(pattern=r"^\w[\w.-]{0,99}$")]
"""A site's name, a run's: folders are named by them."""
Line = Annotated[str, Field(max_length=500), AfterValidator(one_line)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Samples = Annotated[int, Field(ge=0, le=10_000_000)]
"""Of a site: the server lays out an index of so many entries."""
MOST_VALUES = 1 << 26
"""Values of an image: the server tries the network on two of them."""
H = TypeVar("H", bound="Head")


class Head(BaseModel):
    """What requests and replies say of themselves."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    protocol: Literal[1] = 1
    kind: Kind
    run: Annotated[str, Field(pattern=r"^(\w[\w.-]{0,199})?$")]
    """Names the run over restarts of the server; nothing where a site is asked to join."""
    round: Count
    site: Name


class Facts(BaseModel):
    """What a site tells of its data when it joins."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    task: TaskName
    classes: Annotated[tuple[Line, ...], Field(min_length=1, max_length=100_000)]
    channels: Annotated[int, Field(ge=1, le=4096)]
    height: Annotated[int, Field(ge=1, le=1 << 16)]
    width: Annotated[int, Field(ge=1, le=1 << 16)]
    samples: tuple[Samples, Samples, Samples]
    """Training, validation, test."""
    division: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """Changes with the samples and their split: a site whose data are exchanged in the middle of a run is noticed."""
    fedfa: Line
    torch: Line

    @model_validator(mode="after")
    def _fits(self) -> Facts:
        if self.channels * self.height * self.width > MOST_VALUES:
            raise ValueError(f"its images have more than {MOST_VALUES:,} values")
        return self

    @classmethod
    def of(cls, federation: Federation, client: str) -> Facts:
        index, (_, channels, height, width) = federation.clients[client], federation.images.shape
        return cls(
            task=federation.task,
            classes=federation.classes,
            channels=channels,
            height=height,
            width=width,
            samples=(len(index.train), len(index.val), len(index.test)),
            division=federation.division(),
            fedfa=fedfa.__version__,
            torch=str(torch.__version__),
        )

    def misfit(self, other: Facts) -> str | None:
        """Why a site with these data cannot train one model with a site with the other, in a line."""
        for name in ("task", "channels", "height", "width"):
            if getattr(self, name) != getattr(other, name):
                return f"its images have {name} {getattr(self, name)}, not {getattr(other, name)}"
        if self.classes != other.classes:
            differ = sorted(set(self.classes) ^ set(other.classes))
            return f"its classes are not the others': {', '.join(differ[:3]) or 'in another order'}"
        return None


class RequestHead(Head):
    experiment: str
    """As TOML."""
    constants: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Names the tensors that never change: sent once, and kept by the site."""


class Metrics(BaseModel):
    """A model on one split of a site."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")

    metric: Annotated[float, Field(ge=0, le=1)]
    loss: float
    """Not finite where a model has diverged."""
    samples: Count


class ReplyHead(Head):
    refused: Line = ""
    """Why the site sends nothing; empty where it does."""
    wants_constants: bool = False
    division: str = ""
    facts: Facts | None = None
    weight: Count = 0
    steps: Count = 0
    scores: dict[Split, Metrics] = Field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What the server asks of a site."""

    head: RequestHead
    model: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    constants: bytes | None = None
    """Packed tensors, to be kept by the site."""

    @classmethod
    def of(cls, parcel: Parcel) -> Request:
        head = _head(RequestHead, parcel)
        _only(parcel, {"broadcast", "constants"})
        tensors = unpack(parcel.blobs.get("broadcast", b""), MOST_BYTES)
        return cls(head, group(tensors, "model"), group(tensors, "extras"), parcel.blobs.get("constants"))


@dataclass(frozen=True)
class Reply:
    """What a site answers."""

    head: ReplyHead
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def parcel(self) -> Parcel:
        return Parcel(self.head.model_dump_json(), {"tensors": pack(self.tensors)} if self.tensors else {})

    @classmethod
    def of(cls, parcel: Parcel, most: int = MOST_BYTES) -> Reply:
        """From what came; a reply of more than `most` bytes is not looked at."""
        head = _head(ReplyHead, parcel)
        _only(parcel, {"tensors"})
        return cls(head, unpack(parcel.blobs.get("tensors", b""), most))

    def update(self) -> Update:
        """The update in a reply to `train`."""
        loss = self.tensors.get("loss")
        if loss is None or loss.shape != () or not loss.is_floating_point() or not bool(loss.isfinite()):
            raise Malformed("its training loss is not a finite number")
        if not self.head.steps:
            raise Malformed("it made no step")
        return Update(
            self.head.site, self.head.weight, group(self.tensors, "model"), self._report(), self.head.steps, loss
        )

    def share(self) -> Share:
        """What a site gives away before the first round."""
        return Share(self._report(), group(self.tensors, "gathered"))

    def scores(self) -> dict[Split, Score]:
        return {split: Score(**metrics.model_dump()) for split, metrics in self.head.scores.items()}

    def _report(self) -> Report:
        values, weights = group(self.tensors, "spreads"), group(self.tensors, "weights")
        if values.keys() != weights.keys():
            raise Malformed("its statistics and their weights do not go together")
        return Report(group(self.tensors, "means"), {name: (values[name], weights[name]) for name in values})


def broadcast_blob(model: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> bytes:
    return pack(_prefixed(model=model, extras=extras))


def update_tensors(update: Update) -> dict[str, Tensor]:
    """Everything that leaves a site with an update."""
    assert update.loss is not None, "a client that has trained has a loss"
    return {**_prefixed(model=update.model), **_report_tensors(update.report), "loss": update.loss}


def share_tensors(share: Share) -> dict[str, Tensor]:
    """Everything that leaves a site with its share."""
    return {**_report_tensors(share.report), **_prefixed(gathered=share.gathered)}


def _report_tensors(report: Report) -> dict[str, Tensor]:
    values = {name: value for name, (value, _) in report.spreads.items()}
    weights = {name: weight for name, (_, weight) in report.spreads.items()}
    return _prefixed(means=report.means, spreads=values, weights=weights)


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as safetensors. Cloned, since it takes none that share memory or do not lie in a row."""
    plain = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    packed: bytes = safetensors.torch.save(plain)
    return packed


def unpack(data: bytes, most: int) -> dict[str, Tensor]:
    """Tensors from bytes that may be anything. The format's reader compares every shape with the bytes that are
    there before it makes a tensor, so nothing larger than `data` is allocated."""
    if not data:
        return {}
    if len(data) > most:
        raise Malformed(f"its tensors take {len(data):,} bytes, more than {most:,}")
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except Exception as error:  # whatever a damaged blob gives
        raise Malformed(f"its tensors cannot be read: {one_line(str(error))}") from None
    return dict(sorted(tensors.items()))  # the reader's order changes from process to process


def _prefixed(**groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for prefix, tensors in groups.items() for name, tensor in tensors.items()}


def _only(parcel: Parcel, known: set[str]) -> None:
    if not parcel.blobs.keys() <= known:
        raise Malformed(f"there are blobs that nobody asked for: {', '.join(sorted(parcel.blobs)[:3])}")


def _head(kind: type[H], parcel: Parcel) -> H:
    try:
        return kind.model_validate_json(parcel.head)
    except ValidationError as error:
        raise Malformed(one_line(f"head: {first_problem(error)}")) from None
    except RecursionError:
        raise Malformed("its head cannot be read") from None
