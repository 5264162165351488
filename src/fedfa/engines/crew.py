"""Processes that train and evaluate clients for another one, and the messages between them."""

from __future__ import annotations

import io
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedfa.data.federation import Split
from fedfa.engines.base import Refused, Score
from fedfa.engines.client import Broadcast
from fedfa.errors import UserError
from fedfa.memory import Memory
from fedfa.reduction import Update

if TYPE_CHECKING:
    from fedfa.engines.sequential import Sequential

PATIENCE = 5.0
"""Seconds that a process has to end after nobody listens to it any more."""


class Lost(Exception):
    """A process that is gone, or cannot do what it is asked to, with the reason in a line."""


@dataclass(frozen=True)
class Recipe:
    """How a process builds its engine: a function, by its module and name, and what it is given. The function takes a
    :class:`Handed` memory besides."""

    module: str
    function: str
    given: dict[str, Any] = field(default_factory=dict)

    def engine(self, memory: Memory) -> Sequential:
        built: Sequential = getattr(import_module(self.module), self.function)(memory=memory, **self.given)
        return built


class Handed(Memory):
    """A client's private tensors, which come and go with the messages: the first process alone has a disk."""

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] | None = None

    def load(self, client: str, round: int) -> dict[str, Tensor]:
        return self.given

    def save(self, client: str, round: int, tensors: dict[str, Tensor]) -> None:
        self.kept = tensors


@dataclass(frozen=True)
class Job:
    """One client to train, or with a split to evaluate, and its private tensors."""

    client: str
    split: Split | None
    memory: dict[str, Tensor]


@dataclass(frozen=True)
class Answer:
    """What came of a job. `kept` are the client's private tensors, unless its update was refused."""

    job: Job
    result: Update | Refused | dict[str, Score]
    kept: dict[str, Tensor] | None = None


# Messages


class _Pickler(pickle.Pickler):
    """Tensors as arrays: torch's own way is a file for each of them."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return NotImplemented
        plain = thing.detach().contiguous()
        if thing.dtype == torch.bfloat16:  # which NumPy does not know
            return _tensor, (plain.view(torch.int16).numpy(), thing.dtype)
        return _tensor, (plain.numpy(), None)


def _tensor(array: np.ndarray[Any, Any], dtype: torch.dtype | None) -> Tensor:
    found = torch.from_numpy(array if array.flags.writeable else array.copy())
    return found if dtype is None else found.view(dtype)


def send(pipe: Connection, message: Any) -> None:
    pipe.send_bytes(packed(message))


def packed(message: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(message)
    return buffer.getvalue()


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())  # from a process that we have started ourselves


# The first process


class _Worker:
    def __init__(self, recipe: Recipe, threads: int) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedfa.engines.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the first process: this one ends with it
            )
        self.pipe = Connection(ours.detach())
        self.round: bytes | None = None
        """The broadcast that it has."""
        self.tell((recipe, threads))

    def tell(self, message: Any) -> None:
        try:
            self.pipe.send_bytes(message if isinstance(message, bytes) else packed(message))
        except OSError:
            raise self._lost() from None

    def hear(self) -> Any:
        try:
            answer = receive(self.pipe)
        except (EOFError, OSError):
            raise self._lost() from None
        if isinstance(answer, str):  # why it could not
            raise Lost(answer)
        return answer

    def _lost(self) -> Lost:
        try:
            return Lost(f"it ended with exit code {self.process.wait(PATIENCE)}")
        except subprocess.TimeoutExpired:
            return Lost("it does not answer")

    def close(self) -> None:
        self.pipe.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Crew:
    """Some processes with the same engine each."""

    def __init__(self, recipe: Recipe, size: int, threads: int) -> None:
        self._workers: list[_Worker] = []
        self._starting: list[_Worker] = []
        try:
            for _ in range(size):
                self._workers.append(_Worker(recipe, threads))
        except OSError as error:
            self.close()
            raise Lost(str(error)) from None
        self._starting = list(self._workers)

    def ready(self, patient: bool) -> bool:
        """Whether all have built their engines; `patient`: as soon as they have."""
        for worker in list(self._starting):
            if patient or worker.pipe.poll():
                worker.hear()
                self._starting.remove(worker)
        return not self._starting

    def work(self, broadcast: Broadcast, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Hand out jobs, and give what comes of them as it comes."""
        sent = packed(broadcast)
        idle, busy = list(self._workers), dict[Connection, tuple[_Worker, Job]]()
        waiting = iter(jobs)
        while True:
            for worker in list(idle):
                job = next(waiting, None)
                if job is None:
                    break
                idle.remove(worker)
                if worker.round != sent:
                    worker.tell(sent)
                    worker.round = sent
                worker.tell(job)
                busy[worker.pipe] = worker, job
            if not busy:
                return
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker, job = busy.pop(pipe)
                result, kept = worker.hear()
                idle.append(worker)
                yield Answer(job, result, kept)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()


# The others


def serve(pipe: Connection) -> None:
    """What a process of a crew does: build its engine, and take jobs until nobody gives any."""
    memory = Handed()
    recipe, threads = receive(pipe)
    torch.set_num_threads(threads)
    try:
        engine = recipe.engine(memory)
    except Exception as error:
        send(pipe, _line(error))
        return
    send(pipe, None)
    broadcast: Broadcast | None = None
    while True:
        try:
            message = receive(pipe)
        except EOFError:
            return
        if isinstance(message, Broadcast):
            broadcast = message
            continue
        assert broadcast is not None
        memory.given, memory.kept = message.memory, None
        try:
            send(pipe, (_done(engine, broadcast, message), memory.kept))
        except Exception as error:  # the first process tries it itself, and fails in its own way
            send(pipe, _line(error))


def _done(engine: Sequential, broadcast: Broadcast, job: Job) -> Update | Refused | dict[str, Score]:
    if job.split is not None:
        return engine.evaluate(broadcast, [job.client], job.split)
    results: Sequence[Update | Refused] = list(engine.train(broadcast, [job.client]))
    return results[0]


def _line(error: Exception) -> str:
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]
