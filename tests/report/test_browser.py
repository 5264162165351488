"""The report's page in a real browser: Debian's Chromium, driven by Playwright. Skipped where there is none."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from studies import entry, many_runs, study

import fedfa
from fedfa import Run
from fedfa.report.page import page
from fedfa.report.write import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(FOUND is None, reason=f"no browser: none of {', '.join(NAMES)} is there")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
CHARTS = ("curves", "bars", "differences", "labels", "looks", "histogram", "apart", "traces")
PHONE, DESKTOP = 375, 1280
HERE = Path(__file__).parent
FOCUSED = """() => {
    const node = document.activeElement, style = getComputedStyle(node.closest('.chip') || node);
    const label = node.labels && node.labels.length ? node.labels[0].textContent : node.textContent;
    return [(node.getAttribute('aria-label') || label).trim().slice(0, 40), style.outlineStyle];
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """FedAvg and FedFA on digit-sites, two seeds and three rounds each."""
    root = tmp_path_factory.mktemp("runs")
    settings: dict[str, Any] = {"rounds": 3, "threads": 1, "device": "cpu"}
    return [
        fedfa.run("digit-sites", root=root, algorithm=algorithm, seed=seed, **settings)
        for algorithm in ("fedavg", "fedfa")
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def file(runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report([run.folder for run in runs], path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=FOUND, args=list(FLAGS))
        yield browser
        browser.close()


class Visit:
    """A page that is open, and what it has said and asked for."""

    def __init__(self, browser: Any, file: Path, width: int = DESKTOP, scheme: str = "light") -> None:
        size = {"width": width, "height": 800}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, has_touch=width == PHONE)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.address = file.as_uri()
        self.page.goto(self.address)
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)

    def see_all(self) -> None:
        """Scroll down, a screen at a time: charts are drawn when they come near."""
        for at in range(0, self.page.evaluate("document.documentElement.scrollHeight"), 600):
            self.page.evaluate(f"window.scrollTo({{top: {at}, behavior: 'instant'}})")
            self.page.wait_for_timeout(40)
        self.page.wait_for_function("[...document.querySelectorAll('.plot')].every((plot) => plot.drawn)")

    def chart(self, name: str) -> Any:
        chart = self.page.locator(f'[data-chart="{name}"]').first
        chart.scroll_into_view_if_needed()
        self.page.wait_for_function(
            "(box) => [...box.querySelectorAll('.plot')].every((plot) => plot.drawn)", arg=chart.element_handle()
        )
        return chart


@pytest.fixture
def visit(browser: Any, file: Path) -> Iterator[Callable[..., Visit]]:
    visits: list[Visit] = []

    def visit(width: int = DESKTOP, scheme: str = "light", file: Path = file) -> Visit:
        visits.append(Visit(browser, file, width, scheme))
        return visits[-1]

    yield visit
    for one in visits:
        one.context.close()


Visits = Callable[..., Visit]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_everything_is_drawn_without_errors_and_without_a_network(visit: Visits, width: int, scheme: str) -> None:
    seen = visit(width, scheme)
    seen.see_all()
    assert seen.said == []
    assert seen.asked == [seen.address]
    for name in CHARTS:
        chart = seen.page.locator(f'[data-chart="{name}"]')
        assert chart.count() == 1, name
        drawn = chart.locator(".plot svg, .plot canvas, table").first.bounding_box()
        assert drawn["width"] > 100 and drawn["height"] > 40, name
    assert seen.page.locator('[data-chart="curves"] path.curve').count() == 2
    assert seen.page.locator('[data-chart="curves"] path.band').count() == 2
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width  # wide tables scroll in themselves
    background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", background)[:3]))
    assert lightness > 600 if scheme == "light" else lightness < 150


def test_a_filter_takes_a_method_out_of_every_chart(visit: Visits) -> None:
    seen = visit()
    seen.see_all()

    def shown(chart: str) -> set[str]:
        groups = seen.page.locator(f'[data-chart="{chart}"] [data-series]')
        return {groups.nth(number).get_attribute("data-series") for number in range(groups.count())}

    assert shown("curves") == shown("bars") == {"fedavg", "fedfa"} and shown("differences") == {"fedfa"}
    box = seen.page.get_by_role("checkbox", name="fedfa")
    box.uncheck()
    assert shown("curves") == shown("bars") == {"fedavg"} and shown("differences") == set()
    box.focus()
    seen.page.keyboard.press("Space")
    assert shown("curves") == shown("bars") == {"fedavg", "fedfa"} and shown("differences") == {"fedfa"}
    assert seen.said == []


def test_hovering_reads_out_a_round(visit: Visits, runs: list[Run]) -> None:
    seen = visit()
    plot = seen.chart("curves").locator(".plot")
    box = plot.bounding_box()
    seen.page.mouse.move(box["x"] + box["width"] - 15, box["y"] + box["height"] / 2)
    tip = plot.locator(".tip")
    assert tip.locator("b").inner_text() == "Round 3"
    for name in ("fedavg", "fedfa"):
        scores = [run.metrics[-1]["test"]["mean"] for run in runs if run.config["algorithm"]["name"] == name]
        read = re.search(rf"{name}\s+([\d.]+) ", tip.inner_text())
        assert read is not None and float(read[1]) == pytest.approx(50 * sum(scores), abs=0.06)
    seen.page.mouse.move(5, 5)
    assert tip.count() == 0


def test_a_finger_reads_out_a_round(visit: Visits) -> None:
    seen = visit(PHONE)
    plot = seen.chart("curves").locator(".plot")
    box = plot.bounding_box()
    seen.page.touchscreen.tap(box["x"] + box["width"] - 15, box["y"] + box["height"] / 2)
    assert plot.locator(".tip b").inner_text() == "Round 3"  # and it stays


def test_all_charts_are_there_in_print(visit: Visits) -> None:
    seen = visit()
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert seen.page.evaluate("[...document.querySelectorAll('.plot')].every((plot) => plot.children.length)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_is_white_and_holds_what_the_screen_does(visit: Visits, scheme: str) -> None:
    """A page of A4 has some 720 pixels: nothing may be wider, and in the dark nothing stays dark."""
    seen = visit(scheme=scheme)
    seen.see_all()
    before = seen.chart("curves").locator(".plot > svg").bounding_box()["width"]
    seen.page.emulate_media(media="print", color_scheme=scheme)
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    ends = (
        "[...document.querySelectorAll('main .plot > *, main table')].map((one) => one.getBoundingClientRect().right)"
    )
    left = "document.querySelector('main .wide').getBoundingClientRect().left"
    assert seen.page.evaluate(f"Math.max(...{ends}) - {left}") <= 680
    ink = seen.page.evaluate("getComputedStyle(document.body).color")
    assert sum(map(int, re.findall(r"\d+", ink))) < 200, ink
    seen.page.emulate_media(media="screen", color_scheme=scheme)
    seen.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert seen.chart("curves").locator(".plot > svg").bounding_box()["width"] == before


def test_of_many_methods_the_best_are_shown_at_first_and_all_are_told_apart(visit: Visits, tmp_path: Path) -> None:
    runs = [entry([{"amazon": 0.9 - number / 100}] * 3, lr=0.1 + number / 100) for number in range(20)]
    path = tmp_path / "many.html"
    path.write_text(page(study(*runs)), "utf-8")
    seen = visit(file=path)
    curves = seen.chart("curves")
    assert curves.locator("path.curve").count() == 12
    assert "at first the 12 with the highest means" in curves.locator("legend").inner_text()
    boxes = curves.get_by_role("checkbox")
    assert [box.is_checked() for box in boxes.all()] == [True] * 12 + [False] * 8
    for box in boxes.all()[12:]:
        box.check()
    drawn = "(all) => all.map((one) => [getComputedStyle(one).stroke, one.getAttribute('stroke-dasharray')].join())"
    looks = curves.locator("path.curve").evaluate_all(drawn)
    assert len(looks) == len(set(looks)) == 20
    bars = seen.chart("bars").locator("g[data-series]")
    filled = "(all) => all.map((one) => [...one.querySelectorAll('rect')].map((r) => getComputedStyle(r).fill).join())"
    fills = bars.evaluate_all(filled)
    assert len(fills) == 40 and len(set(fills)) == 20, "a client's and the mean's"
    assert seen.said == []


def test_arrow_keys_read_out_a_chart(visit: Visits) -> None:
    seen = visit()
    for name, titles in (
        ("curves", ["Round 1", "Round 2", "Round 1", "Round 3"]),
        ("bars", ["fax", "phone", "fax", "mean"]),
    ):
        chart = seen.chart(name)
        chart.locator(".plot").focus()
        for key, title in zip(("ArrowRight", "ArrowRight", "ArrowLeft", "End"), titles, strict=True):
            seen.page.keyboard.press(key)
            assert chart.locator(".tip b").inner_text().startswith(title)
            said = chart.locator("[aria-live]").inner_text()
            assert said.startswith(title) and "fedavg" in said and "fedfa" in said
        seen.page.keyboard.press("Escape")
        assert chart.locator(".tip").count() == 0


def test_tab_goes_through_the_page_in_order(visit: Visits) -> None:
    seen = visit()
    seen.see_all()
    seen.page.evaluate("window.scrollTo(0, 0)")
    reached: list[str] = []
    outlines: list[str] = []
    for _ in range(40):
        seen.page.keyboard.press("Tab")
        label, outline = seen.page.evaluate(FOCUSED)
        reached.append(label)
        outlines.append(outline)
    assert reached[0] == "Skip to the results" and reached[1].startswith("Switch to")
    assert reached[2] == "Results" and "Runs" in reached
    reached = reached[reached.index("Runs") :]  # what follows the links
    order = [
        "Runs",
        "Numbers are taken from",
        "fedavg",
        "fedfa",
        "What",
        "Client",
        "Band",
        "Convergence:",
        "Bars:",
        "Against",
    ]
    places = [next(at for at, text in enumerate(reached) if text.startswith(title)) for title in order]
    assert places == sorted(places)
    assert set(outlines) == {"solid"}  # the focus is seen wherever it is


def test_light_and_dark_can_be_chosen_and_stay(visit: Visits) -> None:
    seen = visit()
    page = seen.page
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Switch to dark colours").click()
    after = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert before != after
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after
    page.get_by_role("button", name="Switch to light colours").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == before


def test_the_rule_changes_tables_and_charts(visit: Visits) -> None:
    seen = visit()
    page = seen.page
    seen.chart("bars").locator("summary").click()
    captions: dict[str, tuple[str, str]] = {}
    for rule in ("last", "last20", "best"):
        page.get_by_label("Numbers are taken from").select_option(rule)
        shown = page.locator("[data-rule]:visible caption")
        assert shown.count() == 1
        captions[rule] = (shown.inner_text(), page.locator('[data-chart="bars"] details caption').inner_text())
    for rule, title in (
        ("last", "last round"),
        ("last20", "mean of the last 20 rounds"),
        ("best", "best by validation"),
    ):
        assert all(title in text for text in captions[rule])


def test_a_chart_s_numbers_are_there_as_a_table(visit: Visits, runs: list[Run]) -> None:
    seen = visit()
    chart = seen.chart("curves")
    chart.get_by_label("Band over seeds").select_option("none")
    chart.locator("summary").click()
    rows = chart.locator("table tbody tr")
    rows.first.wait_for(state="attached")  # it is filled when the browser says that it was opened
    assert rows.count() == 3
    wanted = 50 * sum(run.metrics[0]["test"]["mean"] for run in runs if run.config["algorithm"]["name"] == "fedavg")
    assert rows.nth(0).locator("td").nth(0).inner_text() == f"{wanted:.1f}"
    chart.get_by_label("Rounds", exact=True).select_option("last quarter")
    assert rows.count() == 1 and rows.nth(0).locator("th").inner_text() == "3"
    chart.get_by_label("What").select_option("loss")
    assert "training loss" in chart.locator("caption").inner_text()
    assert chart.get_by_label("Client").is_disabled()


def test_bars_can_be_dots_close_up(visit: Visits) -> None:
    seen = visit()
    chart = seen.chart("bars")
    assert chart.locator("rect.column").count() == 2 * 5 and chart.locator("circle.dot").count() == 0
    chart.get_by_label("Scale").select_option("dots")
    assert chart.locator("rect.column").count() == 0 and chart.locator("circle.dot").count() == 2 * 5
    assert seen.said == []


def test_a_table_sorts(visit: Visits) -> None:
    page = visit().page
    table = page.locator("[data-rule]:visible table")
    for direction in ("descending", "ascending"):
        table.get_by_role("button", name="mean").click()
        numbers = [float(text) for text in table.locator("tbody tr td:nth-child(7)").all_inner_texts()]
        assert numbers == sorted(numbers, reverse=direction == "descending")
        assert table.locator(f'th[aria-sort="{direction}"]').text_content() == "mean"


def test_a_layer_and_a_statistic_can_be_chosen(visit: Visits, runs: list[Run]) -> None:
    seen = visit()
    chart = seen.chart("traces")
    assert chart.get_by_label("Run").locator("option").all_inner_texts() == ["fedfa, seed 0"]
    layers = chart.get_by_label("Layer").locator("option").all_inner_texts()
    assert layers == ["1: augments.0", "2: augments.1"]
    chart.get_by_label("Layer").select_option(layers[1])
    chart.get_by_label("Statistic").select_option("running mean, averaged over clients")
    heat = chart.locator(".plot").first
    heat.focus()
    seen.page.keyboard.press("ArrowRight")
    assert heat.locator(".tip b").inner_text() == "Channel 0, round 1"
    ((_, first), *_) = next(run for run in runs if run.config["algorithm"]["name"] == "fedfa").traces()
    tensor = first["augments.1.mean"]
    read = float(heat.locator(".tip em").inner_text().replace("−", "-"))
    assert read == pytest.approx(float(tensor[0]), abs=0.02 * float(tensor.abs().max()) + 0.02)
    chart.locator("summary").first.click()
    rows = chart.locator("table").first.locator("tbody tr")
    rows.first.wait_for(state="attached")
    assert rows.count() == len(tensor)


# Accessibility


def test_landmarks_headings_labels_and_tables(visit: Visits) -> None:
    seen = visit()
    seen.see_all()
    for details in seen.page.locator("details > summary").all():
        details.click()
    problems = seen.page.evaluate((HERE / "accessibility.js").read_text("utf-8"))
    assert problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(visit: Visits, scheme: str) -> None:
    """A contrast of 4.5 at least (WCAG 2 AA), for every text that is seen."""
    seen = visit(scheme=scheme)
    seen.see_all()
    faint = seen.page.evaluate((HERE / "contrast.js").read_text("utf-8"))
    assert faint == []


# Names


HOSTILE = "</script><img src=x onerror=\"window.hacked=1\"><b id='planted'>&amp;${x}"


def test_names_are_text(visit: Visits, hand_made: Callable[..., Run], tmp_path: Path) -> None:
    tests = [{HOSTILE: 0.5, "b": 0.25}, {HOSTILE: 0.75, "b": 0.5}]
    for seed in (0, 1):
        run = hand_made(f"run{seed}", tests, tests, seed=seed, description=HOSTILE)
        run.provenance |= {"notices": [HOSTILE], "hardware": HOSTILE}
        (run.folder / "provenance.json").write_text(json.dumps(run.provenance))
    path = tmp_path / "hostile.html"
    write_report([tmp_path / "run0", tmp_path / "run1"], path, title=HOSTILE)
    seen = visit(file=path)
    seen.see_all()
    chart = seen.chart("curves")
    chart.get_by_label("Client").select_option(HOSTILE)
    chart.locator(".plot").focus()
    seen.page.keyboard.press("ArrowRight")
    assert seen.page.evaluate("window.hacked") is None
    assert seen.page.locator("img, #planted").count() == 0
    assert seen.page.locator("h1").inner_text() == HOSTILE
    assert seen.said == [] and seen.asked == [seen.address]


def test_many_runs_are_drawn(visit: Visits, tmp_path: Path) -> None:
    """100 runs of 400 rounds."""
    path = tmp_path / "many.html"
    path.write_text(page(many_runs()), "utf-8")
    assert path.stat().st_size < 800_000
    seen = visit(file=path)
    ready = seen.page.evaluate("performance.getEntriesByType('navigation')[0].domComplete")
    assert ready < 60_000  # it is some hundred ms; machines that run tests are slow
    assert seen.chart("curves").locator("path.curve").count() == 10
    seen.page.get_by_label("Filter methods").first.fill("fedav")
    assert seen.page.locator('[data-chart="curves"] path.curve').count() == 2  # fedavg and fedavgm
    assert seen.said == []


def test_what_is_folded_is_drawn_when_it_is_opened(visit: Visits, tmp_path: Path) -> None:
    """Of a long report, which its contents lead through."""
    scores = [{"amazon": 0.5, "dslr": 0.6}, {"amazon": 0.55, "dslr": 0.7}]
    runs = [entry(scores, **{"split.fraction": share / 10}) for share in range(1, 6)]
    runs += [entry(scores, seed, held_out=(name,)) for name in ("amazon", "dslr") for seed in (0, 1)]
    path = tmp_path / "long.html"
    path.write_text(page(study(*runs)), "utf-8")
    seen = visit(file=path, width=PHONE)
    seen.page.get_by_role("region", name="Contents").get_by_role("link").nth(4).click()
    assert seen.page.url.endswith("#panel-4")
    folded = seen.page.locator("#panel-6")
    curves = folded.locator('[data-chart="curves"] path.curve')
    assert curves.count() == 0
    folded.get_by_text("Its results, curves and costs").click()
    curves.first.wait_for()
    assert curves.count() == 1  # of the one method
    assert seen.page.evaluate("document.documentElement.scrollWidth") == PHONE
    assert seen.said == []
