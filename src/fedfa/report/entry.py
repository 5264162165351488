"""One run, as a report sees it; and several that hold out one client after another, as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from torch import Tensor

from fedfa.runs import Run
from fedfa.statistics import RULES, Rule, Selected, select_all


@dataclass(frozen=True, eq=False)
class Entry:
    """One run, as a report sees it."""

    name: str
    config: dict[str, Any]
    provenance: dict[str, Any]
    metrics: list[dict[str, Any]]
    done: bool
    folder: Path | None = None
    """Where the rest is: traces and the federation's profile."""
    data: str = ""
    """Which data it is of, where others of the same settings are of others."""

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def held_out(self) -> str:
        """The clients that only tested it."""
        return " and ".join(self.config.get("held_out", ()))

    @property
    def rounds(self) -> int:
        return max((line["round"] for line in self.metrics), default=0)

    @property
    def metric(self) -> str:
        return str(self.provenance["metric"])

    @property
    def status(self) -> str:
        if self.done:
            return "complete"
        return f"incomplete: {self.rounds} of {self.config['rounds']} rounds"

    @property
    def refused(self) -> int:
        """Updates that were left out."""
        return sum(len(line.get("refused", ())) for line in self.metrics)

    @cached_property
    def selected(self) -> dict[Rule, Selected]:
        """Test metrics by each rule that the run has numbers for."""
        return select_all(self)

    @cached_property
    def profile(self) -> dict[str, Any] | None:
        return Run(self.folder).profile if self.folder else None

    @property
    def traced(self) -> bool:
        """Whether it has kept traces."""
        return self.folder is not None and any((self.folder / "traces").glob("*.safetensors"))

    def traces(self) -> list[tuple[int, dict[str, Tensor]]]:
        return list(Run(self.folder).traces()) if self.folder else []

    @cached_property
    def _evaluated(self) -> dict[str, list[dict[str, Any]]]:
        return {split: [line for line in self.metrics if split in line] for split in ("val", "test")}

    def curve(self, split: str, who: str) -> dict[int, float]:
        """A number by round: `split` is test, val or loss, and `who` a client, `mean` or `unseen`."""
        if split == "loss":
            return {line["round"]: line["loss"] for line in self.metrics if line.get("loss") is not None}
        found = {}
        for line in self._evaluated[split]:
            scores = line[split]
            value = scores.get(who) if who in ("mean", "unseen") else scores.get("clients", {}).get(who)
            if value is not None:
                found[line["round"]] = value
        return found

    def cost(self) -> dict[str, float | None]:
        """Seconds a round (the median: a first round may capture graphs) and in all, bytes up and down a client and
        round and in all, peak memory."""
        lines = self.metrics
        seconds = [line["seconds"] for line in lines if line.get("seconds") is not None]
        up = [line["bytes_up"] for line in lines if "bytes_up" in line]
        down = [line["bytes_down"] for line in lines if "bytes_down" in line]
        sent = [
            (line["bytes_up"] + line["bytes_down"]) * len(line["clients"])
            for line in lines
            if "bytes_up" in line and "bytes_down" in line
        ]
        return {
            "seconds": median(seconds) if seconds else None,
            "total_seconds": sum(seconds) if seconds else None,
            "up": mean(up),
            "down": mean(down),
            "traffic": sum(sent) if sent else None,
            "memory": self.provenance.get("memory"),
        }


@dataclass(frozen=True, eq=False)
class InTurn(Entry):
    """Runs of one method and seed that hold out one client each, as one. Every client's numbers are those of the run
    that it took no part in."""

    parts: tuple[Entry, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Entry]) -> InTurn:
        first = parts[0]
        return cls(
            name=first.name,
            config={**first.config, "held_out": [part.held_out for part in parts]},
            provenance=first.provenance,
            metrics=_merged(parts),
            done=all(part.done for part in parts),
            data=first.data,
            parts=tuple(parts),
        )

    @cached_property
    def selected(self) -> dict[Rule, Selected]:
        """By each rule that all of them have numbers for; each has its own best round."""
        found: dict[Rule, Selected] = {}
        for rule in RULES:
            own = {part.held_out: part.selected[rule] for part in self.parts if rule in part.selected}
            unseen = {name: one.unseen for name, one in own.items() if one.unseen is not None}
            if len(unseen) == len(self.parts):
                seen, new = fmean(one.mean for one in own.values()), fmean(unseen.values())
                found[rule] = Selected(seen, new, seen - new, unseen)
        return found

    @cached_property
    def profile(self) -> dict[str, Any] | None:
        return next((part.profile for part in self.parts if part.profile is not None), None)

    def cost(self) -> dict[str, float | None]:
        """What one of them costs, on average."""
        costs = [part.cost() for part in self.parts]
        return {name: mean([value for cost in costs if (value := cost[name]) is not None]) for name in costs[0]}


def _merged(parts: Sequence[Entry]) -> list[dict[str, Any]]:
    """Metrics of the rounds that all parts have, and of those that all have evaluated."""
    by_round = [{line["round"]: line for line in part.metrics} for part in parts]
    merged = []
    for round in sorted(set.intersection(*(set(lines) for lines in by_round))):
        lines = [own[round] for own in by_round]
        line: dict[str, Any] = {"round": round, "refused": [name for one in lines for name in one.get("refused", ())]}
        losses = [one["loss"] for one in lines if one.get("loss") is not None]
        if losses:
            line["loss"] = fmean(losses)
        for split in ("val", "test"):
            if all(split in one and one[split].get("unseen") is not None for one in lines):
                line[split] = {
                    "mean": fmean(one[split]["mean"] for one in lines),
                    "unseen": fmean(one[split]["unseen"] for one in lines),
                    "clients": {part.held_out: one[split]["unseen"] for part, one in zip(parts, lines, strict=True)},
                }
        merged.append(line)
    return merged


def mean(values: Sequence[float]) -> float | None:
    """The mean, if there is anything to take it of."""
    return math.fsum(values) / len(values) if values else None
