"""`fedfa tune`: a small random search on validation data, with the same budget for every row of a table."""

from __future__ import annotations

import os
import random
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from fedfa.errors import UserError
from fedfa.experiment import Experiment, builtin_experiments, load
from fedfa.files import check_folder, write_text
from fedfa.registry import nearest
from fedfa.reproduce.names import changes, file_name
from fedfa.reproduce.play import complain, counted, play_all, split_names, try_out
from fedfa.reproduce.table import (
    Cell,
    Choice,
    Settings,
    Table,
    check_data,
    find_data,
    find_table,
    lay_out,
    read_toml,
    table_names,
    tell_unread,
    with_rounds,
)
from fedfa.runs import Run
from fedfa.statistics import LAST, recent, summarise
from fedfa.together import complete


@dataclass(frozen=True)
class Span:
    """Where a setting is looked for: between two numbers, evenly, or evenly in its logarithm."""

    low: float
    high: float
    log: bool = True

    def draw(self, rng: random.Random) -> float:
        """A number with two digits: no result hangs on a third."""
        place = rng.random()
        value = self.low * (self.high / self.low) ** place if self.log else self.low + (self.high - self.low) * place
        return float(f"{value:.2g}")


RATES = Span(0.1, 10)
"""Factors of the learning rate."""
GATE = ("p", Span(0.1, 1, log=False))
STRENGTHS: dict[str, dict[str, tuple[str, Span]]] = {
    "algorithm": {
        "fedavgm": ("beta", Span(0.1, 0.99, log=False)),
        "fedprox": ("mu", Span(1e-4, 1)),
        "fedsam": ("rho", Span(5e-3, 0.5)),
        "fedrobust": ("shift_rate", Span(1e-3, 0.3)),
        "fedmix": ("lam", Span(0.01, 0.5)),
        "fedharmo": ("alpha", Span(5e-3, 0.5)),
        "scaffold": ("server_rate", Span(0.3, 1.5)),
        "feddyn": ("alpha", Span(1e-3, 1)),
        **dict.fromkeys(("fedadam", "fedyogi", "fedadagrad"), ("lr", Span(1e-3, 0.3))),
        **dict.fromkeys(("fedfa", "fedfa-r", "fedfa-c", "fedfa-direct", "fedfa-total"), GATE),
    },
    "augmentation": {
        "mixup": ("alpha", Span(0.1, 4)),
        "manifold-mixup": ("alpha", Span(0.1, 4)),
        "cutmix": GATE,
        "mixstyle": GATE,
        "moex": GATE,
        "dsu": GATE,
    },
}
"""Each method's own strength, and where it is looked for."""


def trials(
    experiment: Experiment, row: str, count: int, seed: int, compared: frozenset[str] = frozenset()
) -> list[Settings]:
    """What is tried for a row: first its own settings, then draws. Learning rates are the same for every row. What the
    table compares, and its rows are named by, is not drawn."""
    rates, own = random.Random(f"{seed} learning rates"), random.Random(f"{seed} {row}")
    tried: list[Settings] = [{}]
    for _ in range(count - 1):
        settings: Settings = {"lr": float(f"{experiment.lr * RATES.draw(rates):.2g}")}
        for component, known in STRENGTHS.items():
            found = known.get(getattr(experiment, component)["name"])
            if found is not None and f"{component}.{found[0]}" not in compared:
                settings[f"{component}.{found[0]}"] = found[1].draw(own)
        tried.append(settings)
    return tried


def compared(cells: Sequence[Cell]) -> frozenset[str]:
    """The methods' strengths in which rows of one method differ."""
    values: dict[tuple[str, str], set[Any]] = {}
    for cell in cells:
        for component, known in STRENGTHS.items():
            settings = getattr(cell.experiment, component)
            if (found := known.get(settings["name"])) is not None:
                values.setdefault((settings["name"], f"{component}.{found[0]}"), set()).add(settings.get(found[0]))
    return frozenset(key for (_, key), known in values.items() if len(known) > 1)


def validation(run: Run) -> float:
    """What a trial is judged by: the mean over clients on validation data, over the last 20 rounds."""
    lines = [line for line in run.metrics if "val" in line]
    if not lines:
        raise UserError(f"{run.folder} has no validation data, and test data must not choose settings")
    return summarise(line["val"]["mean"] for line in recent(lines)).mean


def find_target(name: str) -> Table:
    """A table; or an experiment, as a table of one row."""
    if name in table_names() or (name.endswith(".toml") and "rows" in read_toml(Path(name))):
        return find_table(name)
    known = [*table_names(), *builtin_experiments()]
    if name not in known and not name.endswith(".toml") and not Path(name).is_file():
        raise UserError(f"no table or experiment {name!r}; {nearest(name, known)}")
    experiment = load(name)
    return Table(name=experiment.name, title=experiment.name, base=name, rows={experiment.algorithm["name"]: {}})


@dataclass(frozen=True)
class Search:
    """What the command line asks for."""

    trials: int = 8
    seeds: int = 1
    search_seed: int = 0
    only: str = ""
    variant: str = ""
    data: Path | None = None
    rounds: int | None = None
    out: Path = Path("runs")
    at_once: int = 0
    file: Path | None = None
    quiet: bool = False


def tune(name: str, overrides: Settings, search: Search) -> Path:
    """Search, and write what was found."""
    table = find_target(name)
    overrides = with_rounds(overrides, search.rounds)
    tell_unread([table], search.data)
    common = {**find_data(table, search.data), **overrides}
    choice = Choice(search.seeds, split_names(search.only), search.variant, common)
    cells = lay_out(table, choice)
    changed = changes(table, choice)
    path = search.file or search.out / "tuned" / f"{file_name(table, choice, changed)}.toml"
    if path.is_dir():
        raise UserError(f"--file: {path} is a folder; name the file that the settings are to go to")
    check_folder(path.parent, "--file" if search.file else "--out")
    head = _head(table, search, changed, cells[0].experiment.rounds)
    beside = _beside(path, head)  # which must be readable, before anything is played
    tried: dict[str, list[Settings]] = {}
    runs: dict[str, Experiment] = {}
    names: dict[str, list[tuple[str, int]]] = {}
    for cell in cells:
        drawn = trials(cell.experiment, cell.row, search.trials, search.search_seed, compared(cells))
        candidates = tried.setdefault(cell.row, drawn)
        for number, settings in enumerate(candidates):
            experiment = load(cell.experiment, settings)
            place = f"{cell.row}, trial {number + 1}, seed {cell.seed}"
            place += "".join(f", {part}" for part in (cell.group, cell.held_out) if part)
            runs[place] = experiment
            names.setdefault(experiment.title, []).append((cell.row, number))
    scores: dict[tuple[str, int], list[float]] = {}
    diverged: set[tuple[str, int]] = set()

    def ended(experiment: Experiment, run: Run) -> None:
        for key in names[experiment.title]:
            scores.setdefault(key, []).append(validation(run))
        if any(line.get("refused") for line in run.metrics):
            diverged.update(names[experiment.title])

    check_data(table, cells[0].experiment)
    try_out({cell.row: cell.experiment for cell in cells}, search.out)
    distinct = {experiment.title: place for place, experiment in runs.items()}
    missing = []
    for title, place in distinct.items():
        if (run := complete(search.out / title)) is not None:  # a row's own settings: a table has played them
            ended(runs[place], run)
        else:
            missing.append(place)
    failed = play_all(
        {place: runs[place] for place in missing},
        ended,
        out=search.out / "tuned" / "runs",
        at_once=search.at_once,
        quiet=search.quiet,
        split="val",
    )
    complain(failed)
    means = {key: summarise(values).mean for key, values in scores.items()}
    if path.is_file() and not any(beside.values()):  # of another search, whose numbers nobody has asked to lose
        os.replace(path, before := _aside(path))
        print(f"{path} was of another search: it is {before} now")
    write_text(path, _toml(head, tried, means, beside))
    _tell(tried, means)
    if diverged:  # whose scores may be those of initial weights
        counts = ", ".join(f"{row} {count}" for row, count in Counter(row for row, _ in sorted(diverged)).items())
        print(f"updates were left out in {len(diverged)} of {len(means)} trials: {counts}")
    print(f"wrote {path}; use it with: {_use(name, table, search, path, head, tried, means)}")
    return path


def _aside(path: Path) -> Path:
    """Where a file of another search goes that is in the way: a name that no file has."""
    names = (f"{path.stem}.before{f'-{number}' if number > 1 else ''}.toml" for number in count(1))
    return next(place for name in names if not (place := path.with_name(name)).exists())


def _use(
    name: str,
    table: Table,
    search: Search,
    path: Path,
    head: Mapping[str, Any],
    tried: Mapping[str, Sequence[Settings]],
    means: Mapping[tuple[str, int], float],
) -> str:
    """The command that trains with what was found."""
    if table.base == name and name not in table_names():  # an experiment, which is no table
        (row,) = tried
        settings = {**head.get("settings", {}), **tried[row][best_of(row, tried[row], means)]}
        return shlex.join(["fedfa", "run", name, *(f"{key}={value}" for key, value in settings.items())])
    words = ["fedfa", "reproduce", name, "--tuned", str(path)]
    words += ["--variant", search.variant] if search.variant else []
    words += ["--only", search.only] if search.only else []
    return shlex.join(words)


def _head(table: Table, search: Search, changed: Settings, rounds: int) -> dict[str, Any]:
    """What was searched, and how. Settings that all trials had of the command line belong to what was found; the
    number of rounds does not."""
    settings = {key: value for key, value in changed.items() if key != "rounds"}
    which = (
        f"the last {LAST} rounds"
        if rounds > LAST
        else f"all of its {counted(rounds)}"
        if rounds > 1
        else "its one round"
    )
    return {
        "table": table.name,
        "variant": search.variant or table.variant,
        "trials": search.trials,
        "seeds": search.seeds,
        "search_seed": search.search_seed,
        "judged_by": f"validation data alone: mean over clients, over {which}",
        **({"rounds": changed["rounds"]} if "rounds" in changed else {}),
        **({"settings": settings} if settings else {}),
    }


def _beside(path: Path, head: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the file has of other rows from the same search: `--only` adds to it."""
    there = read_toml(path) if path.is_file() else {}
    if there and "judged_by" not in there:
        raise UserError(f"--file: {path} is no file of `fedfa tune`, and stays as it is: name another")
    if not all(isinstance(there.get(key, {}), dict) for key in ("rows", "tried")):
        raise UserError(f"--file: {path} is damaged: delete it, or name another")
    same = {key: there.get(key) for key in there if key not in ("rows", "tried")} == head
    return {key: there.get(key, {}) if same else {} for key in ("rows", "tried")}


def _toml(
    head: Mapping[str, Any],
    tried: Mapping[str, Sequence[Settings]],
    means: Mapping[tuple[str, int], float],
    beside: Mapping[str, Mapping[str, Any]],
) -> str:
    import tomli_w

    best = {row: best_of(row, candidates, means) for row, candidates in tried.items()}
    common = head.get("settings", {})
    content: dict[str, Any] = {
        **head,
        "rows": {**beside["rows"], **{row: {**common, **tried[row][number]} for row, number in best.items()}},
        "tried": {
            **beside["tried"],
            **{
                row: [
                    {**settings, "validation": round(means[row, number], 6)}
                    for number, settings in enumerate(candidates)
                ]
                for row, candidates in tried.items()
            },
        },
    }
    return tomli_w.dumps(content)


def best_of(row: str, candidates: Sequence[Settings], means: Mapping[tuple[str, int], float]) -> int:
    """The number of the trial that did best; the first of equals."""
    return max(range(len(candidates)), key=lambda number: (means[row, number], -number))


def _tell(tried: Mapping[str, Sequence[Settings]], means: Mapping[tuple[str, int], float]) -> None:
    width = max(map(len, tried))
    for row, candidates in tried.items():
        number = best_of(row, candidates, means)
        told = ", ".join(f"{key}={value:g}" for key, value in candidates[number].items()) or "as it stands"
        before, after = 100 * means[row, 0], 100 * means[row, number]
        print(f"{row:<{width}}  {told}: validation {after:.1f} %, {before:.1f} % as it stands")
