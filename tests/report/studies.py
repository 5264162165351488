"""Studies of runs that were never run, for tests."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

import fedfa
from fedfa.report.entry import Entry
from fedfa.report.study import Study, panels_of

CLIENTS = ("amazon", "caltech", "dslr", "webcam")


def entry(
    scores: Iterable[Mapping[str, float]], seed: int = 0, done: bool = True, metric: str = "accuracy", **settings: Any
) -> Entry:
    """A run on Office-Caltech 10 with these test metrics by client, a mapping a round; validation is the same."""
    metrics = []
    for number, clients in enumerate(scores, start=1):
        held_out = settings.get("held_out", ())
        seen = [value for name, value in clients.items() if name not in held_out]
        unseen = [value for name, value in clients.items() if name in held_out]
        found: dict[str, Any] = {"mean": sum(seen) / len(seen), "unseen": None, "gap": None, "clients": dict(clients)}
        if unseen:
            found["unseen"] = sum(unseen) / len(unseen)
            found["gap"] = found["mean"] - found["unseen"]
        metrics.append(
            {
                "round": number, "clients": list(clients), "loss": 1 / number, "refused": {}, "bytes_up": 1000,
                "bytes_down": 3000, "seconds": 0.5, "val": found, "test": found,
            }
        )  # fmt: skip
    given = {"source": {"name": "office_caltech10", "path": "x"}, "network": "alexnet", "rounds": max(len(metrics), 1)}
    config = tomllib.loads(fedfa.load(given, {"seed": seed, **settings}).toml())
    provenance = {"metric": metric, "hardware": "CPU", "parameters": 123, "memory": 2**30}
    name = f"{config['algorithm']['name']}-seed{seed}"
    return Entry(name, config, provenance, metrics, done)


def study(*entries: Entry, broken: Mapping[str, str] | None = None) -> Study:
    return Study(tuple(panels_of(entries)), entries, dict(broken or {}))


def many_runs(rounds: int = 400) -> Study:
    """Ten algorithms with ten seeds each, four clients."""
    algorithms = (
        "fedavg",
        "fedavgm",
        "fedprox",
        "fedsam",
        "fedbn",
        "fedrobust",
        "fedmix",
        "scaffold",
        "feddyn",
        "fedfa",
    )
    entries = []
    for place, algorithm in enumerate(algorithms):
        for seed in range(10):
            scores = [
                {
                    name: 0.5
                    + 0.3 * (1 - math.exp(-round / 60))
                    + 0.01 * math.sin(7 * place + 3 * seed + 0.7 * round + c)
                    for c, name in enumerate(CLIENTS)
                }
                for round in range(rounds)
            ]
            entries.append(entry(scores, seed, algorithm=algorithm))
    return study(*entries)
