"""Trackers: TensorBoard's files byte by byte and as TensorBoard reads them; none ends a run or changes its name."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fedfa
from fedfa import Run, UserError, trackers
from fedfa.server import Watcher
from fedfa.trackers import crc32c, event_files


class Noting(Watcher):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def noticed(self, line: str) -> None:
        self.lines.append(line)


def test_checksum_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def records(path: Path) -> Iterator[bytes]:
    """The records of an event file, checksums checked."""
    content, place = path.read_bytes(), 0
    while place < len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        head, body = content[place : place + 8], content[place + 12 : place + 12 + length]
        for part, at in ((head, place + 8), (body, place + 12 + length)):
            crc = crc32c(part)
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack_from("<I", content, at) == (masked,)
        yield body
        place += 16 + length


def test_tensorboards_files_are_there_by_default(play: Callable[..., Run]) -> None:
    run = play()
    (path,) = event_files(run.folder)
    first, *rest = records(path)
    assert first.endswith(b"\x1a\x0dbrain.Event:2")
    assert len(rest) == run.rounds
    assert b"test by client/north" in rest[0] and b"loss" in rest[0]
    assert not event_files(play("off", trackers=()).folder)


READER = """
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1])
found.Reload()
print([(event.step, round(event.value, 5)) for event in found.Scalars("test/mean")])
"""


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="TensorBoard is not installed")
def test_tensorboard_reads_them_and_forgets_what_is_played_again(tiny: dict[str, Any], tmp_path: Path) -> None:
    class Stop(Watcher):
        def round_done(self, record: Any) -> None:
            if record.round == 3:
                raise RuntimeError("as if the power had failed")

    settings = {"rounds": 4, "checkpoint_every": 2}
    with pytest.raises(RuntimeError):
        fedfa.run(tiny, root=tmp_path, watcher=Stop(), **settings)
    run = fedfa.run(tiny, root=tmp_path, **settings)
    assert len(event_files(run.folder)) == 2
    words = [sys.executable, "-W", "ignore", "-c", READER, str(run.folder / "tensorboard")]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    wanted = [(line["round"], round(line["test"]["mean"], 5)) for line in run.metrics]
    assert eval(told) == wanted


def test_trackers_do_not_change_names(tiny: dict[str, Any]) -> None:
    titles = {fedfa.load(tiny, {"trackers": names}).title for names in ([], ["tensorboard"], ["wandb", "mlflow"])}
    assert len(titles) == 1
    assert fedfa.load(tiny, {"trackers": "mlflow"}).trackers == ("mlflow",)
    with pytest.raises(UserError, match="no tracker 'tensorbord'; did you mean 'tensorboard'"):
        fedfa.load(tiny, {"trackers": ["tensorbord"]})


def test_a_tracker_that_fails_ends_no_run(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(trackers.TensorBoard):
        def log(self, round: int, numbers: Mapping[str, float]) -> None:
            if round == 2:
                raise OSError("disk\nfull")
            super().log(round, numbers)

    monkeypatch.setitem(trackers.KINDS, "tensorboard", Broken)
    watcher = Noting()
    run = fedfa.run(tiny, root=tmp_path, watcher=watcher)
    assert run.done and run.rounds == 3
    assert watcher.lines == ["the run goes on without its tracker tensorboard: OSError: disk full"]


def test_a_tracker_that_is_not_installed_is_told_of(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    watcher = Noting()
    monkeypatch.setattr(trackers.WandB, "start", _missing)
    run = fedfa.run(tiny, root=tmp_path, watcher=watcher, trackers=["wandb"])
    assert run.done
    assert watcher.lines == ["the run goes on without its tracker wandb: pip install 'fedfa[wandb]'"]


def _missing(self: Any, run: Run, round: int) -> None:
    raise ModuleNotFoundError("No module named 'wandb'")


def test_wandb_is_offline_unless_asked(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    logged: list[tuple[int, float]] = []
    ended: list[int] = []
    fake = ModuleType("wandb")

    def init(**settings: Any) -> Any:
        asked.update(settings)
        return SimpleNamespace(
            log=lambda numbers, step: logged.append((step, numbers["test/mean"])),
            finish=lambda **how: ended.append(how["exit_code"]),
        )

    fake.init = init  # type: ignore[attr-defined]  # a module made for this test
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = fedfa.run(tiny, root=tmp_path, trackers=["wandb"])
    assert asked["mode"] == "offline" and asked["id"] == run.folder.name and asked["dir"] == str(run.folder)
    assert logged == [(line["round"], line["test"]["mean"]) for line in run.metrics]
    assert ended == [0]


def test_mlflow_gets_settings_and_rounds(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Client:
        def __init__(self, uri: str) -> None:
            calls.append(("uri", uri))

        def get_experiment_by_name(self, name: str) -> None: ...

        def create_experiment(self, name: str) -> str:
            return name

        def search_runs(self, *_: Any, **__: Any) -> list[Any]:
            return []

        def create_run(self, place: str, tags: dict[str, str]) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id="id"))

        def log_param(self, run: str, key: str, value: Any) -> None:
            calls.append((f"param {key}", value))

        def log_batch(self, run: str, metrics: list[Any]) -> None:
            calls.append(("batch", {metric[0]: (metric[3], metric[1]) for metric in metrics}))

        def set_terminated(self, run: str, status: str) -> None:
            calls.append(("end", status))

    parts = {"mlflow": ModuleType("mlflow")}
    for name, attribute in (("tracking", {"MlflowClient": Client}), ("entities", {"Metric": lambda *given: given})):
        parts[f"mlflow.{name}"] = ModuleType(f"mlflow.{name}")
        vars(parts[f"mlflow.{name}"]).update(attribute)
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = fedfa.run(tiny, root=tmp_path, trackers=["mlflow"])
    told = dict(calls)
    assert told["uri"] == f"sqlite:///{tmp_path.resolve() / 'mlflow.db'}"
    assert told["param algorithm.name"] == "fedavg" and told["param rounds"] == 3
    assert told["batch"]["test/mean"] == (3, run.metrics[-1]["test"]["mean"])
    assert told["end"] == "FINISHED"
