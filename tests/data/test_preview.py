"""`fedfa data preview`: what is drawn is what is there, for all kinds of federations, and nothing is cut off."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedfa import ClientIndex, Federation, UserError
from fedfa.data.look import Data
from fedfa.data.preview import chosen, distances, draw_labels, draw_shift, preview, statistics
from fedfa.data.sheets import CELL, Channels, draw_sheet

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer 0.20 on click 8.5
    from typer.testing import CliRunner

    from fedfa.cli import app


def made(
    names: Sequence[str] = ("north", "south"),
    each: int = 12,
    shape: tuple[int, int, int] = (3, 8, 8),
    classes: Sequence[str] = ("x", "y", "z"),
    masks: bool = False,
    seed: int = 0,
) -> Federation:
    """Every client with random images, brighter from one to the next."""
    draw = torch.Generator().manual_seed(seed)
    count = each * len(names)
    images = torch.randint(0, 128, (count, *shape), dtype=torch.uint8, generator=draw)
    clients = {}
    for number, name in enumerate(names):
        index = torch.arange(number * each, (number + 1) * each)
        images[index] += min(number, 100)
        clients[name] = ClientIndex(index[: each // 2], index[each // 2 : each * 3 // 4], index[each * 3 // 4 :])
    labels = torch.arange(count) % len(classes)
    if masks:
        labels = torch.zeros(count, *shape[1:], dtype=torch.int64)
        labels[:, 2:6, 2:6] = 1
    return Federation("made", "segmentation" if masks else "classification", images, labels, tuple(classes), clients)


def drawn(federation: Federation, folder: Path, sheets: int = 12) -> dict[str, NDArray[np.uint8]]:
    """The pictures, by the names of their files."""
    lines = list(preview(Data("made", "", None, federation), folder, sheets))
    assert [line for line in lines if line.startswith("wrote ")] == [f"wrote {f}" for f in _in_order(folder, lines)]
    return {path.name: np.array(Image.open(path).convert("RGB")) for path in folder.iterdir()}


def _in_order(folder: Path, lines: Sequence[str]) -> Iterator[Path]:
    for line in lines:
        if line.startswith("wrote "):
            path = Path(line.removeprefix("wrote "))
            assert path.parent == folder and path.is_file()
            yield path


# For all kinds of federations


@pytest.mark.parametrize(
    "federation",
    [
        made(),
        made(names=["alone"], each=1),
        made(shape=(1, 28, 28), classes=list("0123456789")),
        made(shape=(2, 9, 5)),
        made(shape=(5, 1, 1)),
        made(shape=(3, 200, 300), each=4),
        made(masks=True, classes=("background", "organ")),
        made(masks=True, shape=(1, 150, 100), classes=("background", *(f"organ {n}" for n in range(9)))),
        made(names=[f"writer {n:03}" for n in range(200)], each=4, classes=[f"class {n}" for n in range(62)]),
        made(names=[f"{n} with quite a long name, such as a hospital has" for n in range(20)], masks=True),
    ],
    ids=["plain", "one image", "grey", "two channels", "one pixel", "photos", "masks", "ten classes", "many", "names"],
)
def test_pictures_of_all_kinds(federation: Federation, tmp_path: Path) -> None:
    """Each is there, none is empty, and every text is inside of its picture, whole."""
    pictures = drawn(federation, tmp_path, sheets=3)
    assert {"labels.png", "shift.png"} < set(pictures) and len(pictures) == 2 + min(3, len(federation.clients))
    for picture in pictures.values():
        assert 100 < picture.shape[0] < 1600 and 400 < picture.shape[1] < 1700 and picture.std() > 5
    figures = [draw_labels(federation), draw_shift(federation), draw_sheet(federation, next(iter(federation.clients)))]
    for figure in figures:
        assert_nothing_is_cut_off(figure)


def assert_nothing_is_cut_off(figure: Any) -> None:
    """The box around everything that is drawn lies in the picture, to a pixel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box, (width, height) = figure.get_tightbbox(canvas.get_renderer()), figure.get_size_inches()
    assert box.x0 > -0.01 and box.y0 > -0.01 and box.x1 < width + 0.01 and box.y1 < height + 0.01, box


def test_names_of_clients_that_are_no_names_of_files(tmp_path: Path) -> None:
    names = ["a/b", "a b", "A-B", "../up", "$x$", "病院", "", "con\ntrol"]
    pictures = drawn(made(names=names, each=4), tmp_path / "new folder")
    assert len(pictures) == 2 + len(names)
    assert {"sheet-a-b.png", "sheet-a-b-2.png", "sheet-A-B-3.png", "sheet-up.png"} < set(pictures)
    assert [path.name for path in tmp_path.iterdir()] == ["new folder"]


def test_a_client_without_images(tmp_path: Path) -> None:
    federation = made(names=["full", "empty"])
    nothing = torch.arange(0)
    federation = Federation(
        "made", "classification", federation.images, federation.labels, federation.classes,
        {"full": federation.clients["full"], "empty": ClientIndex(nothing, nothing, nothing)},
    )  # fmt: skip
    assert set(drawn(federation, tmp_path)) == {"labels.png", "shift.png", "sheet-full.png", "sheet-empty.png"}


# What is drawn is what is there


def test_a_sheet_shows_the_images_pixel_for_pixel(tmp_path: Path) -> None:
    federation = made(shape=(3, 32, 32), classes=list("abcde"))
    picture = drawn(federation, tmp_path)["sheet-north.png"]
    for number in range(5):  # the first row: the first image of every class
        image = federation.images[number].movedim(0, -1).numpy().repeat(3, axis=0).repeat(3, axis=1)
        assert CELL == 96 and image.shape == (96, 96, 3)
        left, top = 4 + number * 100, 26 + 14
        assert np.array_equal(picture[top : top + 96, left : left + 96], image)


def test_a_mask_is_laid_over_its_image(tmp_path: Path) -> None:
    federation = made(shape=(3, 48, 48), masks=True, classes=("background", "organ"))
    federation.labels[:] = 0
    federation.labels[:, 10:20, 30:40] = 1
    picture = drawn(federation, tmp_path)["sheet-north.png"].astype(int)
    plain, marked = picture[26:122, 4:100], picture[26:122, 104:200]
    inside = np.zeros((96, 96), bool)
    inside[20:40, 60:80] = True
    changed = (plain != marked).any(-1)
    assert not changed[~inside].any() and changed[inside].mean() > 0.95
    assert (marked[20, 60:80] == (0x66, 0xCC, 0xEE)).all()  # the outline
    veil = 0.8 * plain[30, 70] + 0.2 * np.array((0x66, 0xCC, 0xEE))
    assert np.abs(marked[30, 70] - veil).max() <= 1


def test_which_channels_are_shown() -> None:
    colour = made().images
    assert Channels.of(colour).names == ("red", "green", "blue")
    assert Channels.of(colour[:, :1].expand(-1, 3, -1, -1)).names == ("grey",)
    assert Channels.of(colour[:, :1]).names == ("grey",)
    assert Channels.of(colour[:, :2]).names == ("channel 2",)
    volume = colour[:, 0]
    slices = torch.stack((volume[:-2], volume[1:-1], volume[2:]), dim=1)
    assert Channels.of(slices).names == ("middle slice",) and Channels.of(slices).picks == (1,)
    assert Channels.of(colour[:0]).picks  # of no images, something


def test_statistics_are_means_and_deviations() -> None:
    federation = made()
    found = statistics(federation, "south", (0, 2))
    images = federation.images[12:].double() / 255
    assert found.shape == (12, 2, 2)
    np.testing.assert_allclose(found[:, 0], images[:, [0, 2]].mean((2, 3)).numpy())
    np.testing.assert_allclose(found[3, 1, 1], images[3, 2].numpy().std())


def test_distances_by_hand() -> None:
    """Two statistics; clients a and b differ by 4 in the first, whose deviation within a client is 1 and 1, and by 0
    in the second: √((4² + 0²)/2)."""
    a = np.array([[[1.0], [5.0]], [[3.0], [9.0]]])
    b = np.array([[[5.0], [7.0]], [[7.0], [7.0]]])
    found = distances([a, b])
    np.testing.assert_allclose(found, [[0, 8**0.5], [8**0.5, 0]])
    assert np.isnan(distances([a, b[:0]])[0, 1])  # of a client without images nothing is known


def test_a_part_of_many_clients_is_shown_and_said() -> None:
    federation = made(names=[f"w{n:03}" for n in range(100)], each=4)
    uneven = {
        name: ClientIndex(index.train[: 1 + number % 2], index.val, index.test)
        for number, (name, index) in enumerate(federation.clients.items())
    }
    federation = Federation("made", "classification", federation.images, federation.labels, federation.classes, uneven)
    names = chosen(federation, 10)
    assert len(set(names)) == 10
    assert [len(uneven[name].train) for name in names] == [2] * 5 + [1] * 5  # from the largest to the smallest
    assert chosen(federation, 100) == list(uneven) and chosen(federation, 0) == [] and len(chosen(federation, 1)) == 1
    text = [draw(federation).get_suptitle() for draw in (draw_labels, draw_shift)]
    assert text == [f"made, {n} of 100 clients, from the largest to the smallest" for n in (30, 16)]


# On the command line


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "some pictures"
    words = ["data", "preview", "--source", "tiny", "-o", str(out), "--sheets", "2"]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[:2] == [f"wrote {out / 'labels.png'}", f"wrote {out / 'shift.png'}"]
    assert len(list(out.iterdir())) == 4
    assert lines[-1] == "contact sheets of 2 of 3 clients; --sheets N makes up to N"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert CliRunner().invoke(app, words).exit_code == 0  # again, over the old ones: the same pictures
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("place", ["FILE", "FILE/inside", "/proc/no/such"])
def test_a_folder_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text("")
    where = place.replace("FILE", str(tmp_path / "FILE"))
    result = CliRunner().invoke(app, ["data", "preview", "-s", "tiny", "-o", where])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("fedfa: ") and "Traceback" not in result.output


def test_without_clients_and_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^there are no clients to draw: no site says so$"):
        list(preview(Data("made", "", None, None, "no site says so"), tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"^a picture needs matplotlib: pip install 'fedfa\[demo\]'$"):
        list(preview(Data("made", "", None, made()), tmp_path))
    assert not list(tmp_path.glob("*.png"))
