"""`fedfa data check`: what a source holds, and everything that is wrong with it, in one report."""

from __future__ import annotations

import hashlib
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfa.data.federation import Federation
from fedfa.data.look import Data, by_chunks, chunks, shown
from fedfa.data.pool import Pool, Problem
from fedfa.data.splits import SIDES

WIDTH = 80
MOST_FILES = 20
"""Bad files of a kind that are named, unless all are asked for."""
MOST_ROWS = 20
"""Clients or classes that have a line of their own, unless all are asked for."""
MOST_COLUMNS = 6
"""Clients that have a column of their own beside the classes."""
NAME = 28
"""Columns that a name may take."""


@dataclass(frozen=True)
class Report:
    """What is to be printed, and the verdict."""

    lines: list[str]
    cannot_train: list[str]
    """Why, in a line each; empty where it can."""
    left_out: int
    """Files or folders that are not used."""


def check(data: Data, everything: bool = False) -> Report:
    """Look at all samples. With `everything`, no list is cut short."""
    notes, wrong = list[str](), [data.why] if data.why else []
    lines = [*_title(data), ""]
    whole = data.samples
    if data.federation is not None:
        lines += [*_clients(data.federation, everything), ""]
        wrong += _cannot_train(data.federation)
    elif isinstance(whole, Pool):
        lines += [*_sites(whole, everything), ""]
    lines += [*_classes(data, everything), ""]
    wrong += _bad_labels(whole)
    notes += [*_unused(whole), *_looks(whole)]
    if data.federation is not None:
        notes += [*_identical(data.federation), *_thin(data.federation)]
    problems = data.pool.problems if data.pool else ()
    wrong += [_line(problem) for problem in problems if problem.fatal and _line(problem) not in data.why]
    for title, files in _kinds(problems).items():
        lines += [*_listed(title, files, everything), ""]
    lines += [part for note in notes for part in textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="  ")]
    lines += [""] * bool(notes)
    left_out = sum(problem.left_out for problem in problems)
    return Report([*lines, *_verdict(data, left_out, wrong)], wrong, left_out)


def _title(data: Data) -> list[str]:
    whole = data.samples
    count, *shape = whole.images.shape
    size = "×".join(map(str, shape))
    first = f"{data.name}: {whole.task}, {len(whole.classes)} classes, {count:,} images of {size}"
    return [first] + ([f"read from {shown(data.path)}"] if data.path else [])


def _verdict(data: Data, left_out: int, wrong: Sequence[str]) -> list[str]:
    """The last line of a report on data that can be trained on; of others, the error says it."""
    if wrong or data.federation is None:
        return []
    training = sum(len(index.train) for index in data.federation.clients.values())
    line = f"ready to train: {len(data.federation.clients):,} clients, {training:,} training samples"
    return textwrap.wrap(line + (f"; {left_out:,} files or folders were left out" if left_out else ""), WIDTH)


# Tables


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows as lines with aligned columns: the first `left` of them to the left, numbers to the right."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            text + " " * (width - cell_len(text)) if place < left else " " * (width - cell_len(text)) + text
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def _clients(federation: Federation, everything: bool) -> list[str]:
    """How many samples every client has on each side, and of how many classes it has some to train on."""
    labels = federation.labels if federation.task == "classification" else None
    rows = [["client", *SIDES, "all", *(["classes"] if labels is not None else [])]]
    counts = {name: [len(index.of(side)) for side in SIDES] for name, index in federation.clients.items()}
    kept = _some(list(counts), everything)
    for name in kept:
        row = [shown(name, NAME), *(f"{number:,}" for number in (*counts[name], sum(counts[name])))]
        if labels is not None:
            row.append(str(len(labels[federation.clients[name].train].unique())))
        rows.append(row)
    sums = [sum(column) for column in zip(*counts.values(), strict=True)]
    rows.append([f"all {len(counts):,}", *(f"{number:,}" for number in (*sums, sum(sums)))])
    if labels is not None:
        trained = torch.cat([labels[index.train] for index in federation.clients.values()])
        rows[-1].append(str(len(trained.unique())))
    lines = table(rows)
    if len(kept) < len(counts):
        sizes = sorted(train for train, *_ in counts.values())
        lines += [
            f"({len(counts) - len(kept):,} more clients; --all shows them; training samples a client: "
            f"{sizes[0]:,} to {sizes[-1]:,}, half have {sizes[len(sizes) // 2]:,} or more)"
        ]
    return [part for line in lines for part in (textwrap.wrap(line, WIDTH) if line.startswith("(") else [line])]


def _sites(pool: Pool, everything: bool) -> list[str]:
    """How many samples come from where, for a pool that could not be divided."""
    counts = Counter(pool.sites)
    kept = _some(list(counts), everything)
    rows = [["site", "all"], *([shown(name, NAME) or "(no site)", f"{counts[name]:,}"] for name in kept)]
    more = [f"({len(counts) - len(kept):,} more; --all shows them)"] if len(kept) < len(counts) else []
    return [*table([*rows, [f"all {len(counts):,}", f"{len(pool):,}"]]), *more]


def _some(names: Sequence[str], everything: bool) -> list[str]:
    return list(names) if everything else list(names[:MOST_ROWS])


def _parts(data: Data) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The samples of every client, all sides together, and of every side; or of every site."""
    if data.federation is None:
        assert data.pool is not None
        sites = np.asarray(data.pool.sites)
        return {site: torch.from_numpy(np.flatnonzero(sites == site)) for site in dict.fromkeys(data.pool.sites)}, {}
    clients = data.federation.clients
    owners = {name: torch.cat([index.of(side) for side in SIDES]) for name, index in clients.items()}
    return owners, {side: torch.cat([index.of(side) for index in clients.values()]) for side in SIDES}


def _classes(data: Data, everything: bool) -> list[str]:
    """How many samples there are of every class: at each client, or where there is no room for that, the fewest and
    the most that any has; and on each side. For masks, in how many images a class is, and what share of the pixels."""
    whole = data.samples
    owners, sides = _parts(data)
    count = _Counts(whole)
    at, on = {name: count(index) for name, index in owners.items()}, {side: count(i) for side, i in sides.items()}
    if not at:
        return []
    clients = {shown(name, 10): numbers for name, numbers in at.items()}
    most = {
        "fewest": [min(numbers) for numbers in zip(*at.values(), strict=True)],
        "most": [max(numbers) for numbers in zip(*at.values(), strict=True)],
    }
    total = {"all": [sum(numbers) for numbers in zip(*at.values(), strict=True)]}
    names = [shown(name, NAME) for name in whole.classes]
    layouts = [{**most, **on, **total} if len(at) > 1 else {**on, **total}]
    if 1 < len(clients) == len(at) <= MOST_COLUMNS:  # names that are cut short may be the same
        layouts[:0] = [{**clients, **on, **total}, {**clients, **total}]
    tables = [_columns(names, columns, count.shares) for columns in layouts]
    lines = next((lines for lines in tables if all(len(line) <= WIDTH for line in lines)), tables[-1])
    over = ", the fewest and the most at a client" if lines is tables[-1] and len(at) > 1 else ""
    if not everything and len(names) > MOST_ROWS:
        lines[MOST_ROWS + 1 :] = [f"({len(names) - MOST_ROWS} more classes; --all shows them)"]
    what = "that have a class in their mask" if count.shares else "of a class"
    return [f"images {what}{over}:", *lines]


def _columns(names: Sequence[str], columns: Mapping[str, Sequence[int]], shares: Sequence[str]) -> list[str]:
    rows = [["class", *columns, *(["of pixels"] if shares else [])]]
    for place, name in enumerate(names):
        rows.append([name, *(f"{column[place]:,}" for column in columns.values()), *shares[place : place + 1]])
    return table(rows)


class _Counts:
    """How many of some samples are of every class, or have it in their masks."""

    def __init__(self, whole: Pool | Federation) -> None:
        self.number = len(whole.classes)
        self.labels = whole.labels
        self.shares: list[str] = []
        if whole.task == "segmentation":
            pixels = by_chunks(whole.labels, lambda masks: _pixels(masks, self.number))
            parts = pixels.double().sum(0) / max(float(pixels.sum()), 1.0)
            self.labels, self.shares = pixels > 0, [f"{100 * part:.1f} %" for part in parts.tolist()]

    def __call__(self, index: Tensor) -> list[int]:
        labels = self.labels[index]
        if self.shares:
            return [int(number) for number in labels.sum(0)]
        known = labels[(labels >= 0) & (labels < self.number)].long()
        return [int(number) for number in torch.bincount(known, minlength=self.number)]


def _pixels(masks: Tensor, classes: int) -> Tensor:
    """How many pixels of every class are in each mask."""
    return torch.stack([(masks == number).flatten(1).sum(1) for number in range(classes)], dim=1)


# What is wrong


def _bad_labels(whole: Pool | Federation) -> list[str]:
    """Labels that are no class: the network would end in an error that says nothing."""
    if not len(whole.labels):
        return ["there are no samples"]
    extremes = by_chunks(whole.labels, lambda part: torch.stack((part.amin(), part.amax())).long())
    low, high = int(extremes.min()), int(extremes.max())
    if low < 0 or high >= len(whole.classes):
        return [
            f"labels are {low} to {high}, and there are {len(whole.classes)} classes: 0 to {len(whole.classes) - 1}"
        ]
    return []


def _unused(whole: Pool | Federation) -> list[str]:
    """Classes that the network has an output for, and nothing to learn."""
    there = len(whole.labels.unique()) if whole.task == "classification" else len(whole.classes)
    missing = len(whole.classes) - there
    return [f"classes without any image: {missing} of {len(whole.classes)}"] if missing > 0 else []


def _cannot_train(federation: Federation) -> list[str]:
    if all(len(index.train) < 2 for index in federation.clients.values()):
        return ["no client has two training samples"]
    return []


def _thin(federation: Federation) -> list[str]:
    """Clients that lack something that a run can do without."""
    notes = []
    for what, names in (
        (
            "with one training sample or none, and so left out of every round",
            [name for name, index in federation.clients.items() if len(index.train) < 2],
        ),
        ("without validation samples", [name for name, index in federation.clients.items() if not len(index.val)]),
        ("without test samples", [name for name, index in federation.clients.items() if not len(index.test)]),
    ):
        if names:
            first = ", ".join(shown(name, NAME) for name in names[:3]) + (", …" if len(names) > 3 else "")
            notes.append(f"{what}: {len(names):,} of {len(federation.clients):,} clients ({first})")
    return notes


def _looks(whole: Pool | Federation) -> list[str]:
    """Images without anything in them, and grey ones among coloured ones."""
    images, notes = whole.images, list[str]()
    if not len(images):
        return notes
    blank = int(by_chunks(images, lambda part: part.flatten(1).amin(1) == part.flatten(1).amax(1)).sum())
    if blank:
        notes.append(f"of one value all over: {_number(blank)}")
    if images.shape[1] == 3:
        grey = int(by_chunks(images, lambda part: (part == part[:, :1]).flatten(1).all(1)).sum())
        if grey:
            notes.append(f"grey, their channels all the same: {_number(grey)}")
    if whole.task == "segmentation":
        empty = int(by_chunks(whole.labels, lambda part: (part == 0).flatten(1).all(1)).sum())
        if empty:
            notes.append(f"with nothing but background in the mask: {_number(empty)}")
    return notes


def _identical(federation: Federation) -> list[str]:
    """Images that are the same pixel for pixel, and above all those that are trained on and tested on."""
    side = np.full(len(federation.images), -1)
    owner = np.full(len(federation.images), -1)
    for number, index in enumerate(federation.clients.values()):
        for place, name in enumerate(SIDES):
            side[index.of(name).numpy()] = place
            owner[index.of(name).numpy()] = number
    groups: dict[bytes, list[int]] = {}
    for place, digest in enumerate(_digests(federation.images)):
        if side[place] >= 0:
            groups.setdefault(digest, []).append(place)
    same = [group for group in groups.values() if len(group) > 1]
    if not same:
        return []
    leaks = sum(bool((side[group] == 0).any() and (side[group] > 0).any()) for group in same)
    shared = sum(len(set(owner[group].tolist())) > 1 for group in same)
    several = f", {shared:,} of them at several clients" if shared else ""
    notes = [f"there more than once, pixel for pixel: {_number(len(same))}{several}"]
    if leaks:
        notes.append(f"trained on, and validated or tested on as well: {_number(leaks)}; scores flatter by that")
    return notes


def _number(images: int) -> str:
    return f"{images:,} image{'s' if images > 1 else ''}"


def _digests(images: Tensor) -> Iterator[bytes]:
    for part in chunks(images):
        for image in part.contiguous().numpy():
            yield hashlib.blake2b(image.tobytes(), digest_size=16).digest()


def _kinds(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """Problems by what they are: the word before a colon, by which readers tell them apart."""
    kinds: dict[str, list[Problem]] = {}
    for problem in sorted(problems, key=lambda problem: (not problem.fatal, not problem.left_out)):
        kind = "cannot be trained on" if problem.fatal else "left out" if problem.left_out else _kind(problem)
        kinds.setdefault(kind, []).append(problem)
    return kinds


def _kind(problem: Problem) -> str:
    kind, colon, _ = problem.what.partition(":")
    return kind if colon and len(kind.split()) <= 3 else "worth knowing"


def _line(problem: Problem) -> str:
    return f"{shown(problem.file)}: {shown(problem.what)}" if problem.file else shown(problem.what)


def _listed(title: str, problems: Sequence[Problem], everything: bool) -> list[str]:
    """The files of a kind, each with what is wrong. What was done about it, where it is the same for all, is said
    once."""
    whats = [shown(problem.what).removeprefix(f"{title}:").strip() for problem in problems]
    done = {what.rpartition("; ")[2] for what in whats if "; " in what}
    common = done.pop() if len(whats) > 1 and len(done) == 1 and all("; " in what for what in whats) else ""
    lines = [f"{title} ({len(problems):,}{f', {common}' if common and common != title else ''}):"]
    for problem, what in list(zip(problems, whats, strict=True))[: None if everything else MOST_FILES]:
        lines += _file(shown(problem.file), what.removesuffix(f"; {common}") if common else what)
    if not everything and len(problems) > MOST_FILES:
        lines.append(f"  … and {len(problems) - MOST_FILES:,} more; --all shows them")
    return lines


def _file(file: str, what: str) -> list[str]:
    """In one line, or the reason below the file's name; names are never broken in two."""
    line = f"  {file}: {what}" if file else f"  {what}"
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (6 if file else 4)
    wrapped = textwrap.wrap(
        what, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [f"  {file}", *wrapped] if file else wrapped
