"""A report's tables, as HTML, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfa.errors import some
from fedfa.report.beside import Printed, printed, single_runs
from fedfa.report.entry import mean
from fedfa.report.markup import Markup, tag
from fedfa.report.study import Panel, Series
from fedfa.statistics import EQUAL, LEVEL, TITLES, Rule, Summary

NOTHING = "–"
INTERVAL = f"{100 * LEVEL:.0f} % interval"


@dataclass(frozen=True)
class Column:
    """A column: its title, and what it is in a CSV, where an interval is two columns."""

    title: str
    keys: tuple[str, ...]
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """A cell as it is read, and its numbers, not rounded."""

    text: str
    values: tuple[Any, ...] = ()
    marked: bool = False
    """Best in its column."""


@dataclass(frozen=True)
class Table:
    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def html(self, **attributes: Any) -> Markup:
        """The first cell of a row is its title."""
        head = [
            tag("th", column.title, scope="col", class_="number" if column.numeric else None) for column in self.columns
        ]
        body = []
        for row in self.rows:
            cells = [tag("th", row[0].text, scope="row")]
            for column, cell in zip(self.columns[1:], row[1:], strict=True):
                order = cell.values[0] if cell.values and isinstance(cell.values[0], (int, float)) else None
                classes = " ".join((["number"] if column.numeric else []) + (["best"] if cell.marked else []))
                cells.append(tag("td", cell.text, class_=classes or None, data_order=order))
            body.append(tag("tr", cells))
        caption = tag("caption", tag("span", self.caption))
        return tag("table", caption, tag("thead", tag("tr", head)), tag("tbody", body), **attributes)

    def markdown(self) -> str:
        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in cells) + " |"

        rows = [line(f"**{cell.text}**" if cell.marked else cell.text for cell in row) for row in self.rows]
        rule = line("---:" if column.numeric else "---" for column in self.columns)
        return "\n".join([self.caption, "", line(column.title for column in self.columns), rule, *rows, ""])

    def latex(self) -> str:
        """A `tabular` in the manner of booktabs."""

        def line(cells: Iterable[str]) -> str:
            whole = " & ".join(cells)
            apart = "{}" if whole.startswith(("[", "*")) else ""  # else it belongs to the end of the line before
            return f"  {apart}{whole}" + r" \\"

        def text(cell: Cell) -> str:
            return rf"\textbf{{{in_latex(cell.text)}}}" if cell.marked else in_latex(cell.text)

        kinds = "".join("r" if column.numeric else "l" for column in self.columns)
        lines = [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{in_latex(self.caption)}}}",
            rf"  \begin{{tabular}}{{{kinds}}}",
            r"  \toprule",
            line(in_latex(column.title) for column in self.columns),
            r"  \midrule",
            *(line(map(text, row)) for row in self.rows),
            r"  \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
        return "\n".join(lines)

    def csv(self) -> str:
        """Numbers as they are, not rounded."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([key for column in self.columns for key in column.keys])
        for row in self.rows:
            values: list[Any] = []
            for column, cell in zip(self.columns, row, strict=True):
                given = cell.values or ((cell.text,) if not column.numeric else ())
                values += [*given, *[None] * (len(column.keys) - len(given))]
            writer.writerow(["" if value is None else value for value in values])
        return file.getvalue()


FORMATS: dict[str, Callable[[Table], str]] = {"md": Table.markdown, "tex": Table.latex, "csv": Table.csv}


GREEK = {
    sign: unicodedata.name(sign).rpartition(" ")[2].lower().replace("lamda", "lambda")
    for sign in "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΥΦΨΩ"
}
"""Those that LaTeX has commands for, with their names."""
IN_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "−": "$-$", "±": r"$\pm$", "<": "$<$", ">": "$>$",
    "×": r"$\times$", "÷": r"$\div$", "·": r"$\cdot$", "≤": r"$\leq$", "≥": r"$\geq$", "…": r"\ldots{}", "\n": " ",
    **{sign: rf"$\{name.capitalize() if sign.isupper() else name}$" for sign, name in GREEK.items()},
}  # fmt: skip


def in_latex(text: str) -> str:
    """Text with LaTeX's own signs, and those that it has no letters for, spelled out."""
    return "".join(IN_LATEX.get(sign, sign) for sign in text)


# The tables themselves


def results(panel: Panel, rule: Rule) -> Table:
    """Every series: its clients, the mean over them, its interval over seeds, and the difference to the baseline."""
    compared = {one.series: one for one in panel.compared(rule)}
    columns = [Column("method", ("method",), numeric=False), Column("seeds", ("seeds",))]
    columns += [Column(panel.client_title(name), (name,)) for name in panel.shown_clients]
    if panel.held_out:
        columns += [Column("seen", ("seen",)), Column("gap", ("gap",))]
    columns += [Column(panel.primary, (panel.primary,)), Column("sd", ("sd",)), Column(INTERVAL, ("low", "high"))]
    if compared:
        columns += [
            Column(f"− {panel.base_title}", ("difference",)),
            Column(INTERVAL, ("difference_low", "difference_high")),
            Column("p (Holm)", ("p_holm",)),
        ]
    papers = [printed(panel, series) for series in panel.series]
    if any(papers):
        columns += [
            Column("one run", ("one_run_low", "one_run_high")),
            Column("paper", ("paper",)),
            Column("− paper", ("difference_to_paper",)),
        ]
    rows, beside = [], {}
    for series, paper in zip(panel.series, papers, strict=True):
        summary = series.summary(rule, panel.primary)
        beside[series.label] = (paper.average if paper else None), summary
        seeds = summary.n if summary else 0
        row = [Cell(_name(series), (series.label,)), Cell(str(seeds), (seeds,))]
        row += [_metric(series.summary(rule, name)) for name in panel.shown_clients]
        if panel.held_out:
            row += [_metric(series.summary(rule, who)) for who in ("mean", "gap")]
        row += [_metric(summary), _number(summary.sd if summary else None)]
        row.append(_interval(summary.interval if summary else None))
        if compared:
            one = compared.get(series)
            row += [
                _metric(one.difference if one else None, sign=True),
                _interval(one.difference.interval if one else None, sign=True),
                _p(one.holm if one else None),
            ]
        if any(papers):
            row += _beside(paper, summary)
        rows.append(row)
    for place, column in enumerate(columns):
        if column.keys[0] in (*panel.shown_clients, "seen", panel.primary) and len(rows) > 1:
            _mark_best([row for row, one in zip(rows, panel.series, strict=True) if one in panel.ranked], place)
    clients = "" if panel.shown_clients else f", {len(panel.clients)} clients"
    caption = f"{panel.title}{clients}: test {panel.metric}, %, {TITLES[rule]}, mean over seeds."
    if panel.usual:
        caption += f" Unless a name says otherwise: {', '.join(panel.usual)}."
    if panel.held_out:
        caption += " Deviations, intervals and differences are of the mean over unseen clients."
    if panel.in_turn:
        caption += " A client's number is of the runs that it took no part in."
    if compared:
        tested = sum(one.holm is not None for one in compared.values())
        corrected = f", and their {tested} p-values are corrected for their number (Holm)" if tested > 1 else ""
        caption += f" Differences to {_bases(panel)} are paired by seed{corrected}."
    if any(papers):
        caption += f" 'one run': where one more run of ours would fall ({100 * LEVEL:.0f} %)."
        told = single_runs(beside)
        caption += f" {told}" if told else ""
    return Table(f"results-{rule}", caption, columns, rows)


def paper_by_client(panel: Panel) -> Table | None:
    """What the paper prints for these methods and clients, where it has numbers by client."""
    known = {series: paper for series in panel.series if (paper := printed(panel, series)) and len(paper.clients) > 1}
    if not known or not panel.shown_clients:
        return None
    columns = [Column("method", ("method",), numeric=False)]
    columns += [Column(name, (name,)) for name in (*panel.shown_clients, "average")]
    rows = [
        [Cell(_name(series), (series.label,))]
        + [_number(paper.clients.get(name), scale=1) for name in panel.shown_clients]
        + [_number(paper.average, scale=1)]
        for series, paper in known.items()
    ]
    return Table("paper", f"{panel.title}: what the paper prints by client, %, single runs.", columns, rows)


def differences(panel: Panel, rule: Rule) -> Table:
    """Every series against the baseline, client by client as well."""
    columns = [
        Column("method", ("method",), numeric=False),
        Column("to", ("baseline",), numeric=False),
        Column("client", ("client",), numeric=False),
        Column("seeds", ("seeds",)),
        Column("difference", ("difference",)),
        Column(INTERVAL, ("low", "high")),
        Column("p", ("p",)),
        Column("p (Holm)", ("p_holm",)),
    ]
    rows = []
    for who in (panel.primary, *panel.shown_clients):
        for one in panel.compared(rule, who=who):
            found = one.difference
            rows.append(
                [
                    Cell(one.series.label, (one.series.label,)),
                    Cell(one.base.label, (one.base.label,)),
                    Cell(who, (who,)),
                    Cell(str(found.n), (found.n,)),
                    _metric(found, sign=True),
                    _interval(found.interval, sign=True),
                    _p(found.p),
                    _p(one.holm),
                ]
            )
    caption = (
        f"{panel.title}: differences to {_bases(panel)} in test {panel.metric}, points, {TITLES[rule]}, paired by "
        "seed. P-values are corrected over the methods."
    )
    return Table(f"differences-{rule}", caption, columns, rows)


def _bases(panel: Panel) -> str:
    """What methods are compared with, as a caption tells it."""
    if len(panel.bases) == 1:
        return panel.base_title
    return f"the one with most settings in common of {some([base.label for base in panel.bases], most=5)}"


def _hardware(runs: Sequence[Mapping[str, Any]]) -> str:
    """What runs were computed on, by their provenance, and beside how many others."""
    found: dict[str, list[int]] = {}
    for provenance in runs:
        found.setdefault(str(provenance.get("hardware", NOTHING)), []).append(int(provenance.get("beside") or 0))
    return "; ".join(name + _shared(min(others), max(others)) for name, others in found.items())


def _shared(fewest: int, most: int) -> str:
    if not most:
        return ""
    some = f"up to {most}" if not fewest else str(most) if fewest == most else f"{fewest} to {most}"
    return f", {'' if fewest else 'alone or '}shared with {some} {'other' if most == 1 else 'others'}"


def costs(panel: Panel) -> Table:
    """Time, bytes and memory of every series."""
    columns = [
        Column("method", ("method",), numeric=False),
        Column("s a round", ("seconds_a_round",)),
        Column("all rounds", ("seconds",)),
        Column("up, a client and round", ("bytes_up",)),
        Column("down, a client and round", ("bytes_down",)),
        Column("sent in all", ("bytes",)),
        Column("peak memory", ("memory",)),
        Column("parameters", ("parameters",)),
        Column("left out", ("updates_left_out",)),
        Column("on", ("hardware",), numeric=False),
    ]
    rows = []
    for series in panel.series:
        found = [entry.cost() for entry in series.used]
        means = {
            key: mean([value for one in found if (value := one[key]) is not None])
            for key in ("seconds", "total_seconds", "up", "down", "traffic", "memory")
        }
        refused = sum(entry.refused for entry in series.entries)
        parameters = series.entries[0].provenance.get("parameters")
        hardware = _hardware([entry.provenance for entry in series.entries])
        rows.append(
            [
                Cell(_name(series), (series.label,)),
                _number(means["seconds"], 3, scale=1),
                Cell(_time(means["total_seconds"]), (means["total_seconds"],)),
                *(Cell(size(means[key]), (means[key],)) for key in ("up", "down", "traffic", "memory")),
                Cell(NOTHING if parameters is None else f"{parameters:,}", (parameters,)),
                Cell(str(refused), (refused,)),
                Cell(hardware, (hardware,)),
            ]
        )
    caption = (
        f"{panel.title}: what a run costs, means over seeds; seconds a round are the median round's. "
        "'Left out' are updates that the server refused."
    )
    if any(entry.provenance.get("beside") for series in panel.series for entry in series.entries):
        caption += " Runs that shared a GPU with others say nothing of one run's seconds and memory."
    return Table("costs", caption, columns, rows)


def _name(series: Series) -> str:
    return series.label if series.complete else f"{series.label} (incomplete)"


def _metric(summary: Summary | None, sign: bool = False) -> Cell:
    return _number(None if summary is None else summary.mean, sign=sign)


def _number(value: float | None, digits: int = 1, sign: bool = False, scale: float = 100) -> Cell:
    if value is None:
        return Cell(NOTHING, (None,))
    return Cell((signed if sign else fixed)(scale * value, digits), (scale * value,))


def _interval(bounds: tuple[float, float] | None, sign: bool = False) -> Cell:
    if bounds is None:
        return Cell(NOTHING, (None, None))
    low, high = 100 * bounds[0], 100 * bounds[1]
    show = signed if sign else fixed
    return Cell(f"{show(low)} to {show(high)}", (low, high))


def fixed(value: float, digits: int = 1) -> str:
    """A number with so many digits, with a true minus, and none before zero."""
    return f"{round(value, digits) or 0.0:.{digits}f}".replace("-", "−")


def signed(value: float, digits: int = 1) -> str:
    """A difference with its sign, with a true minus."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else f"{0:.{digits}f}"


def _p(value: float | None) -> Cell:
    if value is None:
        return Cell(NOTHING, (None,))
    return Cell("<0.001" if value < 0.001 else f"{value:.3f}", (value,))


def _time(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: float | None) -> str:
    """Bytes, in the unit that suits."""
    if count is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _beside(paper: Printed | None, summary: Summary | None) -> list[Cell]:
    """Where one more run of ours would fall, the paper's number, and ours minus it."""
    one = _interval(summary.one_more if summary else None)
    if paper is None:
        return [one, *[Cell(NOTHING, (None,))] * 2]
    shift = None if summary is None else summary.mean - paper.average / 100
    return [one, _number(paper.average, scale=1), _number(shift, sign=True)]


def _mark_best(rows: list[list[Cell]], place: int) -> None:
    known = [row[place].values[0] for row in rows if row[place].values and row[place].values[0] is not None]
    for row in rows:
        own = row[place].values[0] if row[place].values else None
        if own is not None and max(known) - own <= EQUAL:  # but for roundings
            row[place] = Cell(row[place].text, row[place].values, marked=True)
