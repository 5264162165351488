"""A federation whose pool does not fit: into memory, or onto the device."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedfa
from fedfa import Federation
from fedfa.data import federation as module

TESTS = Path(__file__).parents[1]


@pytest.fixture
def tiny_federation() -> Federation:
    federation: Federation = fedfa.SOURCES["tiny"]().build(0)  # type: ignore[union-attr]  # known to be there
    return federation


def test_batches(tiny_federation: Federation) -> None:
    x, y = tiny_federation.batch(torch.tensor([3, 0, 3]))
    assert x.dtype == torch.float32 and y.dtype == torch.int64
    assert torch.equal(x, tiny_federation.images[[3, 0, 3]].float() / 255)
    assert torch.equal(y, tiny_federation.labels[[3, 0, 3]])


def test_on_the_cpu_nothing_moves(tiny_federation: Federation) -> None:
    moved = tiny_federation.to("cpu")
    assert moved.images.data_ptr() == tiny_federation.images.data_ptr() and moved.device == torch.device("cpu")


def test_a_pool_that_does_not_fit_sends_batches(tiny_federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's device without memory, which shows where everything goes: shapes are all there is of it."""
    size = tiny_federation.images.nbytes + tiny_federation.labels.nbytes
    monkeypatch.setattr(module, "room", lambda device: size)
    fits = tiny_federation.to("meta")
    assert fits.images.is_meta and fits.labels.is_meta and fits.home is None and fits.device.type == "meta"
    monkeypatch.setattr(module, "room", lambda device: size - 1)
    large = tiny_federation.to("meta")
    assert large.images.data_ptr() == tiny_federation.images.data_ptr() and large.device.type == "meta"
    x, y = large.batch(torch.tensor([5, 1]))
    assert x.is_meta and y.is_meta and x.shape == (2, 3, 12, 12) and y.shape == (2,)
    monkeypatch.undo()
    assert large.to("cpu").home is None, "and back"


def test_batches_that_are_sent_are_the_right_ones(tiny_federation: Federation) -> None:
    index = torch.tensor([5, 1, 1])
    sent, kept = replace(tiny_federation, home=torch.device("cpu")).batch(index), tiny_federation.batch(index)
    assert torch.equal(sent[0], kept[0]) and torch.equal(sent[1], kept[1])


def test_there_is_always_room_on_the_cpu() -> None:
    assert module.room(torch.device("cpu")) == float("inf")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_go_to_a_gpu_that_has_no_room(tiny_federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    free = torch.cuda.mem_get_info()[0]
    assert 0 < module.room(torch.device("cuda")) <= free
    index = torch.tensor([7, 2, 9])
    there = tiny_federation.to("cuda").batch(index)
    monkeypatch.setattr(module, "room", lambda device: 0)
    large = tiny_federation.to("cuda")
    assert large.images.device.type == "cpu" and large.device.type == "cuda"
    for _ in range(20):  # buffers on the host are used again, but not while a copy from them is under way
        sent = [large.batch(torch.tensor([n, n + 1])) for n in range(10)]
    for number, (x, y) in enumerate(sent):
        assert torch.equal(x.cpu(), tiny_federation.images[number : number + 2].float() / 255)
        assert y.tolist() == tiny_federation.labels[number : number + 2].tolist()
    x, y = large.batch(index)
    assert x.is_cuda and torch.equal(x, there[0]) and torch.equal(y, there[1])


LARGER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import conftest, fedfa, torch
import numpy as np
from fedfa.data import cache
from fedfa.data.federation import ClientIndex, Federation

def kilobytes(key, file="/proc/self/status"):
    return sum(int(line.split()[1]) for line in open(file) if line.split(":")[0] in key)

memory = 1024 * kilobytes(("MemTotal", "SwapTotal"), "/proc/meminfo")
folder, row = Path(sys.argv[2]), 3 * 256 * 256
count = 2 * memory // row
shape = [count, 3, 256, 256]
with open(folder / "images.npy", "wb") as file:  # a file of holes, which takes no room on the disk
    file.write(cache._header("|u1", shape))
    file.truncate(cache.HEADER + count * row)

class Large:
    def build(self, seed):
        images = torch.from_numpy(cache._mapped(folder / "images.npy", "|u1", shape))
        places = torch.linspace(0, count - 1, 80, dtype=torch.float64).long()
        clients = {name: ClientIndex(*part.split([20, 10, 10])) for name, part in zip("ab", places.split(40))}
        return Federation("large", "classification", images, torch.arange(count) % 3, tuple("xyz"), clients)

fedfa.SOURCES.register("large", Large, "larger than memory")
federation = Large().build(0)
before = kilobytes(("RssAnon",))
run = fedfa.run(conftest.TINY, root=folder / "runs", source="large", rounds=1)
print(run.rounds, federation.images.nbytes / memory, (kilobytes(("RssAnon",)) - before) * 1024 / memory)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_federation_larger_than_memory_trains(tmp_path: Path) -> None:
    """Twice as large as memory and swap together, through the engine, in a process of its own."""
    words = [sys.executable, "-c", LARGER, str(TESTS), str(tmp_path)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    rounds, size, growth = done.stdout.split()
    assert rounds == "1" and float(size) > 1.9
    assert float(growth) < 0.1, "of the images only what a batch needs is in memory"


REAL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import conftest, fedfa, torch
from fedfa.data.sources.image_folders import ImageFolders

def anonymous():
    return sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

source = {"name": "image_folders", "path": sys.argv[2], "size": 512}
fedfa.run(conftest.TINY, root=sys.argv[3], source={**source, "size": 16}, rounds=1)  # what any run needs
before, peak = anonymous(), 0

class Watch(fedfa.server.Watcher):
    def round_done(self, record):
        global peak
        peak = max(peak, anonymous())

few = {"test": 0.02, "val": 0.02}  # evaluation has batches of 256, which are not the question here
run = fedfa.run(conftest.TINY, root=sys.argv[3], source=source, split=few, rounds=1, watcher=Watch())
print(run.rounds, max(peak - before, 0), ImageFolders(sys.argv[2], 512).pool().images.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_training_reads_images_from_the_cache(tmp_path: Path) -> None:
    """94 MB of real images, decoded and trained on: memory of the process's own grows by far less."""
    image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    for number in range(120):
        file = tmp_path / "data" / "ab"[number % 2] / "xyz"[number % 3] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(file)
    words = [sys.executable, "-c", REAL, str(TESTS), str(tmp_path / "data"), str(tmp_path / "runs")]
    # What the allocator keeps of a step's buffers is not the question: glibc is to give it back.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    rounds, growth, size = map(int, done.stdout.split()[-3:])
    assert rounds == 1 and size == 120 * 3 * 512 * 512
    assert growth < size / 3, f"{growth / 1e6:.0f} MB of {size / 1e6:.0f}"
