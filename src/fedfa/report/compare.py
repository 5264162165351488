"""Runs side by side: a table, curves, and the numbers behind them."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfa.errors import UserError
from fedfa.experiment import COSMETIC, completed
from fedfa.runs import Run, find_run
from fedfa.statistics import LAST, best_round, select, tested_rounds

BARS = "▁▂▃▄▅▆▇█"
NEARLY, FEW = 0.75, 3
"""The share of configs, and how many at least, whose value of a setting is the usual one, which needs no saying."""


@dataclass(frozen=True)
class Summary:
    """One run in a comparison. Metrics are test metrics, shares of 1."""

    label: str
    run: Run
    rounds: int
    last: float
    """Mean over clients, after the last round."""
    recent: float
    """The same, averaged over those of the last 20 rounds that were evaluated."""
    best: float | None
    """After the round that did best on validation data; None where the run has none."""
    best_round: int | None
    clients: dict[str, float]
    unseen: float | None
    gap: float | None
    refused: int
    seconds: float
    """Of all rounds."""
    played: int
    """Rounds on record, evaluated or not."""
    curve: list[tuple[int, float]]

    @property
    def metric(self) -> str:
        name: str = self.run.provenance["metric"]
        return name


class Comparison:
    """Several runs of comparable experiments."""

    def __init__(self, runs: Sequence[Run]) -> None:
        if not runs:
            raise UserError("nothing to compare: name one run or more")
        metrics = {run.provenance["metric"] for run in runs}
        if len(metrics) > 1:
            raise UserError(f"runs with different metrics do not compare: {', '.join(sorted(metrics))}")
        self.runs = [summarise(run, label) for run, label in zip(runs, labels(runs), strict=True)]

    @property
    def clients(self) -> list[str]:
        return list(dict.fromkeys(name for summary in self.runs for name in summary.clients))

    def title(self, client: str) -> str:
        """A client's name, marked where no run trained on it."""
        unseen = all(client in s.run.config.get("held_out", ()) for s in self.runs)
        return f"{client} (unseen)" if unseen else client

    def rows(self) -> list[dict[str, Any]]:
        """The table: a dictionary a run, metrics in per cent."""
        return [
            {
                "run": s.label,
                "rounds": s.rounds,
                **{self.title(name): _percent(s.clients.get(name)) for name in self.clients},
                "last": _percent(s.last),
                f"last {LAST}": _percent(s.recent),
                "best by val": _percent(s.best),
                **({"unseen": _percent(s.unseen), "gap": _percent(s.gap)} if self._held_out else {}),
                **({"refused": s.refused} if any(other.refused for other in self.runs) else {}),
                "s/round": round(s.seconds / s.played, 3),
            }
            for s in self.runs
        ]

    @property
    def notices(self) -> list[str]:
        """What the runs said when they started, each once: what left the clients, whose BatchNorm was tested with."""
        return list(dict.fromkeys(line for s in self.runs for line in s.run.provenance.get("notices", ())))

    @property
    def _held_out(self) -> bool:
        return any(s.unseen is not None for s in self.runs)

    def write_csv(self, path: Path) -> Path:
        """The curves: a row a run, round and client."""
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["run", "round", "split", "client", "metric", "loss"])
            for s in self.runs:
                for line in s.run.metrics:
                    for split in ("val", "test"):
                        for client, value in line.get(split, {}).get("clients", {}).items():
                            writer.writerow(
                                [s.label, line["round"], split, client, value, line[split]["losses"][client]]
                            )
        return path

    def write_png(self, path: Path) -> Path:
        """The curves as a picture: the mean over clients on the left, each client on the right."""
        from fedfa.report.figures import draw_curves

        return draw_curves(self, path)

    def __str__(self) -> str:
        rows = self.rows()
        lines = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ([text.rjust(width) for text, width in zip(line, widths, strict=True)] for line in lines)
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *rest[1:]]) for line, rest in zip(lines, padded, strict=True)
        )


def compare(*runs: Run | str | Path) -> Comparison:
    """Runs, or their folders, side by side. ``print`` it for a table; `write_png` and `write_csv` for the rest."""
    return Comparison([run if isinstance(run, Run) else find_run(run) for run in runs])


def summarise(run: Run, label: str) -> Summary:
    """A run in a line."""
    lines = run.metrics
    tested = tested_rounds(lines)
    if not tested:
        raise UserError(f"{run.folder} has no evaluated round yet")
    last = select(run, "last")
    best = best_round(tested) if any("val" in line for line in tested) else None
    return Summary(
        label=label,
        run=run,
        rounds=tested[-1]["round"],
        last=last.mean,
        recent=select(run, "last20").mean,
        best=None if best is None else best["test"]["mean"],
        best_round=None if best is None else best["round"],
        clients=last.clients,
        unseen=last.unseen,
        gap=last.gap,
        refused=sum(len(line["refused"]) for line in lines),
        seconds=sum(line["seconds"] for line in lines),
        played=len(lines),
        curve=[(line["round"], line["test"]["mean"]) for line in tested],
    )


def labels(runs: Sequence[Run]) -> list[str]:
    """Short names that tell the runs apart; where settings do not, their folders do."""
    names = told_apart([flat(completed(run.config)) for run in runs], "algorithm.name")
    twice = {name for name in names if names.count(name) > 1}
    return [f"{name} ({run.folder.name})" if name in twice else name for name, run in zip(names, runs, strict=True)]


def told_apart(configs: Sequence[Mapping[str, Any]], first: str, brief: bool = False) -> list[str]:
    """A name for each of some flat configs: its value of `first`, and the settings in which they differ; if `brief`,
    but for :func:`usual` ones. The settings of an algorithm, or of another component, count only where configs with
    that same one differ in them."""
    names = []
    for config in configs:
        told = [text for _, text, is_usual in _differing(config, configs, first) if not (brief and is_usual)]
        names.append(" ".join([str(config[first]), *told]))
    return names


def usual(configs: Sequence[Mapping[str, Any]], first: str) -> list[str]:
    """What those have whose brief names by :func:`told_apart` do not say it: the values that nearly all have."""
    component = first.partition(".")[0]
    found: dict[str, None] = {}
    for config in configs:
        for key, told, is_usual in _differing(config, configs, first):
            if is_usual:
                found[f"{config[first]} {told}" if key.partition(".")[0] == component else told] = None
    return list(found)


def _differing(
    config: Mapping[str, Any], configs: Sequence[Mapping[str, Any]], first: str
) -> Iterator[tuple[str, str, bool]]:
    """The settings in which a config differs from others: key, how they are told, and whether nearly all have that
    value. What a config leaves out goes without saying; so in the others no value of it does."""
    for key, value in config.items():
        peers = _peers(key, config, configs)
        others = [other.get(key) for other in peers if other.get(key) != value]
        is_usual = len(peers) - len(others) >= max(NEARLY * len(peers), FEW) and all(key in other for other in peers)
        if key != first and others:
            name = key.removeprefix(f"{first.partition('.')[0]}.").removesuffix(".name")
            yield key, f"{name}={_short(value, others)}", is_usual


def _peers(key: str, config: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The configs that a setting is compared with: for one of a component, those with the same component."""
    component, _, setting = key.partition(".")
    if not setting or setting == "name":
        return list(configs)
    return [other for other in configs if other.get(f"{component}.name") == config.get(f"{component}.name")]


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with dotted keys, without what does not change numbers."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key in COSMETIC:
            continue
        flat |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Values as a row of bars, from the lowest to the highest of them."""
    step = max(len(values) / width, 1.0)
    picked = [values[min(int(i * step), len(values) - 1)] for i in range(min(width, len(values)))]
    low, high = min(picked), max(picked)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in picked)


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 2)


def cell(value: Any) -> str:
    """A value of the table as text."""
    return "–" if value is None else f"{value:.1f}" if isinstance(value, float) and abs(value) >= 1 else str(value)


def _short(value: Any, others: Sequence[Any]) -> str:
    """A value in a word, which is not that of the others: transforms by their names, and numbers by their first digits,
    if these tell them apart."""
    if isinstance(value, float):
        floats = [one for one in others if isinstance(one, float)]
        formats = (f".{digits}g" for digits in range(4, 17))
        enough = (f"{value:{form}}" for form in formats if all(f"{value:{form}}" != f"{one:{form}}" for one in floats))
        return next(enough, str(value))
    if not isinstance(value, list):
        return str(value)
    names, *rest = ([_name(part) for part in one] for one in (value, *others) if isinstance(one, list))
    whole = [_name(part) + _options(part) for part in value]
    return "+".join(whole if names in rest else names) or "none"


def _name(part: Any) -> str:
    return str(part.get("name", part)) if isinstance(part, dict) else str(part)


def _options(part: Any) -> str:
    """A component's settings, in brackets."""
    if not isinstance(part, dict):
        return ""
    return f"({', '.join(f'{key}={value}' for key, value in part.items() if key != 'name')})"
