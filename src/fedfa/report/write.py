"""`fedfa report`: a page, and figures and tables for a paper, from runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedfa.data.preview import file_names
from fedfa.errors import UserError
from fedfa.files import check_folder, write_text
from fedfa.report.figures import FIGURES, style
from fedfa.report.page import page
from fedfa.report.progress import put, written
from fedfa.report.study import Panel, Study
from fedfa.report.tables import FORMATS, Table, costs, differences, paper_by_client, results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("png", "pdf")


def write_report(
    runs: Sequence[Path | str],
    out: Path,
    figures: Path | None = None,
    tables: Path | None = None,
    title: str | None = None,
) -> Study:
    """Write the page, and where folders are given, figures (PNG and PDF) and tables (LaTeX, Markdown, CSV) of every
    federation among the runs."""
    for folder, option in ((figures, "--figures"), (tables, "--tables")):
        if folder is not None:
            check_folder(folder, option)
    study = Study.of(runs)
    for place, why in study.broken.items():
        print(f"{place}: {why}")
    if out.is_dir():
        raise UserError(f"{out} is a folder: say -o FILE.html")
    text = page(study, title)
    written(out, partial(_write, text))
    named = list(zip(file_names([panel.title for panel in study.panels]), study.panels, strict=True))
    if figures is not None:
        print(f"wrote {sum(write_figures(panel, name, figures) for name, panel in named)} figures to {figures}")
    if tables is not None:
        print(f"wrote {sum(write_tables(panel, name, tables) for name, panel in named)} tables to {tables}")
    return study


def write_figures(panel: Panel, name: str, folder: Path) -> int:
    """A panel's figures, by the rule that its page opens with; returns their number."""
    if not panel.rules:
        return 0
    wanted = [what for what in FIGURES if what != "differences" or panel.compared(panel.rules[0])]
    with style(8):
        for what in wanted:
            figure = FIGURES[what](panel, panel.rules[0])
            for kind in KINDS:
                put(folder / f"{name}-{what}.{kind}", partial(_save, figure))
    return len(wanted)


def _save(figure: Figure, path: Path) -> None:
    # Without the date, the same runs give the same file.
    figure.savefig(path, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)


def write_tables(panel: Panel, name: str, folder: Path) -> int:
    """A panel's tables: results and differences by every rule, costs, and the paper's; returns their number."""
    made: list[Table] = [costs(panel)]
    for rule in panel.rules:
        made += [results(panel, rule), differences(panel, rule)]
    made = [table for table in (*made, paper_by_client(panel)) if table is not None and table.rows]
    for table in made:
        for ending, render in FORMATS.items():
            put(folder / f"{name}-{table.name}.{ending}", partial(_write, render(table)))
    return len(made)


def _write(text: str, path: Path) -> None:
    write_text(path, text)
