"""`fedfa data check` and what it looks at: counts against trees made by hand, and every mistake in one line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedfa
from fedfa import ClientIndex, Federation
from fedfa.data.check import check
from fedfa.data.look import Data, look, shown
from fedfa.data.pool import Pool, Problem

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer 0.20 on click 8.5
    from typer.testing import CliRunner, Result

    from fedfa.cli import app

Tree = Callable[..., Path]


def command(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, words)])


def output(*words: str | Path) -> list[str]:
    """The lines of a report on data that can be trained on."""
    result = command("check", *words)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout.splitlines()


def complaint(*words: str | Path) -> str:
    """The one line that says what the user's mistake is."""
    result = command(*words)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    assert line.startswith("fedfa: ")
    return line.removeprefix("fedfa: ")


def cells(lines: Sequence[str], first: str) -> list[str]:
    """The rest of the row that begins with a word."""
    (row,) = [line for line in lines if line.startswith(f"{first} ")]
    return row.removeprefix(first).split()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A tree CLIENT/CLASS/images of random photographs, in a folder whose name is no easy one."""
    Image = pytest.importorskip("PIL.Image")
    root = tmp_path / "my photos (2) = new"

    def tree(counts: dict[str, dict[str, int]], seed: int = 0) -> Path:
        draw = np.random.default_rng(seed)
        for client, classes in counts.items():
            for name, count in classes.items():
                (root / client / name).mkdir(parents=True, exist_ok=True)
                for number in range(count):
                    pixels = draw.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(root / client / name / f"image {number}.PNG")
        return root

    return tree


def federation(count: int = 12, **changes: Any) -> Federation:
    images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    third = count // 3
    clients = {"a": ClientIndex(*torch.arange(count).split([third, third, count - 2 * third]))}
    made = Federation("made", "classification", images, torch.arange(count) % 3, ("x", "y", "z"), clients)
    return replace(made, **changes)


def report(made: Federation, problems: Sequence[Problem] = (), everything: bool = False) -> tuple[str, list[str]]:
    nothing = [""] * len(made.images)
    pool = Pool(
        "made", made.task, made.images, made.labels, made.classes, nothing, nothing, range(len(nothing)), nothing,
        tuple(problems),
    )  # fmt: skip
    found = check(Data("made", "", pool, made), everything)
    return "\n".join(found.lines), found.cannot_train


# What is there


def test_an_embedded_federation() -> None:
    pytest.importorskip("sklearn")
    lines = output("--source", "digit-sites")
    assert lines[0] == "digit-sites: classification, 10 classes, 1,797 images of 3×28×28"
    assert cells(lines, "scanner") == ["431", "144", "144", "719", "10"]  # as docs/federations.md has it
    assert cells(lines, "all 4") == ["1,077", "360", "360", "1,797", "10"]
    assert [cells(lines, str(digit))[-1] for digit in range(10)] == [
        "178", "182", "177", "183", "181", "182", "181", "179", "174", "180"
    ]  # fmt: skip  # what scikit-learn says of its digits
    assert lines[-1] == "ready to train: 4 clients, 1,077 training samples"


def test_masks() -> None:
    lines = output("-s", "phantom-sites", "size=32", "cases=6")
    found = look("phantom-sites", ["size=32", "cases=6"]).federation
    assert found is not None
    share = 100 * (found.labels == 1).double().mean().item()
    row = cells(lines, "organ")
    assert row[-3:] == [str(len(found.images)), f"{share:.1f}", "%"]
    assert not any("all background" in line for line in lines)


def test_counts_of_a_tree_with_an_odd_path(tree: Tree) -> None:
    root = tree({"north site": {"Cat": 10, "dog": 5}, "süd": {"cat": 5, "DOG": 20}})
    lines = output(root, "--source", "image_folders", "size=16", "seed=3")
    assert lines[:2] == [
        "image_folders: classification, 2 classes, 40 images of 3×16×16",
        f"read from {root}",
    ]
    assert cells(lines, "north site")[-2:] == ["15", "2"] and cells(lines, "süd")[-2:] == ["25", "2"]
    columns = next(line for line in lines if line.startswith("class ")).split()
    assert columns == ["class", "north", "site", "süd", "train", "val", "test", "all"]
    assert cells(lines, "Cat")[:2] == ["10", "5"] and cells(lines, "Cat")[-1] == "15"
    assert cells(lines, "dog")[:2] == ["5", "20"] and cells(lines, "dog")[-1] == "25"
    assert all(len(line) <= 80 for line in lines if not line.startswith("read from"))


def test_a_path_that_begins_like_a_setting(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree({"a": {"x": 5, "y": 5}})
    odd = root.rename(root.with_name("size=3"))
    monkeypatch.chdir(odd.parent)
    assert "read from size=3" in output("size=3", "-s", "image_folders", "size=8")


def test_partitions_and_splits_are_those_of_an_experiment(tree: Tree) -> None:
    root = tree({"a": {"x": 30, "y": 30}})
    lines = output(root, "-s", "image_folders", "size=8", "partition=iid", "partition.clients=3", "split.test=0.5")
    assert cells(lines, "all 3")[2] == "30"
    complaint("check", root, "-s", "image_folders", "size=8", "partition=iid", "partition.client=3")


def test_many_clients_and_classes_are_cut_short_and_all_shows_them(tree: Tree) -> None:
    root = tree({f"c{number:02}": {"x": 6, "y": 6} for number in range(25)})
    lines = output(root, "-s", "image_folders", "size=8")
    assert "c19" in "".join(lines) and not any(line.startswith("c20") for line in lines)
    assert any(line.startswith("(5 more clients; --all shows them;") for line in lines)
    assert cells(lines, "all 25")[3] == "300" and cells(lines, "x")[:2] == ["6", "6"]
    everything = output(root, "-s", "image_folders", "size=8", "--all")
    assert any(line.startswith("c24") for line in everything) and not any("more clients" in line for line in everything)


# What is wrong with it


def test_bad_files_are_named_counted_and_errors_where_that_is_asked_for(tree: Tree) -> None:
    root = tree({"a": {"x": 8, "y": 8}, "b": {"x": 8, "y": 8}})
    for number in range(23):
        (root / "a" / "x" / f"broken {number:02}.jpg").write_bytes(b"no picture")
    twin = (root / "a" / "x" / "image 0.PNG").read_bytes()
    (root / "a" / "x" / "copy.png").write_bytes(twin)
    lines = output(root, "-s", "image_folders", "size=16")
    start = next(place for place, line in enumerate(lines) if line.startswith("left out (23"))
    assert sum("a/x/broken" in line for line in lines[start:]) == 20
    assert "  … and 3 more; --all shows them" in lines
    assert any(line.startswith("  a/x/image 0.PNG: byte for byte a/x/copy.png") for line in lines)
    assert "note: there more than once, pixel for pixel: 1 image" in lines
    assert " ".join(lines[-2:]).endswith("; 23 files or folders were left out")
    assert all(len(line) <= 80 for line in lines if not line.startswith("read from"))
    everything = output(root, "-s", "image_folders", "size=16", "--all")
    assert sum("a/x/broken" in line for line in everything) == 23
    strict = command("check", root, "-s", "image_folders", "size=16", "--strict")
    assert strict.exit_code == 2 and strict.stdout.splitlines() == lines  # the report comes first, as without it
    assert strict.stderr == "fedfa: --strict: 23 files or folders were left out\n"


def test_strict_has_nothing_against_whole_data(tree: Tree) -> None:
    output(tree({"a": {"x": 8, "y": 8}}), "-s", "image_folders", "size=16", "--strict")


def test_missing_masks_and_strange_ones(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    root = tmp_path / "data"
    for kind in ("images", "masks"):
        (root / "site" / kind).mkdir(parents=True)
    draw = np.random.default_rng(0)
    for number in range(12):
        Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(
            root / "site" / "images" / f"{number}.png"
        )
        mask = np.zeros((16, 16), np.uint8)
        mask[4:8, 4:8] = 255 if number != 5 else 0
        size = (16, 12) if number == 3 else (16, 16)
        if number != 2:
            Image.fromarray(mask).resize(size, Image.Resampling.NEAREST).save(root / "site" / "masks" / f"{number}.png")
    lines = output(root, "-s", "segmentation_folders", "size=16")
    text = "\n".join(lines)
    assert "site/images/2.png" in text and "site/images/3.png" in text  # no mask; another shape
    assert "16×16 and 16×12" in text
    assert "note: with nothing but background in the mask: 1 image" in lines
    assert cells(lines, "foreground")[-3:] == ["9", "5.6", "%"]  # 9 of 10 masks have 16 of 256 pixels
    assert complaint("check", root, "-s", "segmentation_folders", "size=16", "--strict").startswith("--strict: 2 ")


def test_everything_that_is_fatal_is_in_the_report_and_in_the_error(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    root = tmp_path / "data"
    for kind in ("images", "masks"):
        (root / "site" / kind).mkdir(parents=True)
        for number in range(6):
            pixels = np.full((8, 8), 0 if kind == "masks" else 40 * number, np.uint8)
            Image.fromarray(pixels).save(root / "site" / kind / f"{number}.png")
    result = command("check", root, "-s", "segmentation_folders", "size=8")
    assert result.exit_code == 2
    assert "cannot be trained on (1):" in result.stdout.splitlines()
    assert result.stderr.startswith("fedfa: cannot train on this: ") and result.stderr.count("nothing to learn") == 1
    assert "note: of one value all over: 6 images" in result.stdout.splitlines()


def test_data_that_cannot_be_divided_are_still_reported(tree: Tree) -> None:
    root = tree({"a": {"x": 5, "y": 5}})
    result = command("check", root, "-s", "image_folders", "size=8", "partition=iid", "partition.clients=50")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    lines = result.stdout.splitlines()
    assert cells(lines, "x")[-1] == "5" and cells(lines, "all 1") == ["10"]
    assert not any(line.startswith("ready") for line in lines)


def test_labels_that_are_no_class() -> None:
    labels = torch.arange(12) % 3
    labels[4] = 3
    assert report(federation(labels=labels))[1] == ["labels are 0 to 3, and there are 3 classes: 0 to 2"]
    labels[4] = -1
    assert report(federation(labels=labels))[1] == ["labels are -1 to 2, and there are 3 classes: 0 to 2"]
    assert report(federation())[1] == []


def test_images_on_two_sides_of_a_split() -> None:
    made = federation()
    made.images[11] = made.images[0]  # tested on, and trained on
    made.images[2] = made.images[1]  # both trained on
    text, _ = report(made)
    assert "note: there more than once, pixel for pixel: 2 images\n" in text
    assert "note: trained on, and validated or tested on as well: 1 image; scores" in text
    index = torch.arange(12).split(4)
    apart = {"a": ClientIndex(index[0], index[1], index[1][:0]), "b": ClientIndex(index[2], index[2][:0], index[2])}
    text, _ = report(replace(made, clients=apart))
    assert "note: there more than once, pixel for pixel: 2 images, 1 of them at several" in text


def test_grey_blank_and_clients_that_lack_something() -> None:
    made = federation()
    made.images[3] = made.images[3, :1]
    made.images[5] = 7
    nothing = torch.arange(0)
    clients = {"a": made.clients["a"], "b": ClientIndex(torch.arange(1), nothing, nothing)}
    text, wrong = report(replace(made, clients=clients))
    assert "note: of one value all over: 1 image\n" in text
    assert "note: grey, their channels all the same: 2 images\n" in text
    assert "with one training sample or none, and so left out of every round: 1 of 2" in text
    assert "without test samples: 1 of 2 clients (b)" in text
    assert wrong == []
    assert report(replace(made, clients={"b": clients["b"]}))[1] == ["no client has two training samples"]


def test_kinds_of_problems_stand_together() -> None:
    problems = [
        Problem("a.jpg", "grey: made RGB"),
        Problem("b.jpg", "broken: ends early; left out"),
        Problem("c.jpg", "broken: not a picture; left out"),
        Problem("", "site west is missing"),
        Problem("d/" + "x" * 90 + ".jpg", "grey: made RGB"),
    ]
    text, wrong = report(federation(), problems)
    assert wrong == []
    assert "left out (2):\n  b.jpg: broken: ends early\n  c.jpg: broken: not a picture\n" in text
    assert f"grey (2):\n  a.jpg: made RGB\n  d/{'x' * 90}.jpg\n      made RGB\n" in text
    assert "worth knowing (1):\n  site west is missing\n" in text
    assert text.index("left out") < text.index("grey (2)")


def test_names_that_cannot_be_printed_as_they_are() -> None:
    assert shown("a\nb\tc\x1b[31m") == "a\\nb\\tc\\x1b[31m"
    assert shown("caf\udce9").encode()  # what a file system has that is no text
    assert shown("病院" * 20, 10) == "病院…病院"  # each two columns wide
    assert shown("x" * 40, 11) == "xxxxx…xxxxx" and shown("short", 11) == "short"


# Mistakes


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--source", "digit-site"], "no source is named 'digit-site'; did you mean 'digit-sites'?"),
        (["here", "-s", "digit-sites"], "digit-sites is made, not read: leave here out"),
        (["no such", "-s", "image_folders"], "image_folders: there is no folder no such; say where it is"),
        (["-s", "image_folders"], "image_folders: there is no folder data/image_folders; say where it is"),
        (["-s", "digit-sites", "sise=3"], "source 'digit-sites' has no setting 'sise'; did you mean 'size'?"),
        (["-s", "digit-sites", "size=3"], "source: digit-sites: size is at least 16, not 3"),
        (["-s", "digit-sites", "size=big"], "source.size: should be a valid integer"),
        (["-s", "digit-sites", "seed=-1"], "seed: should be greater than or equal to 0, not -1"),
        (["-s", "digit-sites", "network.stages=[1]"], "'network.stages': here only source, partition, split have"),
        (["-s", "digit-sites", "partition=iid"], "digit-sites comes divided into clients and splits: leave"),
        (["-s", "digit-sites", "partition=idd"], "no partition is named 'idd'; did you mean 'iid'?"),
        (["a", "folder", "-s", "image_folders"], "'folder' is not key=value; quote a path that has spaces in it"),
        (["-s", "image_folders", "size=3", "a"], "'a' is not key=value; quote a path that has spaces in it"),
        (["FILE", "-s", "image_folders"], "image_folders: FILE is a file, not a folder;"),
        (["EMPTY", "-s", "image_folders"], "image_folders: EMPTY has no folders CLIENT/CLASS with images in them"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "preview"])
def test_a_mistake_is_one_line(
    verb: str, words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").write_text("")
    assert complaint(verb, *words).startswith(line)
    assert {path.name for path in tmp_path.iterdir()} <= {"EMPTY", "FILE", "the cache"}  # no picture, no folder


def test_the_source_must_be_said() -> None:
    result = command("check")
    assert result.exit_code == 2 and "missing option '--source'" in result.stderr


def test_a_source_that_misses_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ImportError("this needs monai: pip install monai")

    monkeypatch.setattr(fedfa.SOURCES["tiny"], "build", broken)
    assert complaint("check", "-s", "tiny") == "this needs monai: pip install monai"


def test_help_and_the_lightness_of_it() -> None:
    lines = command("--help").stdout.splitlines()
    assert any(line.strip().startswith("check") for line in lines)
    assert any(line.strip().startswith("preview") for line in lines)
    assert "[PATH] [KEY=VALUE]..." in command("check", "--help").stdout


@pytest.mark.skipif(os.name != "posix", reason="such names are possible on POSIX only")
def test_a_client_whose_name_is_no_text(tree: Tree) -> None:
    root = tree({"a": {"x": 6, "y": 6}})
    try:
        os.rename(os.fsencode(root / "a"), os.fsencode(root) + b"/caf\xe9")
    except OSError:
        pytest.skip("this file system takes text only")
    lines = output(root, "-s", "image_folders", "size=8")
    assert any(line.startswith("caf\\xe9 ") for line in lines)
