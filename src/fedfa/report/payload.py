"""The numbers behind a page's charts, thinned and rounded: what the browser is given."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedfa.data.splits import SIDES
from fedfa.report.entry import Entry
from fedfa.report.study import Panel, Series, Study
from fedfa.statistics import TITLES, Rule, Summary, summarise

POINTS = 100
"""Rounds of a curve that are drawn: about as many as can be told apart, and each a real round's number."""
MOST_BASELINES = 12
"""Series that all others can be compared with; of more series, the first few and FedAvg."""
MOST_SHOWN = 30
"""Clients whose labels and images are shown."""
TRACE_ROUNDS = 25
TRACE_BYTES = 300_000
"""What all traces of a page may take together."""
LEVELS = (0, 0.1, 0.5, 0.9, 1)
"""Quantiles over a layer's channels."""


def payload(study: Study) -> dict[str, Any]:
    """The whole page's numbers."""
    traced = sum(any(entry.traced for entry in series.used) for panel in study.panels for series in panel.series)
    share = TRACE_BYTES // max(1, traced)
    return {
        "rules": TITLES,
        "panels": [_panel(panel, share) for panel in study.panels],
    }


def _panel(panel: Panel, share: int) -> dict[str, Any]:
    return {
        "title": panel.title,
        "metric": panel.metric,
        "baselines": sorted(set(panel.baselines)),
        "base": panel.base_title,
        "whos": _whos(panel),
        "series": [_series(series, panel) for series in panel.series],
        "bars": {rule: _bars(panel, rule) for rule in panel.rules},
        "differences": {rule: _differences(panel, rule) for rule in panel.rules},
        "federation": _federation(panel.profile),
        "traces": [found for series in panel.series if (found := _traces(series, share))],
    }


def _whos(panel: Panel) -> list[list[str]]:
    """Whose numbers there are, each with a title; first, those that methods are compared by."""
    unseen = [["unseen", "mean over unseen clients"]] if panel.held_out else []
    clients = [[name, panel.client_title(name)] for name in panel.shown_clients]
    return [*unseen, ["mean", "mean over clients" if not unseen else "mean over seen clients"], *clients]


# Curves, bars, differences


def _series(series: Series, panel: Panel) -> dict[str, Any]:
    used = series.used
    wanted = [("test", who) for who, _ in _whos(panel)] + [("val", who) for who, _ in _whos(panel)] + [("loss", "mean")]
    curves = {f"{split}/{who}": curve for split, who in wanted if (curve := _curve(used, split, who))}
    return {
        "label": series.label,
        "seeds": [entry.seed for entry in used],
        "complete": series.complete,
        "curves": curves,
    }


def _curve(entries: Sequence[Entry], split: str, who: str) -> dict[str, Any] | None:
    """Mean and deviation over seeds by round, for rounds that all of them have; of means over clients, every
    seed's own numbers as well."""
    found = [curve for entry in entries if (curve := entry.curve(split, who))]
    rounds = thinned(sorted(set.intersection(*(set(curve) for curve in found)))) if found else []
    if not rounds:
        return None
    scale, digits = (1, 4) if split == "loss" else (100, 3)
    summaries = [summarise(scale * curve[round] for curve in found) for round in rounds]
    made: dict[str, Any] = {"x": rounds, "y": [round(summary.mean, digits) for summary in summaries]}
    if len(found) > 1:
        made["sd"] = [round(summary.sd or 0.0, digits) for summary in summaries]
        made["half"] = round(_half_width(summaries), 4)
        if who in ("mean", "unseen") and split != "val":
            made["each"] = [[round(scale * one[number], digits) for number in rounds] for one in found]
    return made


def _half_width(summaries: Sequence[Summary]) -> float:
    """What a deviation is multiplied with for a 95 % interval's half: it depends on the number of seeds alone."""
    for summary in summaries:
        if summary.sd and summary.high is not None:
            return (summary.high - summary.mean) / summary.sd
    return 0.0


def thinned(rounds: Sequence[int], most: int = POINTS) -> list[int]:
    """Evenly spaced ones of the rounds, the first and the last among them."""
    if len(rounds) <= most:
        return list(rounds)
    step = math.ceil((len(rounds) - 1) / (most - 1))
    return [*rounds[:-1:step], rounds[-1]]


def _interval(summary: Summary | None, digits: int = 3) -> list[float | None] | None:
    if summary is None:
        return None
    return [
        None if value is None else round(100 * value, digits) for value in (summary.mean, summary.low, summary.high)
    ]


def _bars(panel: Panel, rule: Rule) -> dict[str, list[list[float | None] | None]]:
    return {who: [_interval(series.summary(rule, who)) for series in panel.series] for who, _ in _whos(panel)}


def _differences(panel: Panel, rule: Rule) -> dict[str, list[list[float | None]]]:
    """By the place of the series compared with: place, seeds, mean, low, high, p, corrected p of each other one. Where
    not all are compared with the same one at first, that is `own`."""
    order = sorted(range(len(panel.series)), key=lambda place: place != panel.baseline)
    places = {series: place for place, series in enumerate(panel.series)}
    wanted: dict[str, int | None] = {str(place): place for place in order[:MOST_BASELINES]}
    if len(panel.bases) > 1:
        wanted["own"] = None
    return {
        name: [
            [places[one.series], one.difference.n, *(_interval(one.difference) or ()), one.difference.p, one.holm]
            for one in panel.compared(rule, place)
        ]
        for name, place in wanted.items()
    }


# The federation


def _federation(profile: dict[str, Any] | None) -> dict[str, Any] | None:
    if profile is None:
        return None
    every = list(profile["clients"])
    names = [every[place] for place in np.linspace(0, len(every) - 1, min(len(every), MOST_SHOWN)).round().astype(int)]
    clients = profile["clients"]
    return {
        "task": profile["task"],
        "classes": profile["classes"],
        "channels": profile["channels"],
        "population": profile["population"],
        "clients": names,
        "labels": {side: [clients[name]["labels"][side] for name in names] for side in SIDES},
        "samples": [clients[name]["samples"] for name in names],
        **{what: [clients[name][what] for name in names] for what in ("mean", "std", "histogram")},
        "apart": profile["apart"],
        "distances": profile["distances"],
    }


# How γ and the running statistics moved


def _traces(series: Series, share: int) -> dict[str, Any] | None:
    """The first seed's traces: a layer and statistic at a time, a byte a channel and round between the lowest and the
    highest value, and quantiles over all channels."""
    for entry in series.used:
        kept = [(round, tensors) for round, tensors in entry.traces() if tensors]
        if not kept:
            continue
        at = thinned([round for round, _ in kept], TRACE_ROUNDS)
        tensors = [tensors for round, tensors in kept if round in at]
        names = [name for name in tensors[-1] if all(name in found for found in tensors)]
        room = max(1, share // max(1, len(names) * len(at)))
        fields = {name: _field([found[name] for found in tensors], room) for name in names}
        fusion = series.config["algorithm"].get("fusion", "adaptive")
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        titles = {name: _trace_title(name, layers, fusion) for name in names}
        return {"label": series.label, "seed": entry.seed, "rounds": at, "fields": fields, "titles": titles}
    return None


def _field(tensors: Sequence[torch.Tensor], room: int) -> dict[str, Any]:
    values = torch.stack([tensor.detach().flatten().double() for tensor in tensors], 1).numpy()  # (channels, rounds)
    values = np.nan_to_num(values, posinf=3e38, neginf=-3e38)
    low, high = float(values.min()), float(values.max())
    picked = np.linspace(0, len(values) - 1, min(len(values), room)).round().astype(int)
    scaled = np.zeros_like(values) if high == low else 255 * (values - low) / (high - low)
    return {
        "all": len(values),
        "channels": picked.tolist() if len(picked) < len(values) else None,
        "low": _digits(low),
        "high": _digits(high),
        "bytes": base64.b64encode(scaled[picked].round().astype(np.uint8).tobytes()).decode(),
        "quantiles": [[_digits(value) for value in row] for row in np.quantile(values, LEVELS, axis=0)],
    }


def _trace_title(name: str, layers: Sequence[str], fusion: str) -> list[str]:
    """Layer and statistic."""
    layer, _, statistic = name.rpartition(".")
    gamma = "γ" if fusion == "adaptive" else "variance over clients"
    known = {
        "gamma_mean": f"{gamma} of the mean μ",
        "gamma_std": f"{gamma} of the standard deviation σ",
        "mean": "running mean, averaged over clients",
        "std": "running standard deviation, averaged over clients",
    }
    return [f"{layers.index(layer) + 1}: {layer}" if layer else "all", known.get(statistic, statistic)]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
