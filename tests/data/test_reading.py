"""Finding image files, and decoding every odd kind of them."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfa.data.pool import Problem
from fedfa.data.sources import reading
from fedfa.data.sources.reading import (
    Broken,
    decode_file,
    decode_mask,
    find_folder,
    folders,
    image_files,
    in_parallel,
    nearest,
    relative,
)
from fedfa.errors import UserError

Image = pytest.importorskip("PIL.Image")
Draw = Callable[..., Path]
HERE = Path(__file__).parent


# Finding


def test_the_folder_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hint = "say where it is with source.path=FOLDER, or put it at data/pacs"
    with pytest.raises(UserError, match=f"pacs: there is no folder data/pacs; {hint}"):
        find_folder("", "pacs")
    (tmp_path / "data" / "pacs").mkdir(parents=True)
    assert find_folder("", "pacs") == Path("data/pacs")
    monkeypatch.setenv("FEDFA_DATA", str(tmp_path / "my sets"))
    (tmp_path / "my sets" / "pacs").mkdir(parents=True)
    assert find_folder("", "pacs") == tmp_path / "my sets" / "pacs"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_folder("~/data/pacs", "pacs") == tmp_path / "data" / "pacs"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="pacs: file is a file, not a folder"):
        find_folder("file", "pacs")


def test_image_files_in_order(tmp_path: Path) -> None:
    wanted = ["B c.JPG", "a.PnG", "sub folder/é.jpeg", "z.tiff"]
    litter = [".hidden.jpg", "._b.jpg", ".git/x.jpg", "Thumbs.db", "desktop.ini", "__MACOSX/a.jpg"]
    for name in [*wanted, *litter, "notes.txt", "bare"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    problems: list[Problem] = []
    assert [relative(file, tmp_path) for file in image_files(tmp_path, tmp_path, problems)] == wanted
    assert problems == [
        Problem("bare", "not an image (no extension); left out"),
        Problem("notes.txt", "not an image (.txt); left out"),
    ]
    assert [folder.name for folder in folders(tmp_path)] == ["empty", "sub folder"]


def test_links_are_followed_but_not_round_in_circles(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.jpg").touch()
    root = tmp_path / "data"
    (root / "up").symlink_to(tmp_path / "data")
    (root / "there").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(root)
    (root / "b.jpg").symlink_to(tmp_path / "elsewhere" / "a.jpg")
    (root / "gone.jpg").symlink_to(tmp_path / "nothing.jpg")
    (root / "self.jpg").symlink_to(root / "self.jpg")
    (root / "self").symlink_to(root / "self")
    os.mkfifo(root / "pipe.jpg")
    problems: list[Problem] = []
    assert [relative(file, root) for file in image_files(root, root, problems)] == ["b.jpg", "there/a.jpg"]
    assert {problem.file: problem.what for problem in problems} == {
        "up": "is a link to a folder that it is in; not followed",
        "there/back": "is a link to a folder that it is in; not followed",
        "gone.jpg": "a link to nothing; left out",
        "self.jpg": "a link to nothing; left out",
        "pipe.jpg": "not an ordinary file; left out",
        "self": "not an image (no extension); left out",
    }
    assert [folder.name for folder in folders(root)] == ["there", "up"]


def test_a_folder_that_cannot_be_listed_is_a_problem(tmp_path: Path) -> None:
    problems: list[Problem] = []
    assert image_files(tmp_path / "gone", tmp_path, problems) == []
    assert problems == [Problem("gone", "cannot be listed (No such file or directory); left out")]


def test_names_are_the_same_everywhere(tmp_path: Path) -> None:
    assert relative(tmp_path / "e\u0301.jpg", tmp_path) == "\u00e9.jpg"
    assert relative(tmp_path / os.fsdecode(b"\xff.jpg"), tmp_path) == "\\xff.jpg"


# Decoding. What is expected is worked out by hand from flat pictures, or by a plain Pillow call.


def flat(mode: str, colour: Any, size: tuple[int, int] = (6, 4)) -> Any:
    return Image.new(mode, size, colour)


def saved(tmp_path: Path, image: Any, name: str = "x.png", **options: Any) -> Path:
    image.save(tmp_path / name, **options)
    return tmp_path / name


def colour_of(file: Path, channels: int = 3) -> list[int]:
    pixels = decode_file(file, 2, channels).pixels
    assert pixels.shape == (channels, 2, 2) and pixels.dtype == np.uint8 and pixels.flags.c_contiguous
    assert (pixels == pixels[:, :1, :1]).all()
    return [int(value) for value in pixels[:, 0, 0]]


def test_an_image_is_what_pillow_makes_of_it(tmp_path: Path, draw: Draw) -> None:
    file = draw(tmp_path / "a b.jpg", size=(70, 33), quality=90)
    found = decode_file(file, 32)
    wanted = Image.open(file).convert("RGB").resize((32, 32), Image.Resampling.BILINEAR)
    assert np.array_equal(found.pixels, np.asarray(wanted).transpose(2, 0, 1))
    assert found.shape == (33, 70) and not found.grey
    grey = Image.open(file).convert("L").resize((32, 32), Image.Resampling.BILINEAR)
    assert np.array_equal(decode_file(file, 32, 1).pixels[0], np.asarray(grey))


def test_shrinking_averages_over_all_pixels(tmp_path: Path) -> None:
    """Antialiased: a chessboard of black and white becomes grey, where picking pixels would give one of the two."""
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    file = saved(tmp_path, Image.fromarray(board))
    assert (abs(decode_file(file, 8).pixels.astype(int) - 127) <= 2).all()


@pytest.mark.parametrize(
    ("mode", "colour", "wanted"),
    [
        ("RGB", (10, 20, 30), [10, 20, 30]),
        ("L", 77, [77, 77, 77]),
        ("1", 1, [255, 255, 255]),
        ("LA", (100, 0), [255, 255, 255]),
        ("LA", (100, 255), [100, 100, 100]),
        ("RGBA", (10, 20, 30, 255), [10, 20, 30]),
        ("RGBA", (0, 0, 0, 51), [204, 204, 204]),  # a fifth of black on white
        ("I;16", 257 * 40, [40, 40, 40]),
        ("I;16", 65535, [255, 255, 255]),
        ("I;16", 257 * 40 - 129, [39, 39, 39]),  # rounded to the nearest
        ("I;16", 257 * 40 - 128, [40, 40, 40]),
    ],
)
def test_kinds_of_pixels_in_png(tmp_path: Path, mode: str, colour: Any, wanted: list[int]) -> None:
    assert colour_of(saved(tmp_path, flat(mode, colour))) == wanted


def test_a_palette(tmp_path: Path) -> None:
    image = flat("P", 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    assert colour_of(saved(tmp_path, image, "opaque.png")) == [200, 100, 50]
    assert colour_of(saved(tmp_path, image, "opaque.gif")) == [200, 100, 50]
    assert colour_of(saved(tmp_path, image, "clear.png", transparency=1)) == [255, 255, 255]
    assert colour_of(saved(tmp_path, image, "bytes.png", transparency=bytes([0, 51]))) == [244, 224, 214]
    assert colour_of(saved(tmp_path, flat("RGB", (1, 2, 3)), "key.png", transparency=(1, 2, 3))) == [255, 255, 255]


def test_cmyk(tmp_path: Path) -> None:
    # Full cyan with no black leaves green and blue. Pillow writes Adobe's inverted CMYK and reads it back.
    red, green, blue = colour_of(saved(tmp_path, flat("CMYK", (255, 0, 0, 0)), "x.jpg", quality=100))
    assert red < 5 and green > 250 and blue > 250
    assert colour_of(saved(tmp_path, flat("CMYK", (0, 255, 0, 0)), "x.tiff")) == [255, 0, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation(tmp_path: Path, orientation: int) -> None:
    """A picture that is white in one corner only, stored turned in each of the eight ways, comes out upright."""
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = 255
    stored = {  # how a viewer turns the stored pixels, undone (EXIF 2.3, table 6)
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = saved(tmp_path, Image.fromarray(np.ascontiguousarray(stored)), "x.png", exif=exif)
    found = decode_file(file, 16)
    assert found.shape == (16, 32)
    assert found.pixels[0, 2, 2] == 255 and found.pixels[0, 2, 13] == found.pixels[0, 13, 2] == 0


@pytest.mark.parametrize("name", ["x.JPG", "x.jpeg", "x.PNG", "x.bmp", "x.gif", "x.webp", "x.tif", "x.ppm"])
def test_formats(tmp_path: Path, name: str) -> None:
    red, green, blue = colour_of(saved(tmp_path, flat("RGB", (200, 0, 0), (64, 64)), name))
    assert red > 190 and green < 10 and blue < 10


def test_an_extension_may_lie(tmp_path: Path) -> None:
    saved(tmp_path, flat("RGB", (1, 2, 3)), "x.png").rename(tmp_path / "x.jpg")
    assert colour_of(tmp_path / "x.jpg") == [1, 2, 3]


def test_the_first_frame_counts(tmp_path: Path) -> None:
    frames = [flat("RGB", "red"), flat("RGB", "blue")]
    file = saved(tmp_path, frames[0], "x.gif", save_all=True, append_images=frames[1:])
    assert colour_of(file) == [255, 0, 0]


def test_grey_is_noticed_where_colour_was_asked_for(tmp_path: Path) -> None:
    file = saved(tmp_path, flat("L", 5))
    assert decode_file(file, 2).grey and not decode_file(file, 2, 1).grey
    assert not decode_file(saved(tmp_path, flat("RGB", (5, 5, 5))), 2).grey


def test_digests_are_of_the_bytes(tmp_path: Path, draw: Draw) -> None:
    first = decode_file(draw(tmp_path / "a.png"), 4).digest
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes())
    assert decode_file(tmp_path / "b.png", 4).digest == first
    assert decode_file(draw(tmp_path / "c.png", compress_level=1), 4).digest != first, "the same pixels, other bytes"


# Files that cannot be used


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes, all of it valid but for its pixels, which end early."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(10_000), 9))
        + chunk(b"IEND", b"")
    )


def postscript() -> bytes:
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"


def test_broken_files_give_their_reason(tmp_path: Path, draw: Draw) -> None:
    good = draw(tmp_path / "good.jpg", size=(200, 200)).read_bytes()
    tiff = io.BytesIO()
    flat("F", 0.5).save(tiff, "TIFF")
    deep = io.BytesIO()
    flat("I", 1_000_000).save(deep, "TIFF")
    cases = {
        b"": "an empty file",
        b"hello": "not an image that can be read",
        postscript(): "not an image that can be read",  # Pillow could, with Ghostscript
        good[: len(good) // 2]: "truncated",
        good[:30]: "Truncated",
        png_that_claims(20_000, 20_000): "pixels.* 89,478,485 allowed",
        png_that_claims(9_500, 9_500): "pixels.* 89,478,485 allowed",
        png_that_claims(200, 200): "truncated",
        tiff.getvalue(): "floating-point numbers have no range",
        deep.getvalue(): "32 bits have no range",
    }
    files = []
    for number, data in enumerate(cases):
        files.append(tmp_path / f"{number}.jpg")
        files[-1].write_bytes(data)
    results = list(in_parallel(lambda file: decode_file(file, 8), files, "reading"))
    for found, wanted in zip(results, cases.values(), strict=True):
        assert isinstance(found, Broken)
        with pytest.raises(Broken, match=wanted):
            raise found
        assert "\n" not in str(found)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """60,000 × 60,000 zeros take 10 MB as a PNG and 10 GB in memory."""
    (tmp_path / "bomb.png").write_bytes(png_that_claims(60_000, 60_000))
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from pathlib import Path; import sys\n"
        "from fedfa.data.sources.reading import Broken, decode_file\n"
        "try: decode_file(Path(sys.argv[1]), 8)\n"
        "except Broken as broken: print(broken)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "bomb.png")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "89,478,485 allowed" in done.stdout


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(Broken, match=r"cannot be read \(No such file or directory\)"):
        decode_file(tmp_path / "x.png", 8)
    with pytest.raises(Broken, match=r"cannot be read \(Is a directory\)"):
        decode_file(tmp_path, 8)


# Masks


def test_masks_keep_their_numbers(tmp_path: Path) -> None:
    numbers = np.array([[0, 1, 2], [3, 200, 255]], np.uint8)
    grey = Image.fromarray(numbers)
    coded = Image.fromarray(numbers).convert("P")
    coded.putdata(numbers.flatten().tolist())
    coded.putpalette(list(range(255, -1, -1)) * 3)
    for image in (grey, coded, grey.convert("RGB"), grey.convert("RGBA"), grey.convert("LA")):
        assert decode_mask(saved(tmp_path, image)).tolist() == numbers.tolist(), image.mode
    deep = Image.fromarray(numbers.astype(np.uint16) * 100)
    assert decode_mask(saved(tmp_path, deep)).tolist() == (numbers.astype(int) * 100).tolist()
    assert decode_mask(saved(tmp_path, flat("1", 1, (2, 1)))).tolist() == [[1, 1]]


def test_masks_in_colour_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="in colours"):
        decode_mask(saved(tmp_path, flat("RGB", (1, 2, 3))))
    with pytest.raises(Broken, match="not whole numbers"):
        decode_mask(saved(tmp_path, flat("F", 0.5), "x.tiff"))


def test_no_class_comes_into_being_between_two_others() -> None:
    mask = np.zeros((40, 60), np.uint8)
    mask[:, 30:] = 2
    for size in (7, 16, 100):
        small = nearest(mask, size)
        assert set(np.unique(small)) == {0, 2} and (small[:, : size // 2] == 0).all()


# In parallel


def test_results_keep_their_order_and_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "workers", lambda: 4)
    begun, threads = [], set()

    def work(number: int) -> int:
        begun.append(number)
        threads.add(threading.get_ident())
        if number % 7 == 3:
            raise Broken(f"number {number}")
        return number**2

    results: Iterator[int | Broken] = in_parallel(work, range(1000), "squaring")
    taken = [next(results) for _ in range(10)]
    assert max(begun) < 10 + 8 * 4, "work does not run ahead of who takes its results"
    taken += results
    assert [str(t) if isinstance(t, Broken) else t for t in taken] == [
        f"number {n}" if n % 7 == 3 else n**2 for n in range(1000)
    ]
    assert len(threads) > 1


def test_stopping_early_leaves_nothing_running() -> None:
    filters, threads = list(warnings.filters), threading.active_count()
    with closing(in_parallel(lambda number: number, range(1000), "counting")) as results:
        assert next(results) == 0
        assert threading.active_count() > threads and warnings.filters != filters
    assert threading.active_count() == threads and warnings.filters == filters


def test_other_errors_are_not_swallowed() -> None:
    def work(number: int) -> int:
        return 1 // number

    with pytest.raises(ZeroDivisionError):
        list(in_parallel(work, [1, 0, 1], "dividing"))


def test_no_terminal_no_progress(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(in_parallel(lambda number: number, [1, 2], "counting")) == [1, 2]
    assert capfd.readouterr() == ("", "")


IN_A_TERMINAL = """
import os, pty, sys
def child():
    from fedfa.data.sources.reading import in_parallel
    import time
    for _ in in_parallel(lambda n: time.sleep(0.1), range(20), "reading [pictures]"):
        pass
pid, terminal = pty.fork()
if not pid:
    child()
    os._exit(0)
text = b""
while True:
    try:
        part = os.read(terminal, 4096)
    except OSError:
        break
    if not part:
        break
    text += part
os.waitpid(pid, 0)
sys.stdout.buffer.write(text)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX's")
def test_progress_in_a_terminal() -> None:
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    environment.pop("CI", None)
    done = subprocess.run([sys.executable, "-c", IN_A_TERMINAL], capture_output=True, check=True, env=environment)
    assert b"reading [pictures]" in done.stdout and b"/20" in done.stdout


def test_pillow_is_asked_for_by_name(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "from fedfa.data.sources.reading import in_parallel\n"
        "from fedfa.errors import UserError\n"
        "try: list(in_parallel(str, [1], 'reading'))\n"
        "except UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "reading images needs Pillow: pip install 'fedfa[data]'\n"
