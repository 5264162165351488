"""A run in one small file: enough for tables, curves and costs; no checkpoints, and no paths of any machine."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedfa.errors import UserError
from fedfa.experiment import COSMETIC, Experiment, load
from fedfa.files import write_text
from fedfa.records import SummaryFile, check, check_config
from fedfa.runs import Run, find_run
from fedfa.statistics import DIGITS, Rule, Selected, best_round, recent, select_all, tested_rounds

FORMAT = 1
MACHINE = {"name", "device", "engine", "threads", "precision"}
"""Settings that say where and how fast an experiment runs, not which one it is."""
KEPT = (
    "fedfa", "commit", "started", "python", "torch", "numpy", "platform", "cores", "hardware", "device", "engine",
    "threads", "metric", "parameters", "samples", "notices", "plugins", "resumed", "memory",
    "training_memory", "beside", "data", "classes",
)  # fmt: skip
"""What is kept of a run's provenance."""
EVALUATED = ("mean", "unseen", "gap")


@dataclass(frozen=True)
class RunSummary:
    """What is kept of a run. `metrics` has a line a round, as the run itself: losses, seconds, bytes, and means over
    clients of all rounds; numbers by client of those of the last 20 rounds that were evaluated and of the best by
    validation, which is what tables are made of. Who trained in a round is not kept, only how many."""

    name: str
    config: dict[str, Any]
    provenance: dict[str, Any]
    metrics: list[dict[str, Any]]
    done: bool

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def arithmetic(self) -> str:
        """What its products were taken in."""
        return arithmetic_of(self)

    @cached_property
    def selected(self) -> dict[Rule, Selected]:
        """Test metrics by every rule that there are numbers for."""
        return select_all(self)

    @cached_property
    def identity(self) -> str | None:
        """What :func:`identity` says of its experiment; None where that is no longer known here."""
        try:
            return identity(self.experiment)
        except UserError:
            return None

    @property
    def experiment(self) -> Experiment:
        return load({**self.config, "name": "summary"})


def arithmetic(precision: str, device: str) -> str:
    """What products are taken in where a precision is asked for: tf32 is float32 where there is no CUDA."""
    return "float32" if precision == "tf32" and not device.startswith("cuda") else precision


def arithmetic_of(run: Run | RunSummary) -> str:
    """What a run's products were taken in."""
    return arithmetic(str(run.config.get("precision", "tf32")), str(run.provenance.get("device", "cpu")))


def identity(experiment: Experiment) -> str:
    """A name for an experiment that is the same on every machine: where the data lie, what is computed on and with
    what precision do not count. (Whether the data are the same a run's provenance tells.)"""
    plain = experiment.model_dump(mode="json", exclude=COSMETIC | MACHINE)
    plain["source"].pop("path", None)
    plain["split"]["file"] = experiment.split_file()
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def weighty(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Those that make other numbers: not where the data lie, nor what computes."""
    return {key: value for key, value in overrides.items() if key not in {*MACHINE, *COSMETIC, "source.path"}}


def summary_of(run: Run) -> RunSummary:
    """The summary of a run."""
    config = json.loads(json.dumps(run.config))
    config["source"].pop("path", None)
    if config.get("split", {}).get("file"):
        config["split"]["file"] = run.experiment.split_file()
    provenance = {key: run.provenance[key] for key in KEPT if run.provenance.get(key) not in (None, [], {})}
    lines = run.metrics
    detailed = {line["round"] for line in recent(tested_rounds(lines))}
    if any("val" in line for line in lines):
        detailed.add(best_round(tested_rounds(lines))["round"])
    thinned = [_thinned(line, line["round"] in detailed) for line in lines]
    return RunSummary(run.folder.name, config, provenance, thinned, run.done)


def _thinned(line: Mapping[str, Any], detailed: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {key: line[key] for key in ("round", "seconds") if key in line}
    kept |= {
        "loss": _round(line["loss"]),
        "clients": ["?"] * len(line["clients"]),
        "refused": dict(line.get("refused", {})),
    }
    kept |= {key: line[key] for key in ("bytes_up", "bytes_down") if key in line}
    for split in ("val", "test"):
        if split in line:
            clients = line[split]["clients"] if detailed and split == "test" else {}
            kept[split] = {key: _round(line[split].get(key)) for key in EVALUATED}
            kept[split] |= {"clients": {name: _round(value) for name, value in clients.items()}, "losses": {}}
    return kept


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


# Files


def write_summary(summary: RunSummary, folder: Path) -> Path:
    """Write a summary into a folder, by the run's name."""
    path = folder / f"{summary.name}.json"
    write_text(path, _dumped(summary))
    return path


def _dumped(summary: RunSummary) -> str:
    """Columns, since lines would repeat their keys every round; a column a line of the file."""
    lines = summary.metrics
    columns: dict[str, list[Any]] = {
        key: [line.get(key) for line in lines] for key in ("round", "loss", "seconds", "bytes_up", "bytes_down")
    }
    columns["trained"] = [len(line["clients"]) for line in lines]
    for split in ("val", "test"):
        columns |= {f"{split}.{key}": [line.get(split, {}).get(key) for line in lines] for key in EVALUATED}
    content = {
        "format": FORMAT,
        "name": summary.name,
        "done": summary.done,
        "config": summary.config,
        "provenance": summary.provenance,
        "selected": {rule: vars(found) for rule, found in summary.selected.items()},
        "clients": {
            str(line["round"]): line["test"]["clients"] for line in lines if line.get("test", {}).get("clients")
        },
        "refused": {str(line["round"]): line["refused"] for line in lines if line["refused"]},
        "rounds": {key: _squeezed(column) for key, column in columns.items() if any(x is not None for x in column)},
    }
    parts = []
    for key, value in content.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"  {json.dumps(name)}: {_compact(item)}" for name, item in value.items())
            parts.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            parts.append(f" {json.dumps(key)}: {_compact(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _squeezed(column: list[Any]) -> Any:
    """A column of one value is that value."""
    return column[0] if len(column) > 1 and all(value == column[0] for value in column) else column


@contextmanager
def no_collection() -> Iterator[None]:
    """While many files are read, Python does not search for cycles: it would look again and again at what it has read
    so far, which takes a fifth of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def read_summary(path: Path, content: Any = None) -> RunSummary:
    """A summary that :func:`write_summary` has written; `content` is what is in the file, where that is known."""
    try:
        found = json.loads(path.read_text("utf-8")) if content is None else content
        if found["format"] != FORMAT:
            raise UserError(f"{path} has format {found['format']}, and this version reads {FORMAT}")
        check(found, SummaryFile)
        check_config(found["config"], "config")
        return RunSummary(found["name"], found["config"], found["provenance"], _lines(found), found["done"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"{path} is not the summary of a run: {what}") from None


def _lines(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns, refused, clients = found["rounds"], found["refused"], found["clients"]
    rounds = columns.get("round", [])

    def column(key: str) -> list[Any]:
        values = columns.get(key)
        return values if isinstance(values, list) else [values] * len(rounds)

    losses, trained = column("loss"), column("trained")
    plain = [(key, column(key)) for key in ("seconds", "bytes_up", "bytes_down")]
    splits = [(split, [(key, column(f"{split}.{key}")) for key in EVALUATED]) for split in ("val", "test")]
    lines = []
    for place, number in enumerate(rounds):
        line: dict[str, Any] = {"round": number, "loss": losses[place], "clients": ["?"] * (trained[place] or 0)}
        line["refused"] = refused.get(str(number), {})
        line |= {key: values[place] for key, values in plain if values[place] is not None}
        for split, scores in splits:
            if scores[0][1][place] is not None:
                own = clients.get(str(number), {}) if split == "test" else {}
                line[split] = {key: values[place] for key, values in scores} | {"clients": own, "losses": {}}
        lines.append(line)
    return lines


def find_summaries(folder: Path, tell: bool = True) -> dict[str, list[Run | RunSummary]]:
    """All complete runs in a folder, and in the folders in it, by their :func:`identity`: run folders, and files of
    summaries, of which one may be named itself; runs of one experiment, on two machines or of two folders of data say,
    as they were started. Other JSON files are passed over, and so are damaged ones, which are told of; of damaged run
    folders it is up to `tell`, since who plays runs will meet them again."""
    if folder.is_file():
        summary = read_summary(folder)
        return {summary.identity: [summary]} if summary.done and summary.identity is not None else {}
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    found: list[tuple[str, Run | RunSummary]] = []
    for place, inner, files in os.walk(folder):
        if "experiment.toml" in files:
            inner.clear()  # checkpoints and the like
            if "done" in files:
                try:
                    run = find_run(place)
                except UserError as error:
                    if tell:
                        print(f"{error}: passed over", file=sys.stderr)
                    continue
                with suppress(UserError):  # of an algorithm that is not known here: none of ours
                    if run.experiment.split["file"] and run.experiment.title != run.folder.name:
                        continue  # its splits are not those of the file as it is now
                    found.append((identity(run.experiment), run))
            continue
        for name in files:
            path = Path(place) / name
            if name.endswith(".json") and (content := _claims(path)) is not False:
                try:
                    summary = read_summary(path, content)
                except UserError as error:
                    print(f"{error}: passed over", file=sys.stderr)
                    continue
                if summary.done and summary.identity is not None:
                    found.append((summary.identity, summary))
    by_name: dict[str, list[Run | RunSummary]] = {}
    for name, one in sorted(found, key=lambda item: str(item[1].provenance.get("started", ""))):
        by_name.setdefault(name, []).append(one)
    return by_name


def _claims(path: Path) -> Any:
    """What is in a JSON file that claims to be a summary, or None where that cannot be read; False for others."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None if re.search(r"-seed\d+-[0-9a-f]{8}\.json$", path.name) else False
    return found if isinstance(found, dict) and {"format", "config"} <= found.keys() else False
