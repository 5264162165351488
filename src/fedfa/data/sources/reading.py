"""Image files: finding them, and decoding them in parallel into a cache."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import sys
import unicodedata
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedfa.data.pool import Problem
from fedfa.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

Pixels = NDArray[np.uint8]
T = TypeVar("T")
R = TypeVar("R")

IMAGES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
)
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""What Pillow is allowed to open, whatever a file is called: some of its other formats start programs."""
MOST_PIXELS = 89_478_485
"""Pillow's own limit: a quarter of a gigabyte in RGB. A file of a few kilobytes may claim more."""
LITTER = frozenset(("thumbs.db", "desktop.ini", "__macosx"))
"""What file managers leave in folders, besides names that start with a dot."""


# Finding files


def find_folder(path: str, name: str) -> Path:
    """The folder a source reads: `path`, or where none is given `$FEDFA_DATA/NAME`, or `data/NAME`."""
    base = Path(os.environ.get("FEDFA_DATA") or "data")
    folder = (Path(path) if path else base / name).expanduser()
    hint = (
        f"say where it is with source.path=FOLDER, or put it at {base / name} (FEDFA_DATA names that folder's parent)"
    )
    if os.path.isfile(folder):
        raise UserError(f"{name}: {folder} is a file, not a folder; {hint}")
    if not os.path.isdir(folder):
        raise UserError(f"{name}: there is no folder {folder}; {hint}")
    return folder


def relative(file: Path, root: Path) -> str:
    """What a file is called in splits and reports: its path under `root`, the same on every system."""
    place = os.path.relpath(file, root).replace(os.sep, "/")
    return unicodedata.normalize("NFC", os.fsencode(place).decode("utf-8", "backslashreplace"))


def folders(folder: Path) -> list[Path]:
    """The folders in a folder, in order of their names; hidden ones are left out. One that we may not look into has
    none."""
    try:
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for entry in entries if _leads_to(entry.is_dir) and not _is_litter(entry.name)]
    except PermissionError:
        return []
    return sorted(found, key=lambda path: path.name)


def image_files(folder: Path, root: Path, problems: list[Problem]) -> list[Path]:
    """The image files in a folder and in the folders in it, in order of their paths.

    Links are followed, but not back to where they are. What is not an image, or cannot be listed, is a problem.
    """
    found = list(_walk(folder, root, problems, ()))
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _walk(folder: Path, root: Path, problems: list[Problem], above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    try:
        status = os.stat(folder)
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError as error:
        problems.append(Problem(relative(folder, root), f"cannot be listed ({error.strerror}); left out"))
        return
    here = (status.st_dev, status.st_ino)
    if here in above:
        problems.append(Problem(relative(folder, root), "is a link to a folder that it is in; not followed"))
        return
    for entry in entries:
        path = Path(entry.path)
        if _is_litter(entry.name):
            continue
        if _leads_to(entry.is_dir):
            yield from _walk(path, root, problems, (*above, here))
        elif not is_image(entry.name):
            problems.append(Problem(relative(path, root), f"not an image ({path.suffix or 'no extension'}); left out"))
        elif not _leads_to(entry.is_file):
            kind = "a link to nothing" if entry.is_symlink() else "not an ordinary file"
            problems.append(Problem(relative(path, root), f"{kind}; left out"))
        else:
            yield path


def _leads_to(kind: Callable[[], bool]) -> bool:
    """Whether an entry is a folder, or a file; a link to itself is neither."""
    try:
        return kind()
    except OSError:
        return False


def is_image(name: str) -> bool:
    """Whether a file called so should be an image: by its extension, in capitals or not."""
    return os.path.splitext(name)[1].lower() in IMAGES and not _is_litter(name)


def _is_litter(name: str) -> bool:
    return name.startswith(".") or name.lower() in LITTER


# Decoding


class Broken(Exception):
    """An image that cannot be used, with the reason in a line."""


@dataclass(frozen=True)
class Decoded:
    pixels: Pixels
    """(C, H, W)."""
    digest: str
    """Of the file's bytes: equal for byte-identical files."""
    shape: tuple[int, int]
    """Height and width in the file, upright."""
    grey: bool
    """Whether the file has one channel where several were asked for."""


def decode_file(file: Path, size: int, channels: int = 3) -> Decoded:
    """An image file as (channels, size, size) in uint8. Raises :class:`Broken` with the reason where it cannot be."""
    data = read_bytes(file)
    image = open_image(data)
    grey = channels > 1 and image.mode == "L"
    return Decoded(resized(image, size, channels), digest(data), (image.height, image.width), grey)


def read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # not the file's fault, and soon over
            raise
        raise Broken(f"cannot be read ({error.strerror})") from error


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def open_image(data: bytes) -> Image.Image:
    """An image upright, in RGB, or in L where it is grey.

    Transparent parts are white. 16-bit values are divided by 257, whatever part of their range they use.
    """
    return _opened(data, _eight_bit)


def _opened(data: bytes, finish: Callable[[Image.Image], R]) -> R:
    """What `finish` makes of an image that is decoded and upright."""
    need_pillow()
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise Broken(f"{image.width}×{image.height} pixels are more than the {MOST_PIXELS:,} allowed")
            image.load()
            return finish(ImageOps.exif_transpose(image))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Broken(f"more pixels than the {MOST_PIXELS:,} allowed") from error
    except UnidentifiedImageError as error:
        raise Broken("not an image that can be read" if data else "an empty file") from error
    except (Broken, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise what they like on damaged files
        raise Broken(" ".join(str(error).split()) or type(error).__name__) from error


def _eight_bit(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits, which Pillow gives as I;16 or as I
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise Broken("pixels of 32 bits have no range that could be scaled to 0–255")
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        raise Broken("pixels of floating-point numbers have no range that could be scaled to 0–255")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def decode_mask(file: Path) -> NDArray[np.int32]:
    """The number at every pixel of a mask, (H, W): the grey value, or the index into the palette."""
    return _opened(read_bytes(file), _numbers)


def _numbers(image: Image.Image) -> NDArray[np.int32]:
    values = np.asarray(image)
    if values.ndim == 3:
        colours = values[..., : 1 if image.mode == "LA" else 3]
        if (colours != colours[..., :1]).any():
            raise Broken("in colours, where a mask has one number a pixel: grey, or a palette")
        values = colours[..., 0]
    if values.dtype.kind == "f" or values.min() < 0 or values.max() > 65535:
        raise Broken("not whole numbers between 0 and 65535")
    return values.astype(np.int32)


def nearest(mask: Pixels, size: int) -> Pixels:
    """A mask as (size, size), by the nearest pixel: no class comes into being between two others."""
    from PIL import Image

    return np.array(Image.fromarray(mask).resize((size, size), Image.Resampling.NEAREST))


def resized(image: Image.Image, size: int, channels: int) -> Pixels:
    """An image as (channels, size, size): stretched to a square, bilinear with antialiasing, as Pillow does it."""
    from PIL import Image

    square = image.convert("RGB" if channels == 3 else "L").resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(square)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1) if channels == 3 else pixels[None])


# In parallel


def workers() -> int:
    """Threads that decode: one a core. Pillow lets go of the interpreter while it decodes and resizes, and nothing
    has to be sent between processes: on two cores 1.6 times a plain loop, where two processes had 1.3."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 32)


def in_parallel(work: Callable[[T], R], items: Sequence[T], title: str) -> Generator[R | Broken, None, None]:
    """`work` on every item, in threads; the results in order, :class:`Broken` among them. Shows how far it is where
    there is a terminal. Only a few results wait at any time, so that memory does not grow with the items.

    Whoever may stop before the end closes it (`contextlib.closing`): threads and progress end then, and not some time
    later.
    """
    need_pillow()

    def guarded(item: T) -> R | Broken:
        try:
            return work(item)
        except Broken as broken:
            return broken

    with _progress(title, len(items)) as advance, _strict_pillow(), ThreadPoolExecutor(workers()) as pool:
        waiting: deque[Future[R | Broken]] = deque()
        rest: Iterable[T] = iter(items)
        try:
            for item in rest:
                waiting.append(pool.submit(guarded, item))
                if len(waiting) >= 8 * workers():
                    yield waiting.popleft().result()
                    advance()
            while waiting:
                yield waiting.popleft().result()
                advance()
        finally:
            for future in waiting:
                future.cancel()


@cache
def need_pillow() -> str:
    """Pillow's version, once it has been told of the formats that it does not know from the start."""
    try:
        import PIL.TiffImagePlugin
        import PIL.WebPImagePlugin
    except ImportError:
        raise UserError("reading images needs Pillow: pip install 'fedfa[data]'") from None
    return PIL.__version__


@contextmanager
def _strict_pillow() -> Iterator[None]:
    """Images above Pillow's limit are errors; what else it has to say of odd files is not worth a line each."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar where there is a terminal; nothing otherwise."""
    if not sys.stderr.isatty() or os.environ.get("CI"):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: list[Any] = [TextColumn(title, markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
