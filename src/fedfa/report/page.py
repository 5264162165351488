"""The page: one HTML file with everything in it, which needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import fedfa
from fedfa.report.beside import printed
from fedfa.report.entry import Entry
from fedfa.report.markup import Markup, escaped, joined, json_block, tag
from fedfa.report.payload import payload
from fedfa.report.study import Panel, Series, Study
from fedfa.report.tables import costs, fixed, paper_by_client, results, signed
from fedfa.statistics import EQUAL, TITLES, Summary

MOST_SAMPLES = 50
"""Clients whose sample counts a run's provenance lists."""
MOST_LINKS = 5
"""Federations that the bar above is enough for."""
MOST_OPEN = 40
"""Runs that are listed; those of more are folded up, federation by federation."""
KINDS = (None, "number", "number", "number", None)
"""How the columns of the contents are set."""


def page(study: Study, title: str | None = None) -> str:
    """The report as HTML."""
    title = title or study.title
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title}: fedfa report"),
        tag("style", style),
    )
    panels = [_panel(panel, number) for number, panel in enumerate(study.panels)]
    body = tag(
        "body",
        tag("a", "Skip to the results", href="#main", class_="skip"),
        _header(study, title),
        _navigation(study),
        tag("main", tag("div", _contents(study), panels, _runs(study), class_="wide"), id="main"),
        tag("footer", tag("div", _footer(), class_="wide")),
        json_block(payload(study), "data"),
        tag("script", script),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _asset(name: str) -> Markup:
    return Markup((files("fedfa.report") / "assets" / name).read_text("utf-8"))


def _header(study: Study, title: str) -> Markup:
    seeds = sorted({entry.seed for entry in study.entries})
    methods = sum(len(panel.series) for panel in study.panels if not panel.within)
    parts = [_count(len(study.entries), "run"), _count(methods, "method"), _count(len(seeds), "seed")]
    incomplete = sum(not entry.done for entry in study.entries)
    parts += [f"{incomplete} incomplete"] if incomplete else []
    parts += [f"{len(study.broken)} unreadable"] if study.broken else []
    text = tag("div", tag("h1", title), tag("p", " · ".join(parts)))
    switch = tag("button", "Dark", type="button", id="theme", hidden=True)
    return tag("header", tag("div", text, switch, class_="wide"), class_="top")


def _navigation(study: Study) -> Markup:
    links = [(f"#panel-{number}", panel.title) for number, panel in enumerate(study.panels) if not panel.within]
    if len(study.panels) == 1:
        (panel,) = study.panels
        links = [("#panel-0", "Results"), ("#curves-0", "Convergence"), ("#clients-0", "Clients")]
        links += [("#differences-0", "Differences")] if len(panel.series) > 1 else []
        links += [("#federation-0", "Federation")] if panel.profile else []
        links += [("#traces-0", "γ and statistics"), ("#costs-0", "Cost")]
    if len(study.panels) > MOST_LINKS:
        links = [("#contents", "Contents"), *links]
    items = [tag("li", tag("a", text, href=target)) for target, text in [*links, ("#runs", "Runs")]]
    return tag("nav", tag("div", tag("ul", items), class_="wide"), class_="bar", aria_label="Sections")


def _contents(study: Study) -> Markup | None:
    """What is where, in a report that is long."""
    if len(study.panels) <= MOST_LINKS:
        return None
    heads = ("federation", "methods", "seeds", "highest mean", "")
    head = [tag("th", text, scope="col", class_=kind) for text, kind in zip(heads, KINDS, strict=True)]
    rows = []
    for number, panel in enumerate(study.panels):
        if panel.within:
            continue
        highest = _highest(panel)
        best = "–" if highest is None else f"{100 * highest[1].mean:.1f} %"
        whose = "" if highest is None else " and ".join(series.label for series in highest[0])
        seeds = {entry.seed for series in panel.series for entry in series.entries}
        counts = (len(panel.series), len(seeds))
        cells = zip((*counts, best, whose), KINDS[1:], strict=True)
        link = tag("a", panel.title, href=f"#panel-{number}")
        rows.append(tag("tr", tag("th", link, scope="row"), [tag("td", text, class_=kind) for text, kind in cells]))
    text = (
        "Federations, and the method with the highest mean over seeds in each. Where others have seeds, a single run "
    )
    caption = tag("caption", tag("span", f"{text}does not count, nor one that is not complete."))
    table = tag("table", caption, tag("thead", tag("tr", head)), tag("tbody", rows), class_="contents")
    return _card("Contents", "contents", _scrolling(table, "Contents"), level=2)


# A federation's panel


def _panel(panel: Panel, number: int) -> Markup:
    cards = [
        _results(panel, number),
        _curves(number),
        tag("div", _bars(number), _differences(panel, number), class_="grid"),
        _federation(panel, number),
        _traces(panel, number),
        _costs(panel, number),
    ]
    title = tag("h2", panel.title, id=f"panel-{number}-title")
    held_out = f" Held out, and only tested on: {', '.join(panel.held_out)}." if panel.held_out else ""
    if panel.in_turn:
        held_out = f" Held out one after the other, and tested on: {', '.join(panel.held_out)}."
    if panel.lacking:
        held_out += f" Not among these, since they have no run without each of them: {'; '.join(panel.lacking)}."
    lead = tag("p", _lead(panel), held_out, class_="lead")
    if panel.within:  # its numbers are in the panel of all whose turn it was
        cards = [tag("details", tag("summary", "Its results, curves and costs"), cards, class_="fold")]
    return tag(
        "section", title, lead, cards, class_="panel", id=f"panel-{number}", aria_labelledby=f"panel-{number}-title"
    )


def _lead(panel: Panel) -> Markup:
    """What the numbers say, in a sentence or two, and no more than they say."""
    rule = panel.rules[0] if panel.rules else "last"
    highest = _highest(panel)
    if highest is None:
        return escaped("No run has an evaluated round yet.")
    leaders, best = highest
    some_alone = len(panel.ranked) < len(panel.comparable)
    among = " of the methods with several seeds" if some_alone else ""
    text = [
        tag("strong", " and ".join(series.label for series in leaders)),
        f" {'have' if len(leaders) > 1 else 'has'} the highest mean{among}, {fixed(100 * best.mean)} %"
        if len(panel.ranked) > 1
        else f" reaches {fixed(100 * best.mean)} %{', as the only one with several seeds' if some_alone else ''}",
        f" (95 % interval {fixed(100 * best.low)} to {fixed(100 * best.high)}, {best.n} seeds)"
        if best.low is not None and best.high is not None
        else " (one seed: no interval)",
        f" of test {panel.metric}{' on unseen clients' if panel.held_out else ''}, {TITLES[rule]}.",
    ]
    base = panel.base_title if len(panel.bases) == 1 else f"their {panel.base_title}"
    compared = panel.compared(rule)
    apart = [one for one in compared if one.difference.low is not None]
    clear = [one for one in apart if not (one.difference.low or 0) <= 0 <= (one.difference.high or 0)]
    if apart:
        told = ", ".join(f"{one.series.label} ({signed(100 * one.difference.mean)})" for one in clear[:4])
        more = f" and {len(clear) - 4} more" if len(clear) > 4 else ""
        text.append(
            f" Of {_count(len(apart), 'difference')} to {base}, "
            + (f"{len(clear)} {'have' if len(clear) > 1 else 'has'} an interval without zero: {told}{more}."
               if clear else "none has an interval without zero.")
        )  # fmt: skip
    return joined(*text)


def _highest(panel: Panel) -> tuple[list[Series], Summary] | None:
    """The series with the highest mean, and the first one's numbers."""
    rule = panel.rules[0] if panel.rules else "last"
    found = [(series, series.summary(rule, panel.primary)) for series in panel.ranked]
    known = [(series, summary) for series, summary in found if summary is not None]
    if not known:
        return None
    best = max((summary for _, summary in known), key=lambda summary: summary.mean)
    return [series for series, summary in known if best.mean - summary.mean <= EQUAL], best


def _card(title: str, identity: str | None, *content: Any, level: int = 3, **attributes: Any) -> Markup:
    return tag("section", tag(f"h{level}", title), content, class_="card", id=identity, **attributes)


def _plot(label: str) -> Markup:
    hint = f"{label}. Arrow keys read out the values."
    return tag("div", class_="plot", tabindex=0, role="group", aria_roledescription="chart", aria_label=hint)


def _scrolling(content: Any, label: str) -> Markup:
    return tag("div", content, class_="scroll", tabindex=0, role="region", aria_label=label)


def _results(panel: Panel, number: int) -> Markup:
    rules = panel.rules
    if not rules:
        return _card("Results", f"results-{number}", tag("p", "Nothing to show yet.", class_="note"))
    options = [tag("option", TITLES[rule], value=rule) for rule in rules]
    choice = (
        tag("label", "Numbers are taken from", for_=f"rule-{number}"),
        tag("select", options, class_="rule", id=f"rule-{number}"),
    )
    tables = [
        tag("div", _scrolling(results(panel, rule).html(class_="sortable"), f"Results, {TITLES[rule]}"),
            data_rule=rule, hidden=place > 0)
        for place, rule in enumerate(rules)
    ]  # fmt: skip
    incomplete = [series.label for series in panel.series if not series.complete]
    notes = []
    if incomplete:
        text = f"Incomplete, with the numbers so far, and compared with nothing: {', '.join(incomplete)}."
        notes.append(tag("p", text, class_="note warn"))
    partly = [
        _left_out(series) for series in panel.series if series.complete and len(series.used) < len(series.entries)
    ]
    if partly:
        notes.append(tag("p", f"Left out of the numbers: {'; '.join(partly)}.", class_="note warn"))
    if any(printed(panel, series) for series in panel.series):
        text = "'paper' is what Zhou and Konukoglu (ICLR 2023) print: single runs, on splits of their own."
        notes.append(tag("p", text, class_="note"))
    theirs = paper_by_client(panel)
    beside = [] if theirs is None else [_scrolling(theirs.html(class_="sortable"), "The paper's numbers by client")]
    controls = tag("div", tag("div", choice, class_="field"), class_="controls")
    return _card("Results", f"results-{number}", controls, tables, notes, beside)


def _left_out(series: Series) -> str:
    """Which of its runs do not count, and why."""
    counted = {entry.seed for entry in series.used}
    return ", ".join(
        f"a second run of {series.label}, seed {entry.seed}"
        if entry.done and entry.seed in counted
        else f"{series.label}, seed {entry.seed}, {entry.status}"
        for entry in series.entries
        if entry not in series.used
    )


def _curves(number: int) -> Markup:
    legend = tag("fieldset", tag("legend", "Methods shown, here and below"), class_="legend")
    content = (tag("div", class_="controls"), _plot("Convergence: a line a method, by round"))
    return _card("Convergence", f"curves-{number}", legend, *content, data_chart="curves")


def _bars(number: int) -> Markup:
    note = tag("p", "Means over seeds, with 95 % intervals.", class_="note")
    content = (note, tag("div", class_="controls"), _plot("Bars: methods by client"))
    return _card("Clients", f"clients-{number}", *content, data_chart="bars")


def _differences(panel: Panel, number: int) -> Markup | None:
    if len(panel.series) < 2 or not panel.rules:
        return None
    note = tag("p", "Paired by seed: mean and 95 % interval. An interval across zero settles nothing.", class_="note")
    content = (note, tag("div", class_="controls"), _plot("Paired differences, an interval a method"))
    return _card("Differences", f"differences-{number}", *content, data_chart="differences")


def _federation(panel: Panel, number: int) -> Markup | None:
    profile = panel.profile
    if profile is None:
        return None
    size = "×".join(map(str, profile["image"]))
    text = f"{_count(profile['population'], 'client')}, {_count(len(profile['classes']), 'class', 'classes')}, "
    text += f"images of {size}. By the run with the lowest seed: splits change with the seed."
    labels = _card(
        "Labels",
        None,
        tag("div", class_="controls"),
        _scrolling(None, "Labels by client"),
        level=4,
        data_chart="labels",
    )
    looks = _card(
        "Feature shift", None, tag("p", "A dot a client, lines: standard deviation over its images.", class_="note"),
        tag("div", class_="controls"), _plot("Brightness and contrast of the images, a dot a client"),
        level=4, data_chart="looks",
    )  # fmt: skip
    histogram = _card(
        "Intensities", None, tag("p", f"Of the first {min(7, len(profile['clients']))} clients.", class_="note"),
        tag("div", class_="controls"), _plot("Share of pixels by intensity, a line a client"), level=4,
        data_chart="histogram",
    )  # fmt: skip
    apart = _card("How far apart", None, _scrolling(None, "Distances between clients"), level=4, data_chart="apart")
    return tag(
        "section", tag("h3", "Federation"), tag("p", text, class_="note"),
        tag("div", labels, apart, looks, histogram, class_="grid"), class_="part", id=f"federation-{number}",
        aria_label="Federation",
    )  # fmt: skip


def _traces(panel: Panel, number: int) -> Markup:
    if not any(entry.traced for series in panel.series for entry in series.used):
        text = "None here: only algorithms that share features' statistics record any, and summaries of runs keep none."
        return _card("γ and running statistics", f"traces-{number}", tag("p", text, class_="note"))
    note = tag("p", "By layer and channel, as the server had them after a round.", class_="note")
    halves = [
        tag("div", tag("h4", title), _plot(label), class_="half")
        for title, label in (
            ("Every channel", "Heat map: channels by round"),
            ("Quantiles over channels", "Median, 10 to 90 %, lowest and highest over channels, by round"),
        )
    ]
    content = (note, tag("div", class_="controls"), tag("div", halves, class_="grid"))
    return _card("γ and running statistics", f"traces-{number}", *content, data_chart="traces")


def _costs(panel: Panel, number: int) -> Markup:
    return _card("Cost", f"costs-{number}", _scrolling(costs(panel).html(class_="sortable"), "Cost"))


# The runs


def _runs(study: Study) -> Markup:
    groups = [_grouped(panel, len(study.entries) > MOST_OPEN) for panel in study.panels]
    broken = [
        tag("details", tag("summary", place, " ", tag("span", "unreadable")), tag("p", why, class_="note warn"))
        for place, why in study.broken.items()
    ]
    note = tag("p", "The whole config and provenance of each.", class_="note")
    return tag("section", tag("h2", "Runs"), note, groups, _card("Unreadable", None, broken) if broken else None,
               class_="runs", id="runs", aria_label="Runs")  # fmt: skip


def _grouped(panel: Panel, folded: bool) -> Any:
    """A federation's runs."""
    groups = [_group(panel, series) for series in panel.series]
    if not folded:
        return groups
    count = sum(len(series.entries) for series in panel.series)
    return tag("details", tag("summary", panel.title, tag("span", f": {_count(count, 'run')}")), groups, class_="fold")


def _group(panel: Panel, series: Series) -> Markup:
    first = series.entries[0]
    runs = [_run(entry, None if entry is first else first) for entry in series.entries]
    return tag("section", tag("h3", f"{series.label} on {panel.title}"), runs, class_="card")


def _run(entry: Entry, like: Entry | None) -> Markup:
    """A run; of one whose config differs from another's by its seed alone, that is said instead."""
    import tomli_w

    summary = tag("summary", f"seed {entry.seed}: ", tag("span", f"{entry.status}, {entry.name}"))
    facts = dict(entry.provenance)
    notices = [tag("p", line, class_="note warn") for line in facts.pop("notices", ())]
    if len(facts.get("samples", ())) > MOST_SAMPLES:
        facts["samples"] = f"{len(facts['samples'])} clients"
    if like is not None and {**entry.config, "seed": 0} == {**like.config, "seed": 0}:
        config = tag("p", f"Config: as that of seed {like.seed} above, with seed = {entry.seed}.", class_="note")
    else:
        config = joined(tag("h4", "Config"), tag("pre", tomli_w.dumps(entry.config), tabindex=0))
    provenance = tag("pre", json.dumps(facts, indent=1, ensure_ascii=False), tabindex=0)
    return tag("details", summary, notices, config, tag("h4", "Provenance"), provenance)


def _footer() -> Markup:
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return tag(
        "p", f"Made by fedfa {fedfa.__version__} on {made}. Intervals are Student's t over seeds; differences are "
        "paired by seed; p-values are corrected for the number of methods (Holm), intervals are not.",
        tag("noscript", " Charts need JavaScript; the tables above do not."),
    )  # fmt: skip


def _count(number: int, what: str, many: str = "") -> str:
    return f"{number:,} {what if number == 1 else many or what + 's'}"
