"""Trackers: runs as TensorBoard, MLflow and Weights & Biases show them.

TensorBoard's event files are written here, into the run's folder, without TensorBoard: whoever has it can look while
the run goes on. The other two are for those who ask (``trackers=[tensorboard,mlflow]``). None of them can end a run,
change its numbers or its name, and none calls out unless its own settings say so.
"""

from __future__ import annotations

import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from fedfa.experiment import TRACKERS
from fedfa.runs import Run
from fedfa.server import Record, Watcher

MOST_CLIENTS = 24
"""Clients up to which each has curves of its own."""


class Tracker(ABC):
    """Where a run's numbers go besides its folder. Any method may fail: the run goes on without the tracker."""

    @abstractmethod
    def start(self, run: Run, round: int) -> None:
        """A run begins, or goes on after a round: what was tracked of later rounds is out of date."""

    @abstractmethod
    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a round."""

    @abstractmethod
    def finish(self, done: bool) -> None:
        """The run is complete, or was stopped."""


class TensorBoard(Tracker):
    """Event files in ``RUN/tensorboard``, a file a start: ``tensorboard --logdir runs`` shows all runs.

    A file is a list of records (TFRecord), each a protocol buffer `Event` with a time, a step and scalars. After a
    restart, a session log makes TensorBoard forget the steps that are played again.
    """

    def start(self, run: Run, round: int) -> None:
        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}.fedfa"
        self._write(_event(0, b"\x1a" + _sized(b"brain.Event:2")))
        if round:
            self._write(_event(round + 1, b"\x3a" + _sized(b"\x08\x01")))

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        values = (
            b"\x0a" + _sized(tag.encode()) + b"\x15" + struct.pack("<f", number) for tag, number in numbers.items()
        )
        self._write(_event(round, b"\x2a" + _sized(b"".join(b"\x0a" + _sized(value) for value in values))))

    def finish(self, done: bool) -> None:
        """Every record is on its way already."""

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        with open(self._path, "ab") as file:
            file.write(length + _checksum(length) + event + _checksum(event))


def _event(step: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + content


def _sized(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def _checksum(content: bytes) -> bytes:
    """CRC-32C, masked as TFRecord has it."""
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(content: bytes) -> int:
    """The Castagnoli checksum (RFC 3720)."""
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in content:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)  # noqa: PLW2901  # eight shifts of one number
        table.append(number)
    return tuple(table)


class MLflow(Tracker):
    """A run in MLflow, in the experiment of the same name: at `$MLFLOW_TRACKING_URI`, or in ``mlflow.db`` beside the
    run folders. A run that goes on keeps its MLflow run."""

    def start(self, run: Run, round: int) -> None:
        from mlflow.tracking import MlflowClient

        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.resolve().parent / 'mlflow.db'}"
        self._client = MlflowClient(where)
        name, title = run.config["name"], run.folder.name
        known = self._client.get_experiment_by_name(name)
        place = known.experiment_id if known is not None else self._client.create_experiment(name)
        found = self._client.search_runs([place], f"tags.`fedfa.run` = '{title}'", max_results=1)
        if found and round:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(place, tags={"fedfa.run": title, "mlflow.runName": title}).info.run_id
        for key, value in _flat(run.config).items():
            self._client.log_param(self._id, key, value)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(key, value, now, round) for key, value in numbers.items()])

    def finish(self, done: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if done else "KILLED")


class WandB(Tracker):
    """A run in Weights & Biases, project `fedfa` or `$WANDB_PROJECT`. Offline, in the run's folder, unless
    `$WANDB_MODE` says otherwise: ``wandb sync`` sends it later."""

    def start(self, run: Run, round: int) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedfa"),
            name=run.folder.name,
            id=run.folder.name,
            resume="allow",
            dir=str(run.folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=run.config,
            reinit="create_new",
        )

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=round)

    def finish(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


KINDS: dict[str, type[Tracker]] = dict(zip(TRACKERS, (TensorBoard, MLflow, WandB), strict=True))


class Tracked(Watcher):
    """Someone's watcher with trackers beside it."""

    def __init__(self, watcher: Watcher, names: Sequence[str]) -> None:
        self._watcher = watcher
        self._trackers = {name: KINDS[name]() for name in names}

    def run_started(self, run: Run, round: int) -> None:
        self._watcher.run_started(run, round)
        self._each(lambda tracker: tracker.start(run, round))

    def noticed(self, line: str) -> None:
        self._watcher.noticed(line)

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        self._watcher.round_started(round, clients)

    def client_done(self, client: str, loss: Tensor | None, refused: str | None) -> None:
        self._watcher.client_done(client, loss, refused)

    def round_done(self, record: Record) -> None:
        self._watcher.round_done(record)
        numbers = scalars(record)
        self._each(lambda tracker: tracker.log(record.round, numbers))

    def finish(self, done: bool) -> None:
        self._each(lambda tracker: tracker.finish(done))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # whatever it is: numbers that are shown are worth less than those computed
                del self._trackers[name]
                missing = isinstance(error, ModuleNotFoundError)
                why = f"pip install 'fedfa[{name}]'" if missing else f"{type(error).__name__}: {error}"
                self._watcher.noticed(f"the run goes on without its tracker {name}: {' '.join(why.split())}")


@contextmanager
def tracked(watcher: Watcher, names: Sequence[str]) -> Iterator[Watcher]:
    """The watcher, with trackers beside it while a run goes on."""
    both = Tracked(watcher, names)
    try:
        yield both
    except BaseException:
        both.finish(done=False)
        raise
    both.finish(done=True)


def scalars(record: Record) -> dict[str, float]:
    """A round's numbers by their names in trackers."""
    numbers: dict[str, float] = {"bytes/up": record.bytes_up, "bytes/down": record.bytes_down}
    numbers |= {"updates left out": len(record.refused)} if record.refused else {}
    numbers |= {} if record.loss is None else {"loss": record.loss}
    for split, found in (("val", record.val), ("test", record.test)):
        if found is None:
            continue
        numbers[f"{split}/mean"] = found.mean
        if found.unseen is not None and found.gap is not None:
            numbers |= {f"{split}/unseen": found.unseen, f"{split}/gap": found.gap}
        if len(found.clients) <= MOST_CLIENTS:
            numbers |= {f"{split} by client/{name}": score.metric for name, score in found.clients.items()}
    return {key: float(value) for key, value in numbers.items()}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    parts = {key: value if isinstance(value, dict) else {"": value} for key, value in config.items()}
    return {f"{key}.{name}".rstrip("."): value for key, held in parts.items() for name, value in held.items()}


def event_files(folder: Path) -> list[Path]:
    """TensorBoard's files of a run, in the order they were begun."""
    return sorted((folder / "tensorboard").glob("events.out.tfevents.*"))
