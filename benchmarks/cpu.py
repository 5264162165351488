"""What the engine and the layer cost on a CPU.

1. A round of the sequential engine against a hand-written PyTorch loop that does the same work: the same batches,
   steps, average and evaluation, and nothing else.
2. A round of SCAFFOLD whose clients' variates wait in memory for the next checkpoint against one that writes a file for
   each of them.
3. A training step with FFA layers against one without.
4. Two runs of the sequential engine on two cores, one after another with one thread or with two, or side by side as
   two processes with one thread each (`python -m benchmarks.cpu`: this part alone).
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from operator import truediv
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fedfa
from benchmarks.measure import interleaved, ratios
from fedfa.data.federation import ClientIndex, Federation, TaskName
from fedfa.data.sources.digit_sites import DigitSites
from fedfa.engines.client import Local
from fedfa.engines.sequential import Sequential
from fedfa.layers import augment_reference
from fedfa.layers import ffa as ffa_module
from fedfa.layers.ffa import FFA
from fedfa.layers.randomness import Draws
from fedfa.memory import ROOM, Memory
from fedfa.nets import AlexNet, LeNet, ResNet18, UNet
from fedfa.server import Plan, Watcher, first_state, play_round
from fedfa.task import Classification, Segmentation, Task

ROUND_LIMIT, LAYER_LIMIT = 1.05, 0.15


def rounds(repeats: int = 40) -> float:
    """Seconds of an engine round over seconds of the same round by hand."""
    federation = DigitSites().build(0)
    clients = tuple(sorted(federation.clients))
    lr, size = 0.1, 32
    torch.manual_seed(0)
    model = LeNet(10)
    by_hand = LeNet(10)
    by_hand.load_state_dict(model.state_dict())
    algorithm = fedfa.ALGORITHMS["fedavg"]()
    memory = Memory(Path(tempfile.mkdtemp()))
    engine = Sequential(model, federation, Classification(), algorithm, Local(batch_size=size, lr=lr), memory, 0)
    plan = Plan(10**6, 0, clients)
    state = first_state(model, algorithm, len(clients))

    def ours() -> None:
        nonlocal state
        state, _ = play_round(state, algorithm, engine, plan, Watcher())

    server = {name: tensor.clone() for name, tensor in by_hand.state_dict().items()}

    def hand_written() -> None:
        nonlocal server
        total = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
        for name in clients:
            by_hand.load_state_dict(server)
            by_hand.train()
            optimizer = torch.optim.SGD(by_hand.parameters(), lr)
            index = federation.clients[name].train
            for part in index[torch.randperm(len(index))].split(size):
                x, y = federation.images[part].float() / 255, federation.labels[part].long()
                optimizer.zero_grad()
                F.cross_entropy(by_hand(x), y).backward()
                optimizer.step()
            for key, tensor in by_hand.state_dict().items():
                total[key] += tensor / len(clients)
        server = total
        by_hand.load_state_dict(server)
        by_hand.eval()
        with torch.no_grad():
            for split in ("val", "test"):
                for name in clients:
                    for part in federation.clients[name].of(split).split(256):
                        x, y = federation.images[part].float() / 255, federation.labels[part].long()
                        output = by_hand(x)
                        (output.argmax(1) == y).sum().item()
                        F.cross_entropy(output, y).item()

    return ratios("by hand", {"ours": ours, "by hand": hand_written}, repeats)["ours"]


def keeping(repeats: int = 40) -> float:
    """Seconds of a SCAFFOLD round over those of one that writes what each client keeps to the disk, with a tenth of the
    images."""
    whole = DigitSites().build(0)
    clients = {name: replace(index, train=index.train[::10]) for name, index in whole.clients.items()}
    federation = replace(whole, clients=clients)
    plan = Plan(10**6, 0, tuple(sorted(clients)), evaluate_every=10**6)

    def player(folder: Path, room: int) -> Callable[[], None]:
        torch.manual_seed(0)
        model, algorithm = LeNet(10), fedfa.ALGORITHMS["scaffold"]()
        memory = Memory(folder, room)
        engine = Sequential(model, federation, Classification(), algorithm, Local(lr=0.1), memory, 0)
        state = first_state(model, algorithm, len(clients))

        def play() -> None:
            nonlocal state
            state, _ = play_round(state, algorithm, engine, plan, Watcher())

        return play

    with tempfile.TemporaryDirectory() as folder:
        variants = {"waiting": player(Path(folder, "a"), ROOM), "written": player(Path(folder, "b"), 0)}
        return ratios("written", variants, repeats)["waiting"]


def layer_cost(network: Callable[..., nn.Module], batch: int, pixels: int, repeats: int) -> dict[str, float]:
    """What FFA adds to a training step, as a share of the step: ours, and with plain autograd. Its gates are random,
    so a step's cost is an expectation: small networks are timed ten steps at a time."""
    x = torch.rand(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))
    y = torch.arange(batch) % 10
    generator = torch.Generator().manual_seed(0)

    def step_of(augment: Callable[[int], nn.Module] | None, function: Callable[..., object]) -> Callable[[], None]:
        torch.manual_seed(0)
        model = network(10, augment=augment)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        draws = Draws(model)

        def step() -> None:
            ffa_module.augment = function  # type: ignore[assignment]  # one function in the other's place
            for _ in range(10 if network is LeNet else 1):
                draws.sample(batch, lambda _: generator)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return step

    ours = ffa_module.augment
    try:
        found = ratios(
            "without",
            {
                "without": step_of(None, ours),
                "FFA": step_of(FFA, ours),
                "FFA, plain autograd": step_of(FFA, augment_reference),
            },
            repeats,
        )
    finally:
        ffa_module.augment = ours
    return {name: ratio - 1 for name, ratio in found.items()}


CASES: dict[str, tuple[Callable[..., nn.Module], int, int, int]] = {
    "LeNet, 32 × 28 px": (LeNet, 32, 28, 10),
    "LeNet, 128 × 28 px": (LeNet, 128, 28, 4),
    "ResNet-18, 10 × 32 px": (ResNet18, 10, 32, 1),
    "U-Net, 16 × 64 px": (UNet, 16, 64, 1),
    "AlexNet, 32 × 256 px": (AlexNet, 32, 256, 1),
}
"""Network, batch size, side, and the steps of a round."""


def serve(case: str, threads: int, orders: Connection) -> None:
    """A process that plays as many rounds as it is told to."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    network, batch, side, steps = CASES[case]
    segments, count = network is UNet, batch * steps
    images = torch.randint(256, (count, 3, side, side), dtype=torch.uint8)
    labels = torch.randint(10, (count, side, side) if segments else (count,))
    clients = {"a": ClientIndex(torch.arange(count), torch.arange(0), torch.arange(0))}
    kind: TaskName = "segmentation" if segments else "classification"
    data = Federation("noise", kind, images, labels, tuple("0123456789"), clients)
    task: Task = Segmentation() if segments else Classification()
    model, algorithm = network(10), fedfa.ALGORITHMS["fedavg"]()
    with tempfile.TemporaryDirectory() as folder:
        engine = Sequential(model, data, task, algorithm, Local(batch_size=batch), Memory(Path(folder)), 0)
        state = first_state(model, algorithm, 1)
        plan = Plan(10**6, 0, ("a",), evaluate_every=10**6)
        while rounds := orders.recv():
            for _ in range(rounds):
                state, _ = play_round(state, algorithm, engine, plan, Watcher())
            orders.send(True)


def two_runs(case: str, repeats: int) -> dict[str, tuple[float, float]]:
    """The time that a round of each of two runs takes, over that of one after another with one thread: in the median,
    and as the quickest over the quickest, which is nearest to what a machine with nothing else to do would give."""
    spawn = multiprocessing.get_context("spawn")
    workers = []
    for number in (1, 1, 2):
        here, there = spawn.Pipe()
        spawn.Process(target=serve, args=(case, number, there), daemon=True).start()
        workers.append(here)
    one, other, both = workers

    def play(*orders: tuple[Connection, int]) -> Callable[[], None]:
        def together() -> None:
            for worker, rounds in orders:
                worker.send(rounds)
            for worker, _ in orders:
                worker.recv()

        return together

    variants = {
        "1 thread": play((one, 2)),
        "2 threads": play((both, 2)),
        "2 processes": play((one, 1), (other, 1)),
    }
    times = interleaved(variants, repeats, warmup=2)
    for worker in workers:
        worker.send(0)
    base = times.pop("1 thread")
    return {
        name: (statistics.median(map(truediv, found, base)), min(found) / min(base)) for name, found in times.items()
    }


def thread_table(quick: bool = False) -> None:
    for case in CASES:
        found = two_runs(case, 5 if quick else 25)
        text = ", ".join(f"{name} {middle:.2f} (quickest {best:.2f})" for name, (middle, best) in found.items())
        load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
        print(f"two runs, time over one after another with 1 thread, {case}: {text}  ({load})", flush=True)


def main(quick: bool = False) -> bool:
    """Print the table; true if every limit is kept."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads available\n")
    kept = True
    for threads in (1, 2):
        torch.set_num_threads(threads)
        ratio = rounds(10 if quick else 60)
        kept &= ratio <= ROUND_LIMIT
        print(f"sequential round / hand-written round, LeNet, {threads} thread(s): {ratio:.3f}  (limit {ROUND_LIMIT})")
    torch.set_num_threads(1)
    print(f"SCAFFOLD round / one that writes a file a client, LeNet, 1 thread: {keeping(10 if quick else 60):.2f}")
    cases = [("LeNet, 32 × 28 px", LeNet, 32, 28, 60), ("LeNet, 64 × 28 px", LeNet, 64, 28, 40)]
    cases += [("AlexNet, 32 × 256 px", AlexNet, 32, 256, 8)]
    for name, network, batch, pixels, repeats in cases:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cost = layer_cost(network, batch, pixels, max(repeats // (4 if quick else 1), 3))
            text = ", ".join(f"{variant} {share:+.1%}" for variant, share in cost.items())
            print(f"added to a step by FFA (p = 0.5), {name}, {threads} thread(s): {text}  (limit {LAYER_LIMIT:+.0%})")
    thread_table(quick)
    return kept


if __name__ == "__main__":
    thread_table()
