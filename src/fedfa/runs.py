"""Runs: a folder each, from which everything else (resuming, tables, figures) is made."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fedfa.errors import Busy, Damaged, UserError
from fedfa.experiment import Experiment, load
from fedfa.files import PART, locked, read_meta, read_tensors, write_tensors, write_text
from fedfa.records import Line, Provenance, check, check_config
from fedfa.server import Record
from fedfa.state import ServerState

FORMAT = 1


class Run:
    """A run's folder.

    ========================  =====================================================================
    ``experiment.toml``       the whole config
    ``provenance.json``       versions, commit, hardware, threads, memory; when it was started, resumed
    ``federation.json``       what the data look like: labels and images of every client, in numbers
    ``metrics.jsonl``         a line a round
    ``tensorboard/``          event files, unless the experiment's trackers say otherwise
    ``checkpoints/``          the server's state, ``round-N.safetensors`` and ``best.safetensors``
    ``memory/``               clients' private tensors, where the algorithm has any
    ``traces/``               how the algorithm's statistics moved, at some 50 rounds, where it has any
    ``done``                  a summary; there once the run is complete
    ========================  =====================================================================
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        config = self.folder / "experiment.toml"
        if not config.is_file():
            raise UserError(f"{self.folder} is not a run: it has no experiment.toml")
        self.config: dict[str, Any] = tomllib.loads(config.read_text("utf-8"))
        """The experiment as plain data: enough for a report, whatever has become of the code."""
        self.provenance: dict[str, Any] = json.loads((self.folder / "provenance.json").read_text("utf-8"))
        check_config(self.config, config.name)
        check(self.provenance, Provenance, "provenance.json")

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment, checked: its components must be known here."""
        return load(self.folder / "experiment.toml")

    @classmethod
    def create(cls, folder: Path, experiment: Experiment, facts: dict[str, Any]) -> Run:
        """A new run's folder, with `facts` beside its provenance. The config is written last: a folder that has one
        is whole, and another process may have made it meanwhile."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with held(folder):
                if not (folder / "experiment.toml").exists():
                    write_text(folder / "provenance.json", json.dumps({**provenance(), **facts}, indent=2) + "\n")
                    write_text(folder / "experiment.toml", experiment.toml())
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}") from None
        return cls(folder)

    # Metrics

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of all rounds so far, one after the other. A last line cut off by a crash is passed over, and
        so is whatever follows one that is not the next round's record."""
        found: list[dict[str, Any]] = []
        for line in self._written():
            try:
                record = json.loads(line)
                check(record, Line)
            except ValueError:
                break
            if record["round"] != len(found) + 1:
                break
            found.append(record)
        return found

    @property
    def _recorded(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _written(self) -> list[str]:
        return self._recorded.read_text("utf-8", errors="replace").splitlines() if self._recorded.exists() else []

    def append(self, record: Record, seconds: float) -> None:
        with open(self._recorded, "a") as file:
            file.write(json.dumps({**record.as_json(), "seconds": round(seconds, 4)}) + "\n")

    def truncate(self, round: int) -> None:
        """Drop what there is of rounds after the given one: they are about to be played again. A later checkpoint,
        which nothing goes on from, would be counted as one of the last few. Records that cannot be read are kept
        aside, but for one that was cut off."""
        records = self.metrics
        if len(self._written()) > len(records) + 1:
            os.replace(self._recorded, self._recorded.with_suffix(".damaged.jsonl"))
        write_text(self._recorded, "".join(f"{json.dumps(line)}\n" for line in records[:round]))
        for path in (*self._traces(), *self._checkpoints()):
            if _round(path) > round:
                path.unlink()

    # What reports show besides

    @property
    def profile(self) -> dict[str, Any] | None:
        """What the federation looks like (:func:`fedfa.data.profile.profile`), if that is on record."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "federation.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and "image" in found else None

    def keep_profile(self, profile: dict[str, Any]) -> None:
        write_text(self.folder / "federation.json", json.dumps(profile) + "\n")

    def trace(self, round: int, traces: Mapping[str, Tensor]) -> None:
        """Keep an algorithm's traces after a round. Not made durable: nothing is computed from them."""
        if traces:
            write_tensors(self.folder / "traces" / f"round-{round:05d}.safetensors", traces, durable=False)

    def traces(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Rounds, and the algorithm's traces after them. Files that a power cut has left damaged are passed over."""
        for path in self._traces():
            try:
                yield _round(path), read_tensors(path)
            except Exception:  # whatever a damaged file gives
                continue

    def sweep(self) -> None:
        """Delete what a killed process left half-written. Only who holds the folder may do so."""
        for part in self.folder.rglob(f".*{PART}"):
            part.unlink()

    def _traces(self) -> list[Path]:
        return sorted((self.folder / "traces").glob("round-*.safetensors"), key=_round)

    # Checkpoints

    def checkpoint(self, server: ServerState, best: float | None, keep: int) -> None:
        """Write the server's state, and keep the last few."""
        with open(self._recorded, "rb") as file:
            os.fsync(file.fileno())  # a checkpoint is worth nothing without the records up to it
        self._write(f"round-{server.round:05d}", server, best)
        for old in self._checkpoints()[:-keep]:
            old.unlink()

    def checkpoint_best(self, server: ServerState, best: float) -> None:
        self._write("best", server, best)

    def latest(self, tell: Callable[[Damaged], None] | None = None) -> tuple[ServerState, float | None] | None:
        """The newest checkpoint's state, with the best validation metric until then; None if there is none. One
        whose rounds are not all on record is passed over, and so is a damaged one; `tell` hears of both."""
        recorded = self.rounds
        for path in reversed(self._checkpoints()):
            try:
                if _round(path) > recorded:
                    raise Damaged(f"{self._recorded} cannot be read beyond round {recorded}, and {path.name} is later")
                return self.load(path)
            except Damaged as damaged:
                if tell is not None:
                    tell(damaged)
        return None

    def best(self) -> ServerState | None:
        """The server's state after the round that did best on validation data."""
        path = self.folder / "checkpoints" / "best.safetensors"
        return self.load(path)[0] if path.exists() else None

    @staticmethod
    def load(path: Path) -> tuple[ServerState, float | None]:
        """A checkpoint's state, with the best validation metric until then."""
        try:
            tensors, meta = read_tensors(path), read_meta(path)
            parts: dict[str, dict[str, Any]] = {"model": {}, "memory": {}, "centres": {}}
            for name, tensor in tensors.items():
                part, _, rest = name.partition("/")
                parts[part][rest] = tensor
            return ServerState(meta["round"], meta["population"], **parts), meta["best"]
        except (OSError, MemoryError) as error:  # it may be whole all the same
            raise UserError(f"{path} cannot be read: {error}") from None
        except Exception as error:  # whatever a damaged file gives
            raise Damaged(f"{path} is damaged ({error})") from None

    def _write(self, name: str, server: ServerState, best: float | None) -> None:
        parts = {"model": server.model, "memory": server.memory, "centres": server.centres}
        tensors = {f"{part}/{key}": tensor for part, held in parts.items() for key, tensor in held.items()}
        meta = {"format": FORMAT, "round": server.round, "population": server.population, "best": best}
        write_tensors(self.folder / "checkpoints" / f"{name}.safetensors", tensors, meta)

    def restarts(self) -> list[int]:
        """The rounds that there are checkpoints of, besides the best."""
        return [_round(path) for path in self._checkpoints()]

    def _checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("round-*.safetensors"), key=_round)

    # Completion

    @property
    def done(self) -> bool:
        return (self.folder / "done").exists()

    @property
    def promised(self) -> int:
        """Rounds that it had when it was complete; 0 where it is not."""
        try:
            return int(json.loads((self.folder / "done").read_text("utf-8"))["rounds"])
        except OSError:
            return 0
        except (ValueError, KeyError, TypeError):  # damaged: those that it was to have
            return int(self.config["rounds"])

    @property
    def rounds(self) -> int:
        """Rounds on record."""
        return len(self.metrics)

    def finish(self, seconds: float, memory: int | None = None, training: int | None = None) -> None:
        """Mark the run as complete; `memory` is the most that it took, in bytes, and `training` the most before it was
        first evaluated."""
        found = {"memory": memory, "training_memory": training}
        if known := {name: size for name, size in found.items() if size is not None}:
            self._note(**known)
        write_text(self.folder / "done", json.dumps({"rounds": self.rounds, "seconds": round(seconds, 2)}) + "\n")

    def note_resumed(self, round: int) -> None:
        self._note(resumed=[*self.provenance.get("resumed", []), {"round": round, "at": _now()}])

    def note_beside(self, others: int) -> None:
        """That so many other runs share the GPU or the cores with it: its seconds, and on a GPU its memory, are then
        those of all."""
        if others:
            self._note(beside=others)

    def note_processes(self, count: int) -> None:
        """That clients trained in so many processes; the memory on record is the first one's."""
        self._note(processes=count)

    def _note(self, **facts: Any) -> None:
        self.provenance.update(facts)
        write_text(self.folder / "provenance.json", json.dumps(self.provenance, indent=2) + "\n")


def _round(path: Path) -> int:
    """The round that a file is named by."""
    return int(path.stem.removeprefix("round-"))


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a run's folder for this process while it is worked on; an error where another one does."""
    with locked(folder) as ours:
        if not ours:
            raise Busy(f"another process is at work on {folder}")
        yield


def unedited(run: Run) -> Run:
    """The run, if its settings are those that its folder is named by, or else an error: it would go on as another one
    than was asked for."""
    if run.experiment.title != run.folder.name:
        raise UserError(
            f"{run.folder} is called by other settings than its experiment.toml has, which was edited: put that back, "
            "or delete the folder to play it anew"
        )
    return run


def is_free(folder: Path) -> bool:
    """Whether no process is at work on a run's folder."""
    with locked(folder) as ours:
        return ours


def clear(folder: Path) -> None:
    """Delete a run and everything in it, unless another process is at work on it."""
    with held(folder):
        shutil.rmtree(folder)


def provenance() -> dict[str, Any]:
    """What is worth knowing of where and with what a run was made."""
    import numpy
    import torch

    import fedfa

    return {
        "format": FORMAT,
        "started": _now(),
        "fedfa": fedfa.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _commit() -> str | None:
    """The commit of the checkout that the package is run from, with a plus sign if files differ from it. What
    FEDFA_COMMIT says goes first: a container, or a copy without its history, knows from no one else."""
    if told := os.environ.get("FEDFA_COMMIT"):
        return told
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True).stdout

    try:
        if not git("ls-files", "--", Path(__file__).name):
            return None  # inside some other project's checkout
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def find_run(folder: Path | str) -> Run:
    """The run in a folder; where the folder only holds runs, the error says which."""
    path = Path(folder)
    if not path.exists():
        raise UserError(f"no run at {path}")
    inside = sorted(child.parent.name for child in path.glob("*/experiment.toml"))
    if not (path / "experiment.toml").exists() and inside:
        raise UserError(f"{path} holds {len(inside)} runs; name one, such as {path / inside[0]}")
    try:
        run = Run(path)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if (promised := run.promised) > run.rounds:
        raise UserError(
            f"{path} is marked as complete with {promised} rounds, and its metrics.jsonl has {run.rounds}: put that "
            "back, or delete the folder to play it anew"
        )
    return run
