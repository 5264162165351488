"""A table's numbers as text: for the terminal, and as Markdown, LaTeX and CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from fedfa.files import write_text
from fedfa.paper import PaperTable, contradictions
from fedfa.report import tables as text
from fedfa.report.console import console
from fedfa.report.tables import FORMATS, NOTHING, Column, signed, size
from fedfa.reproduce.results import AVERAGE, GAP, SEEN, Results, Row, Series, costs, curve, hardware
from fedfa.reproduce.table import suffix
from fedfa.statistics import LEVEL, RULES, TITLES, Rule, Summary, summarise

MOST_CLIENTS = 8
"""Clients that have columns of their own."""
SHORT: dict[Rule, str] = {"last": "last", "last20": "last 20", "best": "best by val"}
LEVEL_TEXT = f"{100 * LEVEL:.0f} %"
MISSING = "missing"


def tables(results: Results, told: str) -> list[text.Table]:
    """The table, one for each of its groups, and for tables of the paper by client the paper's own beside it. `told`
    is what the caption says besides: variant, rounds, tuned or not."""
    made = []
    for group, rows in results.groups.items():
        title = results.table.titled(group)
        name = f"{results.table.name}{suffix(group)}"
        if results.table.kind == "cost":
            made.append(_costs(name, f"{title}{told}", rows, results.table.first))
            continue
        paper = results.paper_beside(group)
        made.append(_scores(name, title, told, results, group, paper))
        if paper is not None and paper.columns:
            made.append(_paper(f"{name}-paper", paper, rows))
    return made


def _scores(name: str, title: str, told: str, results: Results, group: str, paper: PaperTable | None) -> text.Table:
    rule, first, rows = results.rule, results.table.first, results.groups[group]
    clients = results.columns(group)
    shown = clients if len(clients) <= MOST_CLIENTS else []
    unseen, many = bool(results.table.held_out), 0 if shown else results.clients(group)
    absent = [client for client, without in results.absent(group).items() if len(without) == len(rows)]
    columns = [Column("", ("row",), numeric=False), Column("seeds", ("seeds", "of"))]
    columns += [Column(f"{client} (unseen)" if client in absent else client, _keys(client)) for client in shown]
    columns += [Column(AVERAGE, _keys(AVERAGE)), Column(LEVEL_TEXT, (f"{AVERAGE}_low", f"{AVERAGE}_high"))]
    if unseen:
        columns += [Column(key, _keys(key)) for key in (SEEN, GAP)]
    columns += [
        Column(f"− {first}", ("difference",)),
        Column(LEVEL_TEXT, ("difference_low", "difference_high")),
        Column("p (Holm)", ("p", "p_holm")),
    ]
    others = [other for other in RULES if other != rule]
    columns += [Column(SHORT[other], _keys(SHORT[other].replace(" ", "_"))) for other in others]
    if paper is not None:
        columns += [Column("one run", ("one_run_low", "one_run_high")), Column("paper", ("paper",))]
    lines = []
    for row in rows:
        series = row.series
        line = [text.Cell(series.name, (series.name,)), _count(series)]
        line += [_mean_sd(row.get(rule, client), bool(series.runs)) for client in shown]
        average = row.get(rule, AVERAGE)
        line += [_mean_sd(average, False), _interval(average.interval if average else None)]
        if unseen:
            line += [_mean_sd(row.get(rule, key), False) for key in (SEEN, GAP)]
        line += _difference(row, series.name == first)
        line += [_mean_sd(row.get(other, AVERAGE), False) for other in others]
        if paper is not None:
            line += [_interval(average.one_more if average else None), _plain(paper.average(series.name))]
        lines.append(line)
    what = f"on clients that did not take part, one held out after the other ({SEEN}: the others)" if unseen else ""
    what = f", {what}" if what else f", mean over {many} clients" if many else ""
    what += f"; {', '.join(absent)} took no part, and the average is of the others" if absent else ""
    caption = (
        f"{title}{told}: test {results.metric}, %{what}. Mean ± standard deviation over "
        f"seeds and {LEVEL_TEXT} interval of the mean, by the rule '{TITLES[rule]}'; differences to {first} are paired "
        "by seed, p-values by paired t-tests with Holm's correction over these rows."
    )
    if paper is not None:
        caption += (
            f" 'one run': where one more run of ours would fall ({LEVEL_TEXT}); the paper's numbers are single runs."
        )
    return text.Table(name, caption, columns, lines)


def _paper(name: str, paper: PaperTable, rows: Sequence[Row]) -> text.Table:
    """The paper's numbers by client, for the rows that are shown."""
    columns = [
        Column("", ("row",), numeric=False),
        *(Column(client, (client,)) for client in (*paper.columns, AVERAGE)),
    ]
    lines = [
        [text.Cell(row.series.name, (row.series.name,)), *(_plain(value) for value in paper.rows[row.series.name])]
        for row in rows
        if row.series.name in paper.rows
    ]
    doubts = "".join(
        f" ({entry.row + ': ' if entry.row else ''}{entry.reason}.)"
        for entry in contradictions()
        if entry.table == paper.name
    )
    return text.Table(name, f"The paper's {paper.title}, %: single runs.{doubts}", columns, lines)


def _costs(name: str, title: str, rows: Sequence[Row], first: str) -> text.Table:
    columns = [
        Column("", ("row",), numeric=False),
        Column("seeds", ("seeds", "of")),
        Column("up", ("bytes_up",)),
        Column("down", ("bytes_down",)),
        Column(f"both − {first}", ("bytes_more",)),
        Column("down, once", ("bytes_once",)),
        Column("s a round", ("seconds",)),
        Column(f"÷ {first}", ("seconds_ratio", "seconds_ratio_low", "seconds_ratio_high")),
        Column("peak memory", ("memory",)),
        Column(f"÷ {first}", ("memory_ratio", "memory_ratio_low", "memory_ratio_high")),
    ]
    found = {row.series.name: costs(row.series) for row in rows}
    machines = {row.series.name: hardware(row.series) for row in rows}
    means = {
        name: {key: summarise(values.values()).mean for key, values in told.items()} for name, told in found.items()
    }
    lines = []
    for row in rows:
        told, own = found[row.series.name], means[row.series.name]
        up, down, once = (own.get(key) for key in ("up", "down", "once"))
        more = _more(own, means.get(first, {}))
        line = [text.Cell(row.series.name, (row.series.name,)), _count(row.series)]
        line += [text.Cell(size(up), (up,)), text.Cell(size(down), (down,))]
        line += [text.Cell(_signed_size(more), (more,)), text.Cell(size(once), (once,))]
        for key in ("seconds", "memory"):
            value = own.get(key)
            shown = size(value) if key == "memory" else NOTHING if value is None else f"{value:.3f}"
            alike = {
                seed for seed, machine in machines[row.series.name].items() if machines[first].get(seed) == machine
            }
            line += [text.Cell(shown, (value,)), _ratio(told.get(key, {}), found.get(first, {}).get(key, {}), alike)]
        lines.append(line)
    caption = (
        f"{title}: what a client sends and receives in a round; seconds a round (median, all clients) and peak memory "
        f"of the process or the device, both of training alone, and their ratios to {first}, seed by seed, with "
        f"{LEVEL_TEXT} interval."
    )
    return text.Table(name, caption, columns, lines)


def _more(own: Mapping[str, float], base: Mapping[str, float]) -> float | None:
    """Bytes up and down that a method takes more than another: beside those of the model they would not show."""
    if not {"up", "down"} <= own.keys() & base.keys():
        return None
    return own["up"] + own["down"] - base["up"] - base["down"]


def _signed_size(count: float | None) -> str:
    return f"{'−' if count < 0 else '+'}{size(abs(count))}" if count else size(count)


def _ratio(values: Mapping[int, float], base: Mapping[int, float], alike: AbstractSet[int]) -> text.Cell:
    """By the seeds of which both were computed on the same machine."""
    common = sorted(values.keys() & base.keys() & alike)
    if not common:
        return text.Cell(NOTHING, (None,))
    found = summarise(values[seed] / base[seed] for seed in common)
    spread = "" if found.low is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return text.Cell(f"{found.mean:.2f}{spread}", (found.mean, found.low, found.high))


def _keys(name: str) -> tuple[str, str]:
    return (name, f"{name}_sd")


def _count(series: Series) -> text.Cell:
    done = len(series.seeds)
    return text.Cell(str(done) if done == series.wanted else f"{done}/{series.wanted}", (done, series.wanted))


def _mean_sd(summary: Summary | None, silent: bool) -> text.Cell:
    if summary is None:
        return text.Cell(NOTHING if silent else MISSING, (None, None))
    spread = "" if summary.sd is None else f" ± {100 * summary.sd:.1f}"
    sd = None if summary.sd is None else 100 * summary.sd
    return text.Cell(f"{text.fixed(100 * summary.mean)}{spread}", (100 * summary.mean, sd))


def _interval(bounds: tuple[float, float] | None, sign: bool = False) -> text.Cell:
    if bounds is None:
        return text.Cell(NOTHING, (None, None))
    low, high = 100 * bounds[0], 100 * bounds[1]
    show = signed if sign else text.fixed
    return text.Cell(f"[{show(low)}, {show(high)}]", (low, high))


def _difference(row: Row, is_reference: bool) -> list[text.Cell]:
    found = row.difference
    if found is None:
        return [text.Cell("" if is_reference else NOTHING, ())] * 3
    p = NOTHING if row.p is None else "<0.001" if row.p < 0.001 else f"{row.p:.3f}"
    return [
        text.Cell(signed(100 * found.mean), (100 * found.mean,)),
        _interval(found.interval, sign=True),
        text.Cell(p, (found.p, row.p)),
    ]


def _plain(value: float | None) -> text.Cell:
    return text.Cell(NOTHING if value is None else f"{value:.1f}", (value,))


# Where it goes


def show(table: text.Table) -> None:
    """A table on the terminal, in parts below each other where it is too wide."""
    console.print(table.caption, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    lines = [[column.title for column in table.columns], *([cell.text for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for part in _parts(widths, console.width if console.is_terminal else sum(widths) + 2 * len(widths)):
        for line in lines:
            rest = [line[place].rjust(widths[place]) for place in part]
            print("  ".join([line[0].ljust(widths[0]), *rest]).rstrip())


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """The columns after the first, which is repeated, divided so that each part fits into a line."""
    parts: list[list[int]] = [[]]
    for place, width in enumerate(widths[1:], 1):
        used = widths[0] + sum(2 + widths[other] for other in parts[-1])
        if parts[-1] and used + 2 + width > room:
            parts.append([])
        parts[-1].append(place)
    return parts


def write_files(stem: Path, name: str, made: Sequence[text.Table], notes: Sequence[str], curves: str) -> list[Path]:
    """All tables in one Markdown file and one LaTeX file, a CSV file for each, and the curves. `name` is what the names
    of the tables begin with, in whose place files have the stem's."""
    written = []
    tail = "".join(f"{note}\n" for note in notes)
    for kind in ("md", "tex"):
        parts = [FORMATS[kind](table) for table in made]
        comment = tail if kind == "md" else "".join(f"% {note}\n" for note in notes)
        written.append(stem.with_name(f"{stem.name}.{kind}"))
        write_text(written[-1], "\n".join([*parts, comment]))
    for table in made:
        ending = table.name.removeprefix(name)
        if not ending.endswith("-paper"):  # whose numbers are no result
            written.append(stem.with_name(f"{stem.name}{ending}.csv"))
            write_text(written[-1], table.csv())
    if curves:
        written.append(stem.with_name(f"{stem.name}-curves.csv"))
        write_text(written[-1], curves)
    return written


def curves_csv(results: Results) -> str:
    """Convergence: every row's mean over clients by round, over seeds."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["group", "row", "split", "round", "seeds", "mean", "sd", "low", "high"])
    for series in results.series:
        for split in ("test", "val", "loss"):
            for number, found in curve(series, split).items():
                told = [None if x is None else round(x, 6) for x in (found.mean, found.sd, found.low, found.high)]
                writer.writerow([series.group, series.name, split, number, found.n, *told])
    return file.getvalue()
