"""Decoded data on disk: read once, memory-mapped from then on.

An entry is a folder `NAME-FINGERPRINT` in the cache folder, with an .npy file per array and meta.json. It is written
beside its place and renamed, so that it is whole or not there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedfa.data.federation import TaskName
from fedfa.data.pool import Given, Pool, Problem
from fedfa.errors import UserError

Array = NDArray[Any]

FORMAT = 1
"""Of an entry: another number makes every entry anew."""
HEADER = 128
"""Bytes before the numbers in the .npy files that are written here: always the same, however many rows there are."""
ENTRY, META = "entry.json", "meta.json"


def cache_folder() -> Path:
    """`$FEDFA_CACHE`, else `fedfa` in the platform's folder for what can be made again."""
    if given := os.environ.get("FEDFA_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fedfa"


def fingerprint(root: Path, files: Sequence[Path], settings: Mapping[str, Any], meaning: Any = None) -> str:
    """Sixteen hex digits that change with any file's place under `root`, size or time, and with any setting."""
    digest = hashlib.blake2b(json.dumps([FORMAT, settings, meaning], sort_keys=True).encode(), digest_size=8)
    for file in files:
        place = os.path.relpath(file, root).replace(os.sep, "/")
        try:
            status = os.stat(file)
            line = f"{place}\0{status.st_size}\0{status.st_mtime_ns}\n"
        except OSError as error:  # a broken link, a folder that may not be read: reported when it is read
            line = f"{place}\0{error.errno}\n"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


class Writer:
    """Arrays that grow row by row on disk, so that they may be larger than memory.

    Rows are appended to a file and not put into a memory map: a full disk is then an error, and not a dead process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._rows: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._count: dict[str, int] = {}

    def append(self, name: str, rows: Array) -> None:
        """Add `rows` at the end of the array called `name`; the first decide its type and the shape of a row."""
        if name not in self._files:
            self._files[name] = open(self._folder / f"{name}.npy", "wb")  # noqa: SIM115  # closed by finish or close
            self._files[name].write(bytes(HEADER))
            self._rows[name], self._count[name] = (rows.dtype, rows.shape[1:]), 0
        if (rows.dtype, rows.shape[1:]) != self._rows[name]:
            raise ValueError(f"rows of {name} are {self._rows[name]}, not {(rows.dtype, rows.shape[1:])}")
        self._files[name].write(np.ascontiguousarray(rows).data)
        self._count[name] += len(rows)

    def finish(self) -> dict[str, Any]:
        """Write the headers, now that the number of rows is known, and see everything onto the disk. Gives every
        array's type and shape."""
        forms = {name: (dtype.str, (self._count[name], *row)) for name, (dtype, row) in self._rows.items()}
        for name, file in self._files.items():
            file.seek(0)
            file.write(_header(*forms[name]))
            _sync(file)
            file.close()
        return forms

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()


def _header(dtype: str, shape: Sequence[int]) -> bytes:
    """The header of an .npy file, version 1.0, padded to `HEADER` bytes."""
    text = repr({"descr": dtype, "fortran_order": False, "shape": tuple(shape)})
    return b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + text.ljust(HEADER - 11).encode() + b"\n"


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


@dataclass(frozen=True)
class Entry:
    """What a cache gives back."""

    arrays: Mapping[str, Array]
    """Memory-mapped: a page is read when it is first looked at. Writing into one changes memory alone, not the file."""
    meta: Mapping[str, Any]


def cached(
    name: str,
    root: Path,
    files: Sequence[Path],
    settings: Mapping[str, Any],
    make: Callable[[Writer], Mapping[str, Any]],
    meaning: Any = None,
) -> Entry:
    """The entry of these files and settings: from the cache, or made with `make` and kept there.

    `make` appends rows to a :class:`Writer` and returns what else is to be kept, as JSON takes it. `meaning` is what
    the files are taken for, such as their labels, where `settings` do not say so. Of several processes that ask at
    once one makes the entry and the others wait. An entry that is damaged is made anew. Older entries of the same
    folder and settings are deleted; the setting `reader`, which names the version of what reads the files, aside.
    """
    key = fingerprint(root, files, settings, meaning)
    place = cache_folder() / f"{name}-{key}"
    lasting = {key: value for key, value in settings.items() if key != "reader"}
    label = json.dumps({"root": str(root.resolve()), "settings": lasting}, sort_keys=True)
    found = _load(place)
    if found is not None:
        return found
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(_lock_of(place)):
            found = _load(place)  # another process may have made it meanwhile
            if found is None:
                _remove_others(place, label)
                _make(place, label, make)
                found = _load(place)
    except OSError as error:
        if not _is_ours(error):
            raise
        raise UserError(
            f"cannot write the cache of {name} in {cache_folder()} ({error.strerror}); FEDFA_CACHE names another folder"
        ) from error
    if found is None:
        raise UserError(f"the cache {place} cannot be read back; delete it, or name another folder with FEDFA_CACHE")
    return found


def _is_ours(error: OSError) -> bool:
    """Whether an error is about the cache folder, and not about the data."""
    if error.filename is None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return Path(os.fsdecode(error.filename)).absolute().is_relative_to(cache_folder().absolute())


def _make(place: Path, label: str, make: Callable[[Writer], Mapping[str, Any]]) -> None:
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    writer = Writer(beside)
    try:
        meta = make(writer)
        forms = writer.finish()
        for file, text in ((ENTRY, label), (META, _sealed(forms, meta))):
            with open(beside / file, "wb") as stream:
                stream.write(text.encode())
                _sync(stream)
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):  # where there are no locks another process may have been quicker
            os.rename(beside, place)
    finally:
        writer.close()
        shutil.rmtree(beside, ignore_errors=True)


def _sealed(forms: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """The arrays' types and shapes and `meta` as a line of JSON, and a line before it by which damage shows."""
    text = json.dumps([forms, meta])
    return f"{hashlib.blake2b(text.encode()).hexdigest()}\n{text}"


def _load(place: Path) -> Entry | None:
    """The entry at `place`, or None where there is none, or a damaged one."""
    try:
        seal, _, text = (place / META).read_text("utf-8").partition("\n")
        if seal != hashlib.blake2b(text.encode()).hexdigest():
            return None
        forms, meta = json.loads(text)
        return Entry({name: _mapped(place / f"{name}.npy", *form) for name, form in forms.items()}, meta)
    except (OSError, ValueError):
        return None


def _mapped(file: Path, dtype: str, shape: Sequence[int]) -> Array:
    """The array in an .npy file, without reading it.

    Nothing is reserved for the pages that may be written into: Linux otherwise refuses a map that is larger than
    memory and swap. (One that may not be written into would do, but torch does not know of such: a write would end
    the process.)
    """
    count, bytes_each = math.prod(shape), np.dtype(dtype).itemsize
    with open(file, "rb") as stream:
        whole = os.fstat(stream.fileno()).st_size == HEADER + count * bytes_each
        if not whole or stream.read(HEADER) != _header(dtype, shape):
            raise ValueError(f"{file} is damaged")
        if sys.platform == "linux":
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
            view = mmap.mmap(stream.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        else:
            view = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    array: Array = np.frombuffer(view, dtype, count, HEADER).reshape(shape)
    return array


def _lock_of(place: Path) -> Path:
    return place.with_name(f".{place.name}.lock")


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock, once nobody else does. It ends with the process, however that ends.

    Where there are no locks (Windows, some network disks) two processes may do the same work; the first to be done
    counts.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(file, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is reading these data; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _remove_others(place: Path, label: str) -> None:
    """Delete what the same folder and settings gave when its files were others, and what killed processes left."""
    name = place.name.rpartition("-")[0]
    for other in place.parent.glob(f"{name}-*/{ENTRY}"):
        with contextlib.suppress(OSError):
            if other.parent != place and other.read_text("utf-8") == label:
                shutil.rmtree(other.parent)
                _lock_of(other.parent).unlink(missing_ok=True)
    for part in place.parent.glob(f".{place.name}.*.part"):
        shutil.rmtree(part, ignore_errors=True)


@dataclass
class Facts:
    """What a reader finds out beside the arrays `images` and `labels`: a :class:`Pool` without them."""

    classes: Sequence[str]
    names: list[str] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def cached_pool(
    name: str,
    task: TaskName,
    root: Path,
    files: Sequence[Path],
    settings: Mapping[str, Any],
    read: Callable[[Writer], Facts],
    problems: Sequence[Problem] = (),
    meaning: Any = None,
) -> Pool:
    """The pool that `read` makes of these files, through the cache.

    `read` appends rows to the arrays `images` and `labels`, and returns the rest. `settings` holds whatever the result
    depends on besides the files: sizes, and a number that changes when the reader does; `meaning` what the files are
    taken for, such as their labels. `problems` are those found while listing the files, which is done every time.
    """

    def make(writer: Writer) -> dict[str, Any]:
        facts = read(writer)
        if not facts.names:  # not to be kept: it may be this machine's fault
            example = "".join(f"; {problem.file}: {problem.what}" for problem in facts.problems[:1])
            raise UserError(f"{name}: none of the {len(files)} files in {root} can be used{example}")
        return asdict(facts)

    entry = cached(name, root, files, settings, make, meaning)
    meta = entry.meta
    return Pool(
        name=name,
        task=task,
        images=torch.from_numpy(entry.arrays["images"]),
        labels=torch.from_numpy(entry.arrays["labels"]),
        classes=tuple(meta["classes"]),
        names=meta["names"],
        sites=meta["sites"],
        groups=meta["groups"],
        given=meta["given"],
        problems=(*problems, *(Problem(**problem) for problem in meta["problems"])),
    )
