"""The paper's number beside a series, where the paper has one for the same federation and method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fedfa.paper import PaperTable, tables
from fedfa.report.study import Panel, Series
from fedfa.statistics import Summary

BENCHMARKS = {"office_caltech10": "office", "domainnet": "domainnet", "prostate": "prostate"}
MAIN = {"office": "office-main", "domainnet": "domainnet-main", "prostate": "prostate-mini"}
"""The tables that name a benchmark's clients."""
EMNIST_CLASSES = 62
METHODS = {
    "fedavg": "FedAvg", "fedavgm": "FedAvgM", "fedprox": "FedProx", "fedsam": "FedSAM", "fedbn": "FedBN",
    "fedrobust": "FedRobust", "fedmix": "FedMix", "fedharmo": "FedHarmo", "fedfa": "FedFA", "fedfa-r": "FedFA-R",
    "fedfa-c": "FedFA-C", "fedfa-direct": "direct fusion",
}  # fmt: skip
AUGMENTATIONS = {"mixup": "Mixup", "manifold-mixup": "Manifold Mixup", "mixstyle": "MixStyle", "moex": "MoEx"}


@dataclass(frozen=True)
class Printed:
    """What the paper prints, in per cent: the average, and numbers by client where it has them."""

    average: float
    clients: dict[str, float]
    unseen: bool = False
    """Whether the average is over clients that were held out."""


def single_runs(found: Mapping[str, tuple[float | None, Summary | None]]) -> str:
    """A sentence on which of the paper's numbers, in per cent, are not where one more run of ours would fall; none
    where there is nothing to say."""
    known = {
        name: (number / 100, bounds)
        for name, (number, ours) in found.items()
        if number is not None and ours is not None and (bounds := ours.one_more) is not None
    }
    outside = [name for name, (number, (low, high)) in known.items() if not low <= number <= high]
    if not known:
        return ""
    but = f" except {'that' if len(outside) == 1 else 'those'} of {', '.join(outside)}" if outside else ""
    return f"The paper's single runs are where one more run of ours would fall{but}."


def printed(panel: Panel, series: Series) -> Printed | None:
    """The paper's numbers for a series. Data and settings that the paper varies elsewhere (FedFA's p and α, its
    statistics, the stages it follows) must be the paper's own; of others, such as the number of rounds, the config
    tells."""
    row = _row(series.config)
    if row is None:
        return None
    unseen = panel.held_out
    for name in _tables(panel, series.config):
        table = tables().get(name)
        if table is None or row not in table.rows:
            continue
        if unseen and not panel.in_turn:
            found = table.number(row, unseen[0])
            return None if found is None else Printed(found, {unseen[0]: found}, unseen=True)
        if not _same_data(panel, series, table):
            return None
        average = table.average(row)
        clients = {column: number for column in table.columns if (number := table.number(row, column)) is not None}
        return None if average is None else Printed(average, clients, unseen=panel.in_turn)
    return None


def _same_data(panel: Panel, series: Series, table: PaperTable) -> bool:
    """Whether these are the paper's data, and not others that are read in the same way: its clients, and for EMNIST
    its letters besides the digits."""
    if panel.source == "emnist":
        return series.entries[0].provenance.get("classes") == EMNIST_CLASSES
    benchmark = BENCHMARKS.get(panel.source)
    clients = table.columns or (tables()[MAIN[benchmark]].columns if benchmark else ())
    return not clients or set(panel.clients) == set(clients)


def _tables(panel: Panel, config: dict[str, Any]) -> list[str]:
    """Names of the paper's tables on this federation, the most detailed first."""
    partition, kinds = config.get("partition", {}), ("variants", "augmentations", "fusion", "layers")
    if panel.source in ("cifar10", "emnist"):
        dirichlet = partition.get("name") == "dirichlet"
        natural = partition.get("name", "natural") == "natural"
        if panel.source == "cifar10":
            return [f"cifar10-dir{partition['alpha']:g}"] if dirichlet else []
        return ["emnist"] if natural else []
    benchmark = BENCHMARKS.get(panel.source)
    if benchmark is None or partition.get("name", "natural") != "natural":
        return []
    if panel.held_out:
        return [f"{benchmark}-unseen"] if panel.in_turn or len(panel.held_out) == 1 else []
    sixths = _sixths(config)
    if sixths is None:
        return []
    if benchmark == "prostate":
        small = ["prostate-mini", *(f"prostate-{kind}" for kind in kinds)] if sixths == 1 else []
        return [*small, f"prostate-{sixths}-6"]
    return [f"{benchmark}-main", *(f"{benchmark}-{kind}" for kind in kinds)] if sixths == 6 else []


def _sixths(config: dict[str, Any]) -> int | None:
    """Which part of the training samples is used, in sixths."""
    try:
        sixths = Fraction(str(config.get("split", {}).get("fraction", 1))).limit_denominator(1000) * 6
    except ValueError:
        return None
    return int(sixths) if sixths.denominator == 1 else None


def _row(config: dict[str, Any]) -> str | None:
    algorithm, augmentation = config["algorithm"], config.get("augmentation", {}).get("name", "none")
    row = METHODS.get(algorithm["name"])
    if algorithm.get("statistics", "paper") != "paper":
        return None
    own = (algorithm.get("p", 0.5), algorithm.get("momentum", 0.99))
    if algorithm["name"].startswith("fedfa") and own != (0.5, 0.99):
        return None
    if stages := config["network"].get("stages"):
        return f"{{{','.join(map(str, sorted(stages)))}}}" if (row, augmentation) == ("FedFA", "none") else None
    if augmentation == "none" or row is None:
        return row
    if augmentation not in AUGMENTATIONS or row not in ("FedAvg", "FedFA"):
        return None
    return AUGMENTATIONS[augmentation] if row == "FedAvg" else f"FedFA + {AUGMENTATIONS[augmentation]}"
