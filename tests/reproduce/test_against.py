"""Figures with a setting along their axis: the numbers in them are those of the tables."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fedfa import UserError, paper
from fedfa.reproduce.against import draw_against, parts
from fedfa.reproduce.results import Results, gather
from fedfa.reproduce.summary import RunSummary
from fedfa.reproduce.table import Cell, Choice, find_table, lay_out

ROOT = Path(__file__).parents[2]


def results(name: str, scores: dict[tuple[str, str], list[float]]) -> Results:
    """A table's results, had its rows these scores by seed."""
    table = find_table(name)
    cells = lay_out(table, Choice(seeds=len(next(iter(scores.values())))))

    def find(cell: Cell) -> RunSummary | None:
        if (cell.group, cell.row) not in scores:
            return None
        mean = scores[cell.group, cell.row][cell.seed]
        known = table.paper_of(cell.group)
        sites = (known.clients if known else ()) or ("site",)
        test = {"mean": mean, "unseen": None, "gap": None, "clients": dict.fromkeys(sites, mean), "losses": {}}
        line = {"round": 1, "loss": 0.0, "clients": list(sites), "refused": {}, "test": test}
        return RunSummary(cell.experiment.title, cell.experiment.model_dump(), {"metric": "Dice"}, [line], True)

    return gather(table, cells, find, "last")


def test_rows_that_differ_in_one_setting_are_a_line_of_means() -> None:
    pytest.importorskip("matplotlib")
    seeds = {"FedAvg": [0.5, 0.6], "p = 0.1": [0.6, 0.7], "p = 0.5, α = 0.99": [0.7, 0.9], "α = 0": [0.65, 0.65]}
    found = results("office-alpha-p", {("", row): scores for row, scores in seeds.items()})
    by_p, by_alpha = parts(found)
    assert (by_p.title, by_p.places, list(by_p.lines)) == ("p", ("0.1", "0.5"), ["FedFA"])
    assert (by_alpha.title, by_alpha.places) == ("α", ("0", "0.99"))
    figure = draw_against(found)
    assert figure is not None
    level, means, *bars = figure.axes[0].lines
    assert list(level.get_ydata()) == pytest.approx([55, 55])
    assert list(means.get_ydata()) == pytest.approx([65, 80])
    # FedFA is 10 and 10 points better at p = 0.1, which says nothing of an interval, and 20 and 30 at p = 0.5, where
    # it is 25 ± 12.7 · 7.07 / √2 by a table of Student's t with one degree of freedom
    assert list(bars[0].get_ydata()) == pytest.approx([80 - 63.53, 80 + 63.53], abs=0.01)


def test_groups_stand_along_the_axis_with_the_papers_numbers() -> None:
    pytest.importorskip("matplotlib")
    groups = list(find_table("prostate-fractions").groups)
    found = results("prostate-fractions", {(group, row): [0.8, 0.9] for group in groups for row in ("FedAvg", "FedFA")})
    (part,) = parts(found)
    assert part.places == tuple(groups) and list(part.lines) == ["FedAvg", "FedFA"] and part.level is None
    printed = [point.paper for point in part.lines["FedFA"]]
    assert printed == [paper.paper_table(f"prostate-{sixths}-6").average("FedFA") for sixths in range(1, 7)]
    figure = draw_against(found)
    assert figure is not None and figure.axes[0].get_xlabel() == "share of the training samples"
    circles = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "none"]
    assert len(circles) == 12


def mine(tmp_path: Path, rows: str, against: str) -> Results:
    (tmp_path / "mine.toml").write_text(
        f'title = "Mine"\nbase = "digit-sites"\nseeds = 2\n[rows]\nFedAvg = {{}}\n{rows}[against]\n{against}\n'
    )
    name = str(tmp_path / "mine.toml")
    return results(name, {("", row): [0.5, 0.6] for row in find_table(name).rows})


def test_lines_of_one_algorithm_are_told_apart(tmp_path: Path) -> None:
    rows = "".join(
        f'"{p} {lr}" = {{algorithm = {{name = "fedfa", p = {p}}}, lr = {lr}}}\n'
        for p in (0.1, 0.9)
        for lr in (0.01, 0.5)
    )
    (part,) = parts(mine(tmp_path, rows, 'p = "algorithm.p"'))
    assert list(part.lines) == ["FedFA lr=0.01", "FedFA lr=0.5"] and part.places == ("0.1", "0.9")
    assert all([point.at for point in points] == ["0.1", "0.9"] for points in part.lines.values())


@pytest.mark.parametrize(
    ("setting", "values", "places"),
    [
        ("optimizer", ('"sgd"', '"adam"'), ("sgd", "adam")),
        ("algorithm", ('"fedprox"', '"fedfa"'), ("fedprox", "fedfa")),
        ("network.stages", ("[2]", "[1, 2]"), ("1+2", "2")),
    ],
)
def test_what_stands_along_an_axis_need_be_no_number(
    setting: str, values: tuple[str, str], places: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    rows = "".join(f'row{number} = {{"{setting}" = {value}}}\n' for number, value in enumerate(values))
    found = mine(tmp_path, rows, f'what = "{setting}"')
    (part,) = parts(found)
    assert set(part.places) == set(places) and len(part.lines) == 1
    assert draw_against(found) is not None


def test_methods_have_one_colour_all_over_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = "".join(f'"mu {x}" = {{algorithm = {{name = "fedprox", mu = {x}}}}}\n' for x in (0.1, 0.2))
    rows += "".join(f'"beta {x}" = {{algorithm = {{name = "fedavgm", beta = {x}}}}}\n' for x in (0.1, 0.2))
    figure = draw_against(mine(tmp_path, rows, '"μ" = "algorithm.mu"\n"β" = "algorithm.beta"'))
    assert figure is not None
    inks = [
        {line.get_label(): line.get_color() for line in axes.lines if line.get_marker() == "o"} for axes in figure.axes
    ]
    assert [list(one) for one in inks] == [["FedProx"], ["FedAvgM"]] and inks[0]["FedProx"] != inks[1]["FedAvgM"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["FedAvg", "FedProx", "FedAvgM"]


def test_a_row_that_says_nothing_has_the_default_and_other_rows_other_axes(tmp_path: Path) -> None:
    rows = 'FedFA = {algorithm = "fedfa"}\nless = {algorithm = {name = "fedfa", p = 0.1}}\n'
    (part,) = parts(mine(tmp_path, rows, 'p = "algorithm.p"'))
    assert part.places == ("0.1", "0.5")
    (tmp_path / "other.toml").write_text('title = "Other"\nlike = "mine"\n[rows]\nFedAvg = {}\n')
    assert find_table(str(tmp_path / "other.toml")).against == {}
    (tmp_path / "same.toml").write_text('title = "Same"\nlike = "mine"\n')
    assert find_table(str(tmp_path / "same.toml")).against == {"p": "algorithm.p"}


def test_a_table_without_such_a_figure_or_without_runs_has_none() -> None:
    assert draw_against(results("office-main", {("", "FedAvg"): [0.5]})) is None
    assert draw_against(results("office-alpha-p", {("", "FedAvg"): [0.5], ("", "p = 0.1"): [0.6]})) is None


def test_what_no_rows_differ_in_is_refused(tmp_path: Path) -> None:
    for against in ("algorithm.q", "lr"):
        (tmp_path / "mine.toml").write_text(
            f'title = "Mine"\nbase = "digit-sites"\nagainst = {{p = "{against}"}}\n[rows]\nA = {{algorithm.p = 0.1}}\n'
            "B = {algorithm.p = 0.2}\n"
        )
        with pytest.raises(UserError, match=f"against: no two rows differ in '{against}'"):
            find_table(str(tmp_path / "mine.toml"))


def test_published_tables_have_the_figures_numbers() -> None:
    """Of FedFA with p = 0.7 on Office-Caltech 10, from the runs themselves and from the table's file."""
    from fedfa.reproduce.summary import find_summaries, identity

    known = {}
    for folder in ("office-main", "office-alpha-p"):
        known |= find_summaries(ROOT / "results" / folder)
    table = find_table("office-alpha-p")

    def find(cell: Cell) -> RunSummary | None:
        runs = known.get(identity(cell.experiment), [])
        return runs[0] if runs and isinstance(runs[0], RunSummary) else None

    part, _ = parts(gather(table, lay_out(table, Choice()), find, "last"))
    with open(ROOT / "results" / "tables" / "office-alpha-p.csv", newline="") as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    points = dict(zip(part.places, part.lines["FedFA"], strict=True))
    assert 100 * points["0.7"].found.mean == pytest.approx(float(rows["p = 0.7"]["average"]))
    assert part.level is not None and 100 * part.level == pytest.approx(float(rows["FedAvg"]["average"]))
