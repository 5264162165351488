"""The report's page and files: what is in them, and what may never be."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from studies import entry, many_runs, study
from test_study import scores
from typer.testing import CliRunner

from fedfa import Run
from fedfa.cli import app
from fedfa.report.figures import draw_clients, draw_convergence
from fedfa.report.markup import Markup, joined, json_block, tag
from fedfa.report.page import page
from fedfa.report.tables import (
    Cell,
    Column,
    Table,
    costs,
    differences,
    fixed,
    in_latex,
    paper_by_client,
    results,
    signed,
    size,
)

HandMade = Callable[..., Run]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&<!--"


class Elements(HTMLParser):
    """Every element of a page with its attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((name, dict(attributes)))

    def handle_data(self, text: str) -> None:
        self.text += text


# Markup


def test_what_is_not_markup_is_escaped() -> None:
    assert tag("p", "<b>", Markup("<i>"), None, ["&", ("x",)]) == "<p>&lt;b&gt;<i>&amp;x</p>"
    assert tag("a", "x", href='"><script>', class_="y", hidden=True, title=None, data_x=0, id=False) == (
        '<a href="&quot;&gt;&lt;script&gt;" class="y" hidden data-x="0">x</a>'
    )
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert joined("a", 1, None) == "a1"


def test_data_cannot_end_its_element() -> None:
    block = json_block({HOSTILE: [HOSTILE, 1.5, None]}, "data")
    assert block.count("<") == 2 and block.endswith("</script>")


# The page


def test_the_page_needs_nothing_else() -> None:
    text = page(study(entry(scores(0.5, 0.6))))
    elements = Elements(text)
    assert text.startswith("<!DOCTYPE html>")
    assert not [name for name, _ in elements.found if name in ("link", "img", "iframe", "object", "embed", "base")]
    for _, attributes in elements.found:
        assert "src" not in attributes and (attributes.get("href") or "#").startswith("#")
        assert not [key for key in attributes if key.startswith("on")]
    outside = set(re.findall(r"https?://[^\s'\"]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not outside and "@import" not in text and re.search(r"url\((?!#)", text) is None
    (policy,) = (a["content"] for n, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';") and "script-src 'sha256-" in policy


def test_names_never_become_tags() -> None:
    plain = page(study(entry(scores(0.5))))
    hostile = entry([{HOSTILE: 0.5, "b": 0.5}], description=HOSTILE)
    hostile.provenance.update({"hardware": HOSTILE, "notices": [HOSTILE], HOSTILE: HOSTILE})
    text = page(study(hostile, broken={HOSTILE: HOSTILE}), title=HOSTILE)
    wanted = {name for name, _ in Elements(plain).found} | {"details", "summary", "p"}
    found = Elements(text)
    assert {name for name, _ in found.found} <= wanted
    assert sum(name == "script" for name, _ in found.found) == 2
    assert not [key for _, attributes in found.found for key in attributes if key.startswith("on")]
    assert HOSTILE in found.text


def test_incomplete_and_unreadable_runs_are_shown_as_such() -> None:
    text = Elements(
        page(
            study(
                entry(scores(0.5, 0.6), 0), entry(scores(0.5), 1, done=False, rounds=2),
                entry(scores(0.4), algorithm="fedfa", done=False, rounds=2),
                entry([], algorithm="fedbn", done=False, rounds=2), broken={"some/where": "has no experiment.toml"},
            )
        )
    ).text  # fmt: skip
    assert "5 runs" not in text and "4 runs · 3 methods · 2 seeds · 3 incomplete · 1 unreadable" in text
    assert "fedfa (incomplete)" in text and "incomplete: 1 of 2 rounds" in text and "incomplete: 0 of" in text
    assert "Left out of the numbers: fedavg, seed 1, incomplete: 1 of 2 rounds." in text
    assert "some/where" in text and "has no experiment.toml" in text


def test_a_run_without_an_evaluated_round_makes_a_page() -> None:
    assert "No run has an evaluated round yet." in page(study(entry([], done=False)))


def test_the_config_of_every_run_is_there_and_once_where_it_is_the_same() -> None:
    found = Elements(page(study(entry(scores(0.5), 0, lr=0.0625), entry(scores(0.5), 7, lr=0.0625)))).text
    assert found.count("lr = 0.0625") == 1 and "Config: as that of seed 0 above, with seed = 7." in found
    found = Elements(page(study(entry(scores(0.5), 0), entry(scores(0.5), 7, checkpoint_every=3)))).text
    assert "checkpoint_every = 3" in found and "checkpoint_every = 10" in found


def test_the_lead_says_no_more_than_the_numbers() -> None:
    runs = [entry(scores(0.5 + seed / 100), seed) for seed in range(3)]
    better = [entry(scores(0.6 + seed / 90), seed, algorithm="fedfa") for seed in range(3)]
    text = Elements(page(study(*runs, *better))).text
    assert "fedfa has the highest mean, 61.1 % (95 % interval 58.4 to 63.9, 3 seeds) of test accuracy" in text
    assert "Of 1 difference to fedavg, 1 has an interval without zero: fedfa (+10.1)." in text
    assert "(one seed: no interval)" in Elements(page(study(runs[0]))).text
    twins = [entry(scores(0.5 + seed / 100), seed, algorithm="fedprox") for seed in range(3)]
    assert "fedavg and fedprox have the highest mean, 51.0 %" in Elements(page(study(*runs, *twins))).text
    lucky = entry(scores(0.9), algorithm="fedprox")
    text = Elements(page(study(*runs, *better, lucky))).text
    assert "fedfa has the highest mean of the methods with several seeds, 61.1 %" in text
    assert "fedavg reaches 51.0 %, as the only one with several seeds" in Elements(page(study(*runs, lucky))).text


def test_which_runs_do_not_count_is_told() -> None:
    twice = [entry(scores(0.5), 0), entry(scores(0.5), 1), entry(scores(0.5), 1)]
    text = Elements(page(study(*twice))).text
    assert "Left out of the numbers: a second run of fedavg, seed 1." in text


def test_a_long_report_has_contents_and_folds_what_is_detail() -> None:
    shares = [0.1, 0.2, 0.3, 0.4]
    runs = [entry(scores(0.5 + share), seed, **{"split.fraction": share}) for share in shares for seed in range(10)]
    runs += [entry(scores(0.5), held_out=(name,)) for name in ("amazon", "dslr")]
    found = study(*runs)
    text = page(found)
    links = [given["href"] for name, given in Elements(text).found if name == "a" and given["href"] != "#main"]
    assert links == [*["#contents", *(f"#panel-{place}" for place in range(5)), "#runs"],
                     *(f"#panel-{place}" for place in range(5))]  # fmt: skip
    panels = {given["id"] for name, given in Elements(text).found if name == "section" and "id" in given}
    assert {link.removeprefix("#") for link in links} <= panels
    assert [panel.within for panel in found.panels] == [False] * 5 + [True] * 2
    assert text.count("Its results, curves and costs") == 2, "of those whose numbers are in another panel"
    assert "office_caltech10 split.fraction=0.4<span>: 10 runs</span>" in text
    short = page(study(*runs[:20]))
    assert 'class="fold"' not in short and 'id="contents"' not in short


def test_many_runs_make_a_small_page() -> None:
    assert len(page(many_runs())) < 800_000


# Tables


def test_results_by_hand() -> None:
    runs = [entry(scores(value), seed) for seed, value in enumerate((0.5, 0.6))]
    others = [entry(scores(value), seed, algorithm="fedfa") for seed, value in enumerate((0.6, 0.8))]
    (panel,) = study(*runs, *others).panels
    table = results(panel, "last")
    assert [column.title for column in table.columns] == [
        "method", "seeds", "amazon", "caltech", "dslr", "webcam", "mean", "sd", "95 % interval", "− fedavg",
        "95 % interval", "p (Holm)", "one run", "paper", "− paper",
    ]  # fmt: skip
    first, second = ([cell.text for cell in row] for row in table.rows)
    assert first == [
        "fedavg",
        "2",
        *["55.0"] * 5,
        "7.1",
        "−8.5 to 118.5",
        "–",
        "–",
        "–",
        "−55.0 to 165.0",
        "78.5",
        "−23.5",
    ]
    assert second[:8] == ["fedfa", "2", *["70.0"] * 5, "14.1"] and second[9] == "+15.0"
    assert second[13:] == ["83.1", "−13.1"]
    assert table.rows[1][6].marked and not table.rows[0][6].marked
    assert "last round" in table.caption and "paired by seed" in table.caption


def test_unseen_clients_have_columns_and_the_paper_s_number() -> None:
    clients = {"amazon": 0.8, "caltech": 0.8, "dslr": 0.6, "webcam": 0.8}
    (panel,) = study(entry([clients], held_out=("dslr",))).panels
    table = results(panel, "best")
    row = dict(zip([column.title for column in table.columns], table.rows[0], strict=True))
    assert {name: row[name].text for name in ("dslr (unseen)", "seen", "unseen", "gap", "paper", "− paper")} == {
        "dslr (unseen)": "60.0", "seen": "80.0", "unseen": "60.0", "gap": "20.0", "paper": "71.9", "− paper": "−11.9",
    }  # fmt: skip


def test_methods_are_compared_by_unseen_clients_where_there_are_any() -> None:
    runs = [
        entry([{"amazon": 0.8, "caltech": 0.8, "webcam": 0.8, "dslr": value}], seed, algorithm=name, held_out=("dslr",))
        for name, values in (("fedavg", (0.50, 0.60)), ("fedfa", (0.52, 0.64)))
        for seed, value in enumerate(values)
    ]
    (panel,) = study(*runs).panels
    (one,) = panel.compared("last", 0)
    assert one.difference.mean == pytest.approx(0.03, abs=1e-12)
    text = Elements(page(study(*runs))).text
    assert "fedfa has the highest mean, 58.0 %" in text and "of test accuracy on unseen clients, last round" in text
    assert "of the mean over unseen clients" in results(panel, "last").caption


@pytest.mark.parametrize("methods", [2, 12])
def test_names_of_many_curves_stand_beside_them(methods: int) -> None:
    pytest.importorskip("matplotlib")
    runs = [entry(scores(0.5, 0.6), algorithm={"name": "fedprox", "mu": number / 100}) for number in range(methods)]
    (panel,) = study(*runs).panels
    figure = draw_convergence(panel, "last")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    names = axes.get_legend() or figure.legends[0]
    assert len(names.get_texts()) == methods
    assert names.get_window_extent().overlaps(axes.get_window_extent()) == (methods == 2)


def test_many_clients_have_no_columns() -> None:
    (panel,) = study(entry([{f"site{n}": 0.5 for n in range(13)}])).panels
    assert [column.title for column in results(panel, "last").columns] == [
        "method",
        "seeds",
        "mean",
        "sd",
        "95 % interval",
    ]


def test_the_paper_s_numbers_by_client_are_a_table_of_their_own() -> None:
    (panel,) = study(
        entry(scores(0.5)), entry(scores(0.5), algorithm="fedfa"), entry(scores(0.5), algorithm="scaffold")
    ).panels
    theirs = paper_by_client(panel)
    assert theirs is not None
    assert [[cell.text for cell in row] for row in theirs.rows] == [
        ["fedavg", "84.4", "66.7", "75.0", "88.1", "78.5"],
        ["fedfa", "88.0", "65.8", "90.6", "88.1", "83.1"],
    ]
    assert "what the paper prints by client" in page(study(*panel.series[0].entries))
    (other,) = study(entry([{"amazon": 0.5, "moon": 0.5}])).panels
    assert paper_by_client(other) is None


def test_costs_by_hand() -> None:
    (panel,) = study(entry(scores(0.5, 0.5)), entry(scores(0.5, 0.5), 1)).panels
    assert [cell.text for cell in costs(panel).rows[0]] == [
        "fedavg", "0.500", "1.0 s", "1000 B", "2.9 KiB", "31.2 KiB", "1.0 GiB", "123", "0", "CPU",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ([4], "CPU, shared with 4 others"),
        ([1, 1], "CPU, shared with 1 other"),
        ([4, 6, 5], "CPU, shared with 4 to 6 others"),
        ([2, 0], "CPU, alone or shared with up to 2 others"),
    ],
)
def test_costs_of_runs_that_shared_a_gpu_say_so(beside: list[int], told: str) -> None:
    runs = [entry(scores(0.5, 0.5), seed) for seed in range(len(beside))]
    for run, others in zip(runs, beside, strict=True):
        run.provenance["beside"] = others
    (panel,) = study(*runs).panels
    assert costs(panel).rows[0][-1].text == told
    assert "say nothing of one run's seconds and memory" in costs(panel).caption


def test_differences_have_every_client() -> None:
    runs = [entry(scores(0.5 + seed / 10), seed, algorithm=a) for seed in range(2) for a in ("fedavg", "fedfa")]
    (panel,) = study(*runs).panels
    table = differences(panel, "last")
    assert [row[2].text for row in table.rows] == ["mean", "amazon", "caltech", "dslr", "webcam"]
    assert [cell.text for cell in table.rows[0]] == ["fedfa", "fedavg", "mean", "2", "0.0", "–", "–", "–"]


def made() -> Table:
    columns = [Column("method", ("method",), numeric=False), Column("50 %", ("low", "high")), Column("n", ("n",))]
    rows = [[Cell("a_b|c", ("a_b|c",)), Cell("1.0 to 2.0", (1.04, 2.0), marked=True), Cell("–", (None,))]]
    return Table("made", "A & B", columns, rows)


def test_formats() -> None:
    assert made().markdown().splitlines() == [
        "A & B", "", "| method | 50 % | n |", "| --- | ---: | ---: |", "| a_b\\|c | **1.0 to 2.0** | – |",
    ]  # fmt: skip
    assert list(csv.reader(io.StringIO(made().csv()))) == [["method", "low", "high", "n"], ["a_b|c", "1.04", "2.0", ""]]
    latex = made().latex()
    assert r"\caption{A \& B}" in latex and r"\begin{tabular}{lrr}" in latex
    assert r"a\_b|c & \textbf{1.0 to 2.0} & -- \\" in latex
    assert '<td class="number best" data-order="1.04">' in made().html()


def test_rows_of_latex_do_not_belong_to_the_line_before() -> None:
    """As an option of its end, or as a star."""
    runs = [entry(scores(0.5), algorithm=name) for name in ("fedavg", "fedfa")]
    table = results(study(*runs).panels[0], "last")
    for first in ("*mine", "[1] mine"):
        table.rows[0][0] = Cell(first, (first,))
        assert f"  {{}}{first} &" in table.latex()


def test_latex_takes_any_text() -> None:
    assert in_latex("\\50 % of $x_1 & #{y}^~ − γ") == (
        r"\textbackslash{}50 \% of \$x\_1 \& \#\{y\}\textasciicircum{}\textasciitilde{} $-$ $\gamma$"
    )
    assert in_latex("β λ ρ Δ φ ÷ ≥") == r"$\beta$ $\lambda$ $\rho$ $\Delta$ $\phi$ $\div$ $\geq$"


@pytest.mark.parametrize("draw", [draw_convergence, draw_clients])
def test_a_figure_has_room_for_all_names(draw: Callable[..., Any]) -> None:
    pytest.importorskip("matplotlib")
    runs = [entry(scores(0.5), lr=0.1 + number / 100, weighting="samples") for number in range(20)]
    (panel,) = study(*runs, *(entry(scores(0.5), augmentation="manifold-mixup", lr=rate) for rate in (0.3, 0.4))).panels
    figure = draw(panel, "last")
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 22
    inside, whole, chart = legend.get_window_extent(), figure.bbox, figure.axes[0].get_window_extent()
    assert whole.x0 <= inside.x0 and inside.x1 <= whole.x1 and whole.y0 <= inside.y0 and inside.y1 <= whole.y1
    assert chart.width > 0.4 * whole.width


def test_a_curve_of_one_round_is_a_dot() -> None:
    pytest.importorskip("matplotlib")
    (panel,) = study(entry(scores(0.5))).panels
    axes = draw_convergence(panel, "last").axes[0]
    assert axes.lines[0].get_marker() == "o" and all(tick == round(tick) for tick in axes.get_xticks())


def test_zero_has_no_sign() -> None:
    assert [fixed(value) for value in (-0.04, -0.06, 0.04)] == ["0.0", "−0.1", "0.0"]


@pytest.mark.parametrize(("value", "wanted"), [(1.24, "+1.2"), (-0.26, "−0.3"), (0.04, "0.0"), (-0.04, "0.0")])
def test_differences_have_a_sign(value: float, wanted: str) -> None:
    assert signed(value) == wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB"), (2**50, "1024.0 TiB")],
)
def test_sizes(value: float | None, wanted: str) -> None:
    assert size(value) == wanted


# Python and the command


def test_the_example_of_the_docs(hand_made: HandMade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    for algorithm in ("fedavg", "fedfa"):
        for seed, value in enumerate((0.5, 0.75)):
            hand_made(f"runs/{algorithm}{seed}", [{"a": value}], seed=seed, algorithm=algorithm)
    monkeypatch.chdir(tmp_path)
    example, _ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(example, "report.md", "exec"), {})
    assert (tmp_path / "report.html").exists()


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, words)])


def test_the_command(hand_made: HandMade, tmp_path: Path) -> None:
    tests = [{"a": 0.5, "b": 0.25}, {"a": 0.75, "b": 0.5}]
    for seed in (0, 1):
        for algorithm in ("fedavg", "fedfa"):
            hand_made(f"runs/{algorithm}{seed}", tests, tests, seed=seed, algorithm=algorithm)
    out, figures, tables = tmp_path / "new" / "report.html", tmp_path / "figures", tmp_path / "tables"
    result = invoke(tmp_path / "runs", "-o", out, "--figures", figures, "--tables", tables, "--title", "A <title>")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        f"wrote {out}",
        f"wrote 3 figures to {figures}",
        f"wrote 7 tables to {tables}",
    ]
    assert "<h1>A &lt;title&gt;</h1>" in out.read_text()
    assert {path.name for path in figures.iterdir()} == {
        f"tiny-{what}.{kind}" for what in ("convergence", "clients", "differences") for kind in ("png", "pdf")
    }
    assert (figures / "tiny-clients.pdf").read_bytes().startswith(b"%PDF")
    assert (figures / "tiny-convergence.png").read_bytes().startswith(b"\x89PNG")
    kinds = [f"{what}-{rule}" for what in ("results", "differences") for rule in ("last", "last20", "best")]
    assert {path.name for path in tables.iterdir()} == {
        f"tiny-{what}.{ending}" for what in (*kinds, "costs") for ending in ("md", "tex", "csv")
    }


def test_figures_are_the_same_twice(hand_made: HandMade, tmp_path: Path) -> None:
    run = hand_made("run", [{"a": 0.5}])
    for name in ("one", "two"):
        assert invoke(run.folder, "-o", tmp_path / "x.html", "--figures", tmp_path / name).exit_code == 0
    assert {path.stem for path in (tmp_path / "one").iterdir()} == {"tiny-convergence", "tiny-clients"}
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.parametrize("kind", ["nothing", "a folder", "no place"])
def test_mistakes_are_one_line_and_exit_with_2(hand_made: HandMade, tmp_path: Path, kind: str) -> None:
    run = hand_made("run", [{"a": 0.5}])
    (tmp_path / "file").write_text("")
    words = {
        "nothing": [tmp_path / "nothing"],
        "a folder": [run.folder, "-o", tmp_path],
        "no place": [run.folder, "-o", tmp_path / "file" / "x.html"],
    }[kind]
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.output.startswith("fedfa: ") and len(result.output.splitlines()) == 1
