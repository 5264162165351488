"""The cache: made once, whole or not there, and never larger in memory than what is looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfa.data.cache import Entry, Facts, Writer, cache_folder, cached, cached_pool, fingerprint
from fedfa.data.pool import Problem
from fedfa.errors import UserError

ROWS = np.arange(7 * 3 * 4, dtype=np.uint8).reshape(7, 3, 4)


class Maker:
    """Makes an entry of `ROWS`, in two goes, and counts how often it is asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, writer: Writer) -> Mapping[str, Any]:
        self.calls += 1
        writer.append("images", ROWS[:5])
        writer.append("labels", np.arange(7))
        writer.append("images", ROWS[5:])
        return {"names": ["a", "b ü \udcff"]}


@pytest.fixture
def make() -> Maker:
    return Maker()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "the data"
    folder.mkdir()
    for name in ("one.png", "two.png"):
        (folder / name).write_bytes(name.encode())
    return sorted(folder.iterdir())


def get(files: list[Path], make: Callable[[Writer], Mapping[str, Any]], **settings: Any) -> Entry:
    return cached("set", files[0].parent, files, settings, make)


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def test_an_entry_is_made_once(files: list[Path], make: Maker) -> None:
    for _ in range(2):
        entry = get(files, make)
        assert np.array_equal(entry.arrays["images"], ROWS) and entry.arrays["images"].dtype == np.uint8
        assert entry.arrays["labels"].tolist() == list(range(7))
        assert entry.meta == {"names": ["a", "b ü \udcff"]}
    assert make.calls == 1


def test_files_are_plain_numpy_files(files: list[Path], make: Maker, cache: Path) -> None:
    get(files, make)
    (entry,) = entries(cache)
    assert sorted(file.name for file in entry.iterdir()) == ["entry.json", "images.npy", "labels.npy", "meta.json"]
    for mode in (None, "r"):
        read = np.load(entry / "images.npy", mmap_mode=mode, allow_pickle=False)
        assert np.array_equal(read, ROWS)


def test_writing_into_an_array_leaves_the_cache_alone(files: list[Path], make: Maker) -> None:
    tensor = torch.from_numpy(get(files, make).arrays["images"])  # which would warn if it could not be written into
    tensor.zero_()
    assert np.array_equal(get(files, make).arrays["images"], ROWS) and make.calls == 1


def test_what_changes_the_fingerprint(files: list[Path], tmp_path: Path) -> None:
    root = files[0].parent

    def now(*given: Path, **settings: Any) -> str:
        return fingerprint(root, given or files, {"size": 8, **settings})

    first = now()
    assert now() == first
    assert now(size=9) != first and now(files[0]) != first and now(*reversed(files)) != first
    assert fingerprint(root, files, {"size": 8}, meaning=[1, 0]) != first
    status = files[0].stat()
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    touched = now()
    assert touched != first
    files[0].write_bytes(b"longer than it was")
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert now() not in (first, touched)
    changed = now()
    moved = tmp_path / "elsewhere"
    root.rename(moved)
    assert fingerprint(moved, [moved / file.name for file in files], {"size": 8}) == changed
    (moved / "one.png").rename(moved / "three.png")
    assert fingerprint(moved, [moved / "three.png", moved / "two.png"], {"size": 8}) != changed
    assert fingerprint(moved, [moved / "not there"], {}) != fingerprint(moved, [moved / "not here"], {})


def cut(entry: Path) -> None:
    os.truncate(entry / "images.npy", (entry / "images.npy").stat().st_size - 1)


def lengthen(entry: Path) -> None:
    with open(entry / "images.npy", "ab") as file:
        file.write(b"x")


def other_header(entry: Path) -> None:
    with open(entry / "images.npy", "r+b") as file:
        file.seek(60)
        file.write(b"9")


def other_meta(entry: Path) -> None:
    text = (entry / "meta.json").read_text().replace('"a"', '"z"')
    (entry / "meta.json").write_text(text)


def no_text(entry: Path) -> None:
    (entry / "meta.json").write_bytes(b"\xff\xfe")


def no_meta(entry: Path) -> None:
    (entry / "meta.json").unlink()


def empty_meta(entry: Path) -> None:
    (entry / "meta.json").write_bytes(b"")


def no_array(entry: Path) -> None:
    (entry / "labels.npy").unlink()


@pytest.mark.parametrize(
    "damage",
    [cut, lengthen, other_header, other_meta, no_text, no_meta, empty_meta, no_array],
    ids=lambda f: f.__name__,
)
def test_a_damaged_entry_is_made_anew(
    damage: Callable[[Path], None], files: list[Path], make: Maker, cache: Path
) -> None:
    get(files, make)
    damage(entries(cache)[0])
    assert np.array_equal(get(files, make).arrays["images"], ROWS) and make.calls == 2
    get(files, make)
    assert make.calls == 2 and len(entries(cache)) == 1


def test_what_fails_leaves_nothing_behind(files: list[Path], make: Maker, cache: Path) -> None:
    def fail(writer: Writer) -> Mapping[str, Any]:
        writer.append("images", ROWS)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(files, fail)
    assert not entries(cache)
    get(files, make)
    assert make.calls == 1


def test_rows_are_all_alike(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.append("images", ROWS)
    with pytest.raises(ValueError, match="rows of images are"):
        writer.append("images", ROWS[:, :2])
    with pytest.raises(ValueError, match="rows of images are"):
        writer.append("images", ROWS.astype(np.int16))
    writer.close()


def test_old_entries_go_when_files_or_the_reader_change(files: list[Path], make: Maker, cache: Path) -> None:
    get(files, make, size=1, reader="1")
    get(files, make, size=2, reader="1")
    kept = set(entries(cache))
    files[0].write_bytes(b"changed")
    entry = get(files, make, size=1, reader="1")
    assert len(entries(cache)) == 2 and len(kept & set(entries(cache))) == 1, "that of size 2 is another's"
    get(files, make, size=1, reader="2")
    assert len(entries(cache)) == 2 and make.calls == 4
    assert np.array_equal(entry.arrays["images"], ROWS), "who has an entry open does not lose it"


MAKING = """
import sys, time
from pathlib import Path
import numpy as np
from fedfa.data.cache import cached
def make(writer):
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    writer.append("images", np.zeros((3, 2), np.uint8))
    time.sleep(float(sys.argv[3]))
    writer.append("images", np.ones((3, 2), np.uint8))
    return {}
folder = Path(sys.argv[1])
print(cached("set", folder, sorted(folder.iterdir()), {}, make).arrays["images"].sum())
"""


def test_two_processes_at_once_make_it_once(
    files: list[Path], tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    log = tmp_path / "log"
    words = [sys.executable, "-c", MAKING, str(files[0].parent), str(log), "1"]
    processes = [spawn(words) for _ in range(3)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in results] == ["6\n"] * 3, results
    assert log.read_text() == "made\n"


def test_a_process_that_is_killed_does_no_harm(
    files: list[Path],
    tmp_path: Path,
    cache: Path,
    spawn: Callable[..., subprocess.Popen[str]],
    wait_for: Callable[[Callable[[], bool]], None],
) -> None:
    log = tmp_path / "log"
    words = [sys.executable, "-c", MAKING, str(files[0].parent), str(log)]
    killed = spawn([*words, "600"])
    wait_for(log.exists)
    waiting = spawn([*words, "0"])
    killed.send_signal(signal.SIGKILL)
    assert waiting.communicate(timeout=120)[0] == "6\n"
    assert log.read_text() == "made\nmade\n"
    (entry,) = entries(cache)
    assert not entry.name.startswith("."), "what the first had written is gone"


FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from pathlib import Path
import sys
import numpy as np
from fedfa.data.cache import cached
from fedfa.errors import UserError
def make(writer):
    for _ in range(1000):
        writer.append("images", np.zeros((1, 1000), np.uint8))
    return {}
try:
    cached("set", Path(sys.argv[1]), [], {}, make)
except UserError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits on file sizes are POSIX's")
def test_no_room_on_the_disk_is_said(tmp_path: Path, cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"cannot write the cache of set in {cache} (File too large); FEDFA_CACHE names another folder\n"
    )
    assert not entries(cache)


def test_a_cache_that_cannot_be_written_is_said(
    files: list[Path], make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDFA_CACHE", str(files[0] / "cache"))  # in a file
    with pytest.raises(UserError, match=r"cannot write the cache of set in .*one\.png.*FEDFA_CACHE names another"):
        get(files, make)


def test_an_error_of_the_data_is_not_blamed_on_the_cache(files: list[Path]) -> None:
    def make(writer: Writer) -> Mapping[str, Any]:
        return {"text": open(files[0].parent / "missing").read()}

    with pytest.raises(FileNotFoundError):
        get(files, make)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDFA_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("FEDFA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / "xdg" / "fedfa"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "fedfa"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "fedfa"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "fedfa"


def facts(count: int) -> Facts:
    return Facts(("a",), ["x"] * count, ["site"] * count, list(range(count)), [""] * count, [Problem("y", "broken")])


def test_a_pool_through_the_cache(files: list[Path]) -> None:
    def read(writer: Writer) -> Facts:
        writer.append("images", np.full((2, 3, 4, 4), 5, np.uint8))
        writer.append("labels", np.zeros(2, np.int64))
        return facts(2)

    listed = [Problem("z", "not an image")]
    for _ in range(2):
        pool = cached_pool("set", "classification", files[0].parent, files, {}, read, listed)
        assert pool.images.shape == (2, 3, 4, 4) and pool.images.dtype == torch.uint8
        assert pool.labels.tolist() == [0, 0] and pool.classes == ("a",) and list(pool.names) == ["x", "x"]
        assert list(pool.sites) == ["site"] * 2 and list(pool.groups) == [0, 1] and list(pool.given) == ["", ""]
        assert pool.problems == (Problem("z", "not an image"), Problem("y", "broken"))


def test_a_pool_without_samples_is_an_error_and_not_kept(files: list[Path], cache: Path) -> None:
    with pytest.raises(UserError, match=r"set: none of the 2 files in .*the data can be used; y: broken"):
        cached_pool("set", "classification", files[0].parent, files, {}, lambda writer: facts(0))
    assert not entries(cache)
