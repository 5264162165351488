"""What each algorithm and augmentation costs: time and memory of a round, relative to FedAvg's.

A round is two clients of four batches each, without evaluation; times are interleaved in one run. Memory is the peak of
a round above what was there before the engine was built: what torch allocated on a GPU, and on a CPU the resident
size of a process of its own for each method.

    python -m benchmarks.methods            # LeNet on a CPU, LeNet and AlexNet on a GPU where there is one
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import fedfa
from benchmarks.measure import ratios
from fedfa import ClientIndex, Federation
from fedfa.engines.client import Local
from fedfa.engines.sequential import Sequential
from fedfa.memory import Memory
from fedfa.server import Plan, Watcher, collect_shares, first_state, play_round
from fedfa.simulate import make_network
from fedfa.task import Classification

ALGORITHMS = [name for name in fedfa.ALGORITHMS if name.startswith(("fed", "scaffold"))]
AUGMENTATIONS = [name for name in fedfa.AUGMENTATIONS if name != "none"]
METHODS = [(name, "none") for name in ALGORITHMS] + [("fedavg", name) for name in AUGMENTATIONS]
SHAPES = {"alexnet": (32, 256), "lenet": (32, 28)}
BATCHES = 4


def label(method: tuple[str, str]) -> str:
    algorithm, augmentation = method
    return algorithm if augmentation == "none" else f"{algorithm} + {augmentation}"


def federation(network: str) -> Federation:
    batch, side = SHAPES[network]
    own = BATCHES * batch
    images = torch.randint(256, (2 * own, 3, side, side), generator=torch.Generator().manual_seed(0)).byte()
    none = torch.arange(0)
    clients = {name: ClientIndex(torch.arange(s, s + own), none, none) for name, s in (("a", 0), ("b", own))}
    classes = tuple(map(str, range(10)))
    return Federation("noise", "classification", images, torch.arange(2 * own) % 10, classes, clients)


def rounds_of(network: str, method: tuple[str, str], device: torch.device) -> Callable[[], None]:
    """A function that plays a round."""
    algorithm, augmentation = method
    config = fedfa.load(
        {"source": "digit-sites", "network": network, "algorithm": algorithm, "augmentation": augmentation}
    )
    rule, mixing = config.build("algorithm"), config.build("augmentation")
    data = federation(network)
    model = make_network(config, data, rule, mixing).to(device)
    local = Local(batch_size=SHAPES[network][0], lr=1e-3, clip=1.0)
    memory = Memory(Path(tempfile.mkdtemp()))
    engine = Sequential(model, data, Classification(), rule, local, memory, 0, augmentation=mixing, device=device)
    plan = Plan(10**6, 0, ("a", "b"), evaluate_every=10**6)
    state = collect_shares(first_state(model, rule, 2).to(device), rule, engine, plan)

    def play() -> None:
        nonlocal state
        state, record = play_round(state, rule, engine, plan, Watcher())
        assert not record.refused
        if device.type == "cuda":
            torch.cuda.synchronize()

    return play


def peak(network: str, method: tuple[str, str], device: torch.device) -> float:
    """Bytes that a method's rounds take at most."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        play = rounds_of(network, method, device)
        play()
        torch.cuda.reset_peak_memory_stats()
        play()
        return torch.cuda.max_memory_allocated() - before
    words = [sys.executable, "-m", "benchmarks.methods", "--peak", network, *method]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def resident_peak(network: str, method: tuple[str, str]) -> int:
    """Growth of this process while it builds an engine and plays two rounds."""
    torch.ones(10, 10).sum().item()  # torch's own start is not the method's
    before = high_water()
    play = rounds_of(network, method, torch.device("cpu"))
    play()
    play()
    return high_water() - before


def high_water() -> int:
    """The largest resident size so far (Linux; `getrusage` would begin with the parent's)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def table(network: str, device: torch.device, repeats: int) -> None:
    batch, side = SHAPES[network]
    plays = {label(method): rounds_of(network, method, device) for method in METHODS}
    times = {"fedavg": 1.0, **ratios("fedavg", plays, repeats, warmup=2)}
    del plays
    sizes = {label(method): peak(network, method, device) for method in METHODS}
    print(f"\n{network}, 2 clients × {BATCHES} batches of {batch} at {side} px, {device}: a round over FedAvg's")
    print(f"{'':24}  time   memory (FedAvg {sizes['fedavg'] / 2**20:.0f} MiB)")
    for name, time in times.items():
        print(f"{name:24}{time:6.2f}   {sizes[name] / sizes['fedavg']:6.2f}")


def main(quick: bool = False) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    table("lenet", device, 5 if quick else 30)
    if device.type == "cuda":
        table("alexnet", device, 3 if quick else 15)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--peak", nargs=3, metavar=("NETWORK", "ALGORITHM", "AUGMENTATION"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        torch.set_num_threads(1)
        print(resident_peak(given.peak[0], (given.peak[1], given.peak[2])))
    else:
        main(given.quick)
