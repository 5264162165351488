"""What a report is of: runs, those that differ by their seed alone in one series, and series of one federation beside
each other."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fedfa.errors import UserError, some
from fedfa.experiment import COSMETIC, completed
from fedfa.report.compare import flat, told_apart, usual
from fedfa.report.entry import Entry, InTurn
from fedfa.reproduce.summary import no_collection, read_summary
from fedfa.runs import Run, find_run
from fedfa.statistics import RULES, Difference, Rule, Summary, holm, paired, summarise

BESIDES = COSMETIC | {"name", "seed", "device", "threads", "engine", "source.path"}
"""Settings that do not make a run one of another series."""
FEDERATION = ("source", "partition", "split", "held_out", "rounds")
"""Settings that make a federation, as methods are compared on it: after a tenth of the rounds nothing is."""
OWN = ("_folders", "emnist")
"""How sources end that read whatever is in someone's own folders, or what is divided by writers as EMNIST is."""
MOST_TITLES, MOST_SOURCES = 3, 8
"""Federations that a report's title names, and names of data where these are more."""
MOST_CLIENTS = 12
"""Clients that have columns and curves of their own."""
OWN_TO = ("algorithm", "augmentation")
"""What methods have of their own; in the rest they are alike, or not."""
FIRST = ("fedavg",)
"""Algorithms that others are compared with, where there are any of them."""


@dataclass(frozen=True, eq=False)
class Series:
    """Runs that differ by their seed alone."""

    label: str
    entries: tuple[Entry, ...]

    @cached_property
    def used(self) -> tuple[Entry, ...]:
        """The runs that numbers are taken from: the complete ones, or where none is complete, all; one a seed."""
        known = [entry for entry in self.entries if entry.selected]
        complete = [entry for entry in known if entry.done] or known
        one: dict[int, Entry] = {}
        for entry in sorted(complete, key=lambda entry: -entry.rounds):
            one.setdefault(entry.seed, entry)
        return tuple(one[seed] for seed in sorted(one))

    @cached_property
    def complete(self) -> bool:
        return all(entry.done for entry in self.used) and bool(self.used)

    @property
    def algorithm(self) -> str:
        return str(self.entries[0].config["algorithm"]["name"])

    @property
    def augmented(self) -> bool:
        """Whether an augmentation was added to the algorithm."""
        return bool(self.config.get("augmentation", {"name": "none"})["name"] != "none")

    @property
    def config(self) -> dict[str, Any]:
        return self.entries[0].config

    def by_seed(self, rule: Rule, who: str = "mean") -> dict[int, float]:
        """A test metric of each seed: of a client, the `mean` over those that took part, `unseen` or the `gap`."""
        found: dict[int, float] = {}
        for entry in self.used:
            if (chosen := entry.selected.get(rule)) is not None:
                own = {**chosen.clients, "mean": chosen.mean, "unseen": chosen.unseen, "gap": chosen.gap}
                if (value := own.get(who)) is not None:
                    found[entry.seed] = value
        return found

    def summary(self, rule: Rule, who: str = "mean") -> Summary | None:
        values = self.by_seed(rule, who)
        return summarise(values.values()) if values else None


@dataclass(frozen=True)
class Compared:
    """A series against another: the difference by seed, and its p-value, corrected for the number of series."""

    series: Series
    base: Series
    difference: Difference
    holm: float | None


@dataclass(frozen=True)
class Panel:
    """Series of one federation."""

    title: str
    series: tuple[Series, ...]
    clients: tuple[str, ...] = field(default=())
    in_turn: bool = False
    """Whether clients were held out, one after another, by runs of their own."""
    within: bool = False
    """Whether its runs are in such a panel too."""
    lacking: tuple[str, ...] = ()
    """Where clients were held out in turn: methods, and seeds of them, that were not without each of them."""
    usual: tuple[str, ...] = ()
    """Settings of those whose labels do not say otherwise."""

    @property
    def metric(self) -> str:
        return self.series[0].entries[0].metric

    @property
    def held_out(self) -> list[str]:
        return list(self.series[0].config.get("held_out", ()))

    @property
    def primary(self) -> str:
        """Whose metric methods are compared by: the mean over clients, or where some are held out, over those."""
        return "unseen" if self.held_out else "mean"

    @property
    def source(self) -> str:
        return str(self.series[0].config["source"]["name"])

    @property
    def shown_clients(self) -> tuple[str, ...]:
        """Those that have a place of their own."""
        return self.clients if len(self.clients) <= MOST_CLIENTS else ()

    @cached_property
    def rules(self) -> list[Rule]:
        """The rules that some run has numbers for."""
        return [rule for rule in RULES if any(rule in entry.selected for s in self.series for entry in s.used)]

    @cached_property
    def comparable(self) -> tuple[Series, ...]:
        """Those that are complete: what others have so far says little. All, where none is."""
        return tuple(series for series in self.series if series.complete) or self.series

    @cached_property
    def ranked(self) -> tuple[Series, ...]:
        """Of these, those that may be called the best: no single run, where others have seeds."""
        return tuple(series for series in self.comparable if len(series.used) > 1) or self.comparable

    @cached_property
    def baseline(self) -> int:
        """Which series others are compared with at first: of equals the one with most seeds."""
        order = sorted(self.comparable, key=lambda one: (one.algorithm not in FIRST, one.augmented, -len(one.used)))
        return self.series.index(order[0])

    @cached_property
    def baselines(self) -> tuple[int, ...]:
        """Which series each is compared with at first, by their places: of several FedAvg, with other transforms say,
        the one that has most settings in common with it."""
        firsts = [one for one in self.comparable if one.algorithm in FIRST and not one.augmented]
        main, settings = self.baseline, {one: _settings(one.entries[0]) for one in self.series}

        def apart(one: Series, other: Series) -> int:
            keys = {
                key for key in (settings[one].keys() | settings[other].keys()) if key.partition(".")[0] not in OWN_TO
            }
            return sum(settings[one].get(key) != settings[other].get(key) for key in keys)

        def nearest(one: Series) -> int:
            if one in firsts or not firsts:
                return main
            order = sorted(firsts, key=lambda base: (apart(one, base), base is not self.series[main], -len(base.used)))
            return self.series.index(order[0])

        return tuple(nearest(one) for one in self.series)

    @cached_property
    def bases(self) -> list[Series]:
        """Those of them that there are."""
        return [self.series[place] for place in sorted(set(self.baselines))]

    @property
    def base_title(self) -> str:
        """What others are compared with, as a heading tells it."""
        return self.bases[0].label if len(self.bases) == 1 else f"own {self.bases[0].algorithm}"

    def client_title(self, name: str) -> str:
        return f"{name} (unseen)" if name in self.held_out and not self.in_turn else name

    @cached_property
    def profile(self) -> dict[str, Any] | None:
        """The federation in numbers, by the run with the lowest seed that has it."""
        entries = sorted((entry for series in self.series for entry in series.entries), key=lambda entry: entry.seed)
        return next((entry.profile for entry in entries if entry.profile is not None), None)

    def compared(self, rule: Rule, baseline: int | None = None, who: str = "") -> list[Compared]:
        """Every other comparable series against the `baseline`-th, or its own of the :attr:`baselines`, seed by seed,
        by the :attr:`primary` metric or a client's. Corrected for each other (Holm)."""
        who = who or self.primary
        found = []
        for series, own in zip(self.series, self.baselines, strict=True):
            base = self.series[own if baseline is None else baseline]
            if series is base or series not in self.comparable or base not in self.comparable:
                continue
            difference = paired(series.by_seed(rule, who), base.by_seed(rule, who))
            if difference is not None:
                found.append((series, base, difference))
        ps = holm([difference.p for _, _, difference in found if difference.p is not None])
        corrected = iter(ps)
        return [
            Compared(series, base, difference, None if difference.p is None else next(corrected))
            for series, base, difference in found
        ]


@dataclass(frozen=True)
class Study:
    """Everything that a report shows."""

    panels: tuple[Panel, ...]
    entries: tuple[Entry, ...]
    broken: Mapping[str, str]
    """Folders and files that are no runs one can read, and why."""

    @property
    def title(self) -> str:
        """The federations, or where they are many, what their data are."""
        titles = [panel.title for panel in self.panels if not panel.within]
        if len(titles) > MOST_TITLES:
            titles = list(dict.fromkeys(re.split("[ ,]", title)[0] for title in titles))
        return " · ".join(titles[:MOST_SOURCES] + ["…"] * (len(titles) > MOST_SOURCES))

    @classmethod
    def of(cls, paths: Sequence[Path | str]) -> Study:
        """The runs at paths: their folders, folders that hold such folders, or summaries of runs (JSON)."""
        entries, broken = collect(paths)
        if not entries:
            why = next((f"{place} {what}" for place, what in broken.items()), "name one run or more")
            raise UserError(f"there is nothing to report: {why}")
        return cls(tuple(panels_of(entries)), tuple(entries), broken)


def collect(paths: Sequence[Path | str]) -> tuple[list[Entry], dict[str, str]]:
    """The runs at paths, and what could not be read. A path that is not there is an error, and so is a folder
    without anything in it that could be a run: both are a slip of whoever typed them."""
    entries: list[Entry] = []
    broken: dict[str, str] = {}
    places = dict.fromkeys(found for path in paths for found in _places(Path(path)))
    with no_collection():
        for place in places:
            try:
                entries.append(_summary(place) if place.is_file() else _entry(find_run(place)))
            except UserError as error:
                broken[str(place)] = str(error).removeprefix(f"{place} ")
            except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
                broken[str(place)] = f"cannot be read: {type(error).__name__} {error}"
    whole = {entry.name for entry in entries if entry.folder is not None}  # which have more than their summaries
    return [entry for entry in entries if entry.folder is not None or entry.name not in whole], broken


def _places(path: Path) -> list[Path]:
    if path.is_file() or (path / "experiment.toml").is_file() or (path / "provenance.json").is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"no run at {path}")
    inside = sorted({file.parent for name in ("experiment.toml", "provenance.json") for file in path.glob(f"*/{name}")})
    inside = inside or sorted(file.parent for file in path.rglob("experiment.toml")) or sorted(path.rglob("*.json"))
    if not inside:
        raise UserError(f"{path} is not a run, and holds none: runs have an experiment.toml")
    return inside


def _entry(run: Run) -> Entry:
    return _whole(Entry(run.folder.name, run.config, run.provenance, run.metrics, run.done, run.folder))


def _summary(path: Path) -> Entry:
    found = read_summary(path)
    return _whole(Entry(found.name, found.config, found.provenance, found.metrics, found.done))


def _whole(entry: Entry) -> Entry:
    """The entry, if it has what every run has: an error here, and not in the middle of a page."""
    _ = (entry.metric, entry.seed, entry.status, entry.selected, entry.cost())
    _ = [entry.config[component]["name"] for component in ("source", "algorithm", "network")]
    return entry


def panels_of(entries: Sequence[Entry]) -> list[Panel]:
    """The runs by their federations."""
    federations: dict[str, list[Entry]] = {}
    for entry in _told_data(entries):
        federations.setdefault(_key(entry), []).append(entry)
    titles = _titles(list(federations.values()))
    panels = [_panel(t + _without(held[0]), held) for t, held in zip(titles, federations.values(), strict=True)]
    turns: dict[tuple[str, str], list[Panel]] = {}
    for title, panel in zip(titles, panels, strict=True):
        if len(panel.held_out) == 1:
            turns.setdefault((title, panel.metric), []).append(panel)
    found = []
    for (title, _), held in turns.items():
        held.sort(key=lambda panel: panel.held_out)
        whole_turn = _in_turn(title, held) if len(held) > 1 else None
        if whole_turn is not None:
            found += [whole_turn, *(replace(panel, within=True) for panel in held)]
            panels = [panel for panel in panels if panel not in held]
    return [*panels, *found]


def _told_data(entries: Sequence[Entry]) -> list[Entry]:
    """The runs; where those of one source are of several sets of data, two folders of someone's own say, they tell
    which. Settings alone would make one federation of them, since where data lie is none of them."""
    known: dict[str, set[str]] = {}
    for entry in entries:
        known.setdefault(_source(entry), set()).add(entry.provenance.get("data", ""))
    return [
        entry
        if len(known[_source(entry)] - {""}) < 2
        else replace(entry, data=str(entry.provenance.get("data", "unknown")))
        for entry in entries
    ]


def _source(entry: Entry) -> str:
    return json.dumps({key: value for key, value in entry.config["source"].items() if key != "path"}, sort_keys=True)


def _titles(federations: Sequence[Sequence[Entry]]) -> list[str]:
    """What each federation is called: its source, or for folders of someone's own the experiment, and what tells it
    from others of that name."""
    named: dict[str, dict[int, dict[str, Any]]] = {}
    for number, entries in enumerate(federations):
        settings = _without_held_out(_federation(entries[0]))
        experiments = {str(entry.config.get("name")) for entry in entries}
        if settings["source.name"].endswith(OWN) and len(experiments) == 1:
            settings["source.name"] = experiments.pop()
        named.setdefault(settings["source.name"], {})[number] = settings
    titles: dict[int, str] = {}
    for found in named.values():
        titles |= zip(found, told_apart(list(found.values()), "source.name"), strict=True)
    return [titles[number] for number in range(len(federations))]


def _in_turn(title: str, panels: Sequence[Panel]) -> Panel | None:
    """Panels of one federation, which hold out one client each, as one: of the methods and seeds that all have."""
    methods: dict[str, list[dict[int, Entry]]] = {}
    called: dict[str, str] = {}
    for panel in panels:
        for series in panel.series:
            method = json.dumps(_without_held_out(_settings(series.entries[0])), sort_keys=True, default=str)
            methods.setdefault(method, []).append({entry.seed: entry for entry in series.used})
            called.setdefault(method, series.label)
    lacking = []
    for method, found in methods.items():
        if len(found) < len(panels):
            lacking.append(called[method])
        else:
            seeds = [*map(frozenset, found)]
            incomplete = sorted(frozenset[int]().union(*seeds) - seeds[0].intersection(*seeds))
            lacking += [f"{called[method]}, seed {', '.join(map(str, incomplete))}"] if incomplete else []
    entries = [
        InTurn.of([own[seed] for own in found])
        for found in methods.values()
        if len(found) == len(panels)
        for seed in sorted(set.intersection(*(set(own) for own in found)))
    ]
    held = [name for panel in panels for name in panel.held_out]
    everyone = {name for panel in panels for name in panel.clients}
    who = "every client" if everyone <= set(held) else some(held)
    made = f"{title}, {who} held out in turn"
    return replace(_panel(made, entries), in_turn=True, lacking=tuple(lacking)) if entries else None


def _without_held_out(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "held_out"}


def _without(entry: Entry) -> str:
    return f", {entry.held_out} held out" if entry.held_out else ""


def _panel(title: str, entries: Sequence[Entry]) -> Panel:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(json.dumps(_settings(entry), sort_keys=True, default=str), []).append(entry)
    settings = [_settings(held[0]) for held in groups.values()]
    labels = told_apart(settings, "algorithm.name", brief=True)
    series = [
        Series(label, tuple(sorted(held, key=lambda entry: entry.seed)))
        for label, held in zip(labels, groups.values(), strict=True)
    ]
    series.sort(key=lambda one: (one.algorithm not in FIRST, one.algorithm, one.augmented, one.label))
    clients = dict.fromkeys(
        name for one in series for entry in one.used for chosen in entry.selected.values() for name in chosen.clients
    )
    return Panel(title, tuple(series), tuple(clients), usual=tuple(usual(settings, "algorithm.name")))


def _settings(entry: Entry) -> dict[str, Any]:
    config = _completed(json.dumps({**entry.config, "name": "report", "seed": 0}, sort_keys=True))
    settings = {key: value for key, value in flat(config).items() if key not in BESIDES}
    return {**settings, "source.data": entry.data} if entry.data else settings


@cache
def _completed(config: str) -> dict[str, Any]:
    """Of many runs, which differ by their seeds alone, once."""
    return completed(json.loads(config))


def _federation(entry: Entry) -> dict[str, Any]:
    settings = _settings(entry)
    return {key: value for key, value in settings.items() if key.partition(".")[0] in FEDERATION}


def _key(entry: Entry) -> str:
    return json.dumps([_federation(entry), entry.metric], sort_keys=True, default=str)
