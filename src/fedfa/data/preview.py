"""`fedfa data preview`: contact sheets, distributions of labels and the feature shift, as pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfa.data.federation import Federation
from fedfa.data.look import Data, by_chunks, shown
from fedfa.data.sheets import MOST_IMAGES, Channels, all_of, draw_sheet, spread
from fedfa.data.splits import SIDES
from fedfa.errors import UserError
from fedfa.files import beside
from fedfa.report.figures import COLOURS, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDE_COLOURS = ("#4477aa", "#66ccee", "#ccbb44")
MARKERS = "osD^vPX"
MOST_CLIENTS = 30
"""Clients that have a row of their own in a picture; of more, a sample is shown."""
MOST_LOOKS = 16
"""Clients whose statistics are drawn."""
MOST_DOTS = 500
"""Clients that have a dot of their own."""
MOST_COLOURS = 6
"""Clients that have a colour of their own."""
MOST_NUMBERS = 12
"""Rows and columns up to which the fields of a picture have their numbers written in."""


def preview(data: Data, folder: Path, sheets: int = 12) -> Iterator[str]:
    """Draw everything into `folder`, and say what was written, a line a picture."""
    federation = data.federation
    if federation is None:
        raise UserError(f"there are no clients to draw: {data.why}")
    with style(9):
        yield _write(folder / "labels.png", draw_labels(federation))
        yield _write(folder / "shift.png", draw_shift(federation))
        names = chosen(federation, sheets)
        for name, file in zip(names, file_names(names), strict=True):
            yield _write(folder / f"sheet-{file}.png", draw_sheet(federation, name))
    if len(names) < len(federation.clients):
        yield f"contact sheets of {len(names):,} of {len(federation.clients):,} clients; --sheets N makes up to N"


def chosen(federation: Federation, most: int) -> list[str]:
    """All clients, or of more than `most` as many, evenly spaced from the largest to the smallest."""
    if len(federation.clients) <= most:
        return list(federation.clients)
    ordered = sorted(federation.clients, key=lambda name: -len(all_of(federation.clients[name])))
    places = np.linspace(0, len(ordered) - 1, most).round().astype(int) if most > 1 else np.zeros(most, int)
    return [ordered[place] for place in places]


def file_names(names: Sequence[str]) -> list[str]:
    """A file's name for every client: readable, and no two the same, on systems that ignore capitals too."""
    plain = [re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60] or "client" for name in names]
    seen: set[str] = set()
    for place, name in enumerate(plain):
        candidate, number = name, 2
        while candidate.lower() in seen:
            candidate, number = f"{name}-{number}", number + 1
        seen.add(candidate.lower())
        plain[place] = candidate
    return plain


def _write(path: Path, figure: Figure) -> str:
    with beside(path) as part:
        figure.savefig(part, format="png", pil_kwargs={"optimize": True})
    return f"wrote {path}"


def _title(federation: Federation, shown_clients: int) -> str:
    """What a picture is of, and that it shows a part where it does."""
    number = len(federation.clients)
    if shown_clients == number:
        return f"{federation.name}, {number} client{'s' if number > 1 else ''}"
    return f"{federation.name}, {shown_clients} of {number:,} clients, from the largest to the smallest"


# Labels


def draw_labels(federation: Federation) -> Figure:
    """What there is to learn at every client, and how much of it."""
    from matplotlib.figure import Figure

    names = chosen(federation, MOST_CLIENTS)
    segmentation = federation.task == "segmentation"
    wide = 5.5 if segmentation else min(2.5 + 0.45 * len(federation.classes), 9)
    figure = Figure(figsize=(wide + 4, 1.5 + 0.3 * max(len(names), 3)), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(wide, 3), sharey=True)
    (_draw_areas if segmentation else _draw_classes)(left, federation, names)
    _draw_sizes(right, federation, names)
    left.set_yticks(range(len(names)), [shown(name, 20) for name in names])
    left.set_ylim(len(names) - 0.5, -0.5)
    figure.suptitle(_title(federation, len(names)), fontsize=10)
    return figure


def _draw_classes(axes: Axes, federation: Federation, names: Sequence[str]) -> None:
    """A field for every client and class: the count as a number where there is room, its share as a colour."""
    number = len(federation.classes)
    counts = np.stack(
        [
            torch.bincount(federation.labels[all_of(federation.clients[name])].long(), minlength=number).numpy()
            for name in names
        ]
    )
    shares = 100 * counts / counts.sum(1, keepdims=True).clip(1)
    # Equal shares are in the middle of the scale or below, and a single client of one class does not stretch it.
    highest = max(np.quantile(shares, 0.99), 200 / number)
    drawn = axes.imshow(shares, cmap="cividis", vmin=0, vmax=highest, aspect="auto")
    if number <= MOST_NUMBERS + 3:
        for (row, column), count in np.ndenumerate(counts):
            light = shares[row, column] > 0.6 * highest
            axes.text(
                column, row, f"{count:,}", ha="center", va="center", fontsize=7, color="black" if light else "white"
            )
    step = -(-number // 32)
    ticks = range(0, number, step)
    long = max(len(federation.classes[place]) for place in ticks) > 3
    axes.set_xticks(ticks, [shown(federation.classes[place], 14) for place in ticks])
    axes.tick_params(axis="x", rotation=90 if long and number > 10 else 30 if long else 0, length=0)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("images of a class")
    more = "max" if shares.max() > highest else "neither"
    bar = axes.figure.colorbar(drawn, ax=axes, location="bottom", shrink=0.6, aspect=40, pad=0.02, extend=more)
    bar.set_label("share of the client's images, %")
    bar.outline.set_visible(False)


def _draw_areas(axes: Axes, federation: Federation, names: Sequence[str]) -> None:
    """What share of an image every class but the background takes."""
    number = len(federation.classes)
    for row, name in enumerate(names):
        index = all_of(federation.clients[name])
        masks = federation.labels[index[spread(len(index), MOST_IMAGES)]]
        for place in range(1, number):
            area = 100 * by_chunks(masks, partial(area_of, place))
            _interval(axes, area.numpy(), row + _offset(place - 1, number - 1), _mask_ink(place - 1))
    for place in range(1, number):
        axes.plot([], [], color=_mask_ink(place - 1), linewidth=5, label=shown(federation.classes[place], 20))
    axes.set(xlabel="share of an image, %", title="size of what masks mark")
    axes.set_xlim(left=-0.01 * axes.get_xlim()[1])
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0, handlelength=1)
    axes.title.set_horizontalalignment("left")
    axes.title.set_x(0)


def area_of(place: int, masks: Tensor) -> Tensor:
    """What share of each mask a class takes."""
    return (masks == place).flatten(1).double().mean(1)


def _mask_ink(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _draw_sizes(axes: Axes, federation: Federation, names: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    counts = np.array([[len(federation.clients[name].of(side)) for side in SIDES] for name in names])
    start = np.zeros(len(names))
    for place, side in enumerate(SIDES):
        axes.barh(range(len(names)), counts[:, place], left=start, height=0.7, color=SIDE_COLOURS[place], label=side)
        start += counts[:, place]
    for row, total in enumerate(counts.sum(1)):
        axes.text(total, row, f" {total:,}", va="center", fontsize=7)
    axes.set_xlim(0, start.max() * 1.15 + 1)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set(xlabel="images")
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0, handlelength=1, columnspacing=1)


def _interval(axes: Axes, values: NDArray[Any], at: float, colour: str) -> None:
    """Where 90 % of the values are, as a thin line; the middle half, as a thick one; the median, as a dot."""
    if not len(values):
        return
    low, first, middle, last, high = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95))
    axes.plot((low, high), (at, at), color=colour, linewidth=1, solid_capstyle="butt")
    axes.plot((first, last), (at, at), color=colour, linewidth=4, solid_capstyle="butt")
    axes.plot(middle, at, "o", color="white", markeredgecolor=colour, markersize=4)


def _offset(place: int, number: int) -> float:
    """Where the `place`-th of `number` lines of a row stands, from the row's middle."""
    return (place - (number - 1) / 2) * min(0.25, 0.75 / number)


# Feature shift


def draw_shift(federation: Federation) -> Figure:
    """How images look at every client: brightness and contrast, channel by channel, and how far apart clients are."""
    from matplotlib.figure import Figure

    names = chosen(federation, MOST_LOOKS)
    channels = Channels.of(federation.images)
    dots = chosen(federation, MOST_DOTS)
    each = max(20, MOST_IMAGES * MOST_LOOKS // max(len(dots), MOST_LOOKS))
    everyone = {name: statistics(federation, name, channels.picks, each) for name in dict.fromkeys((*dots, *names))}
    looks = {name: everyone[name] for name in names}
    tall = 1 + 0.12 * max(len(names), 8) * (1 + len(channels.picks) / 2)
    figure = Figure(figsize=(10, 4.2 + tall), dpi=100, layout="constrained")
    axes = figure.subplots(2, 2, height_ratios=(3.6, tall))
    _draw_scatter(axes[0, 0], everyone, len(federation.clients))
    _draw_distances(axes[0, 1], looks)
    _draw_statistics(axes[1], looks, channels)
    figure.suptitle(_title(federation, len(names)), fontsize=10)
    return figure


def statistics(federation: Federation, name: str, picks: Sequence[int], most: int = MOST_IMAGES) -> NDArray[np.float64]:
    """Mean and standard deviation of every picked channel of a client's images, (images, 2, channels), of 0–1."""
    index = all_of(federation.clients[name])
    images = federation.images[index[spread(len(index), most)]][:, list(picks)]
    taken = by_chunks(images, lambda part: torch.stack((part.double().mean((2, 3)), _deviation(part)), 1) / 255)
    found: NDArray[np.float64] = taken.numpy()
    return found


def _deviation(images: Tensor) -> Tensor:
    return (images.double() - images.double().mean((2, 3), keepdim=True)).square().mean((2, 3)).sqrt()


def distances(looks: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """How far clients are apart: the difference of their mean statistics, in units of how much a statistic differs
    between images of one client (a root mean square over clients), as a root mean square over statistics. At 1,
    clients differ from each other as images of one client do."""
    centres = np.stack(
        [look.mean(0).ravel() if len(look) else np.full(look.shape[1] * look.shape[2], np.nan) for look in looks]
    )
    spread = np.sqrt(np.mean([look.var(0).ravel() for look in looks if len(look)], axis=0)).clip(1e-3)
    apart: NDArray[np.float64] = np.sqrt((((centres[:, None] - centres[None]) / spread) ** 2).mean(-1))
    return apart


def _draw_scatter(axes: Axes, looks: dict[str, NDArray[np.float64]], clients: int) -> None:
    """An image a dot and a client a colour, or where there are many clients, a client a dot."""
    if len(looks) <= MOST_COLOURS:
        for place, (name, look) in enumerate(looks.items()):
            brightness, contrast = look.mean(2).T
            style: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place], "linewidths": 0}
            axes.scatter(brightness, contrast, s=12, alpha=0.5, **style)
            axes.scatter([], [], s=25, label=shown(name, 20), **style)
        axes.legend(loc="best", frameon=True, framealpha=0.8, edgecolor="none", borderpad=0.3, handletextpad=0.2)
        axes.set_title("an image a dot")
    else:
        looks = {name: look for name, look in looks.items() if len(look)}
        centres = np.stack([look.mean((0, 2)) for look in looks.values()])
        axes.scatter(centres[:, 0], centres[:, 1], s=25, color=COLOURS[0], linewidths=0)
        for place in _outermost(centres):
            axes.annotate(shown(list(looks)[place], 16), centres[place], (4, 3), textcoords="offset points", fontsize=7)
        part = f"all {clients:,}" if len(looks) == clients else f"{len(looks):,} of {clients:,}"
        axes.set_title(f"a client a dot, the mean of its images; {part} clients")
        axes.margins(0.12)
    axes.set(xlabel="brightness (mean of 0–1)", ylabel="contrast (standard deviation)")
    axes.grid(alpha=0.3)


def _outermost(points: NDArray[np.float64]) -> list[int]:
    """Which points to name: the lowest and the highest along both axes."""
    return sorted({int(pick(points[:, axis])) for axis in (0, 1) for pick in (np.argmin, np.argmax)})


def _draw_distances(axes: Axes, looks: dict[str, NDArray[np.float64]]) -> None:
    apart = distances(list(looks.values()))
    highest = max(np.nanmax(apart), 1.0)
    drawn = axes.imshow(apart, cmap="cividis", vmin=0, vmax=highest)
    names = [shown(name, 14) for name in looks]
    if len(names) <= MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(apart):
            colour = "black" if value > 0.6 * highest else "white"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
    size = 9 if len(names) <= MOST_NUMBERS else 6
    axes.set_xticks(range(len(names)), names, rotation=90 if len(names) > 6 else 30, fontsize=size)
    if len(names) <= 6:
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("distance between clients\n(1: as much as images of one client differ)")
    axes.figure.colorbar(drawn, ax=axes, shrink=0.8).outline.set_visible(False)


def _draw_statistics(pair: Sequence[Axes], looks: dict[str, NDArray[np.float64]], channels: Channels) -> None:
    number = len(channels.picks)
    for statistic, (axes, title) in enumerate(zip(pair, ("mean", "standard deviation"), strict=True)):
        for row, look in enumerate(looks.values()):
            for place in range(number):
                _interval(axes, look[:, statistic, place], row + _offset(place, number), channels.colours[place])
        axes.set_ylim(len(looks) - 0.5, -0.5)
        axes.set_yticks(range(len(looks)), [shown(name, 20) for name in looks] if statistic == 0 else [""] * len(looks))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", alpha=0.3)
        axes.set(xlabel=f"{title} of a channel of an image, 0–1")
    for name, colour in zip(channels.names, channels.colours, strict=True):
        pair[0].plot([], [], color=colour, linewidth=4, label=name)
    pair[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0, handlelength=1)
    pair[1].text(1, 1.02, "line: 90 % of the images, bar: half, dot: median", transform=pair[1].transAxes,
                 ha="right", va="bottom", fontsize=8)  # fmt: skip
