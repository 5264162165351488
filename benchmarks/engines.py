"""The captured engine against the eager loop, on one GPU: whole rounds without evaluation, interleaved in one run.

    python -m benchmarks.engines [CASE ...]

The eager loop is our sequential engine: the same networks, layers, batches and sums, one client after another.
`released` is the same loop with the arithmetic of the authors' FFA layer, written from what is known of their code.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import fedfa
from benchmarks.measure import ratios
from fedfa import ClientIndex, Federation
from fedfa.cuda_streams import borrowed_streams
from fedfa.data.transforms import Flip, Rotate, Transforms
from fedfa.engines.captured import Captured
from fedfa.engines.client import Local
from fedfa.engines.sequential import Sequential
from fedfa.layers.convolution import convolve
from fedfa.memory import Memory
from fedfa.nets import AlexNet, LeNet, ResNet18, resnet
from fedfa.precision import Precision, arithmetic
from fedfa.server import Plan, Watcher, collect_shares, evaluate, first_state, play_round
from fedfa.state import ServerState
from fedfa.task import Classification


class Released(nn.Module):
    """The authors' layer: gate from Python's generator, unbiased variances, γ by a Python sum over channels."""

    def __init__(self, channels: int, p: float = 0.5) -> None:
        super().__init__()
        self.channels, self.p, self.alpha, self.eps = channels, p, 0.99, 1e-6
        for name, start in (("mean", 0.0), ("std", 1.0), ("mean_spread", 1.0), ("std_spread", 1.0)):
            self.register_buffer(name, torch.full((channels,), start))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or random.random() > self.p:
            return x
        mean, std = x.mean((2, 3)), (x.var((2, 3)) + self.eps).sqrt()
        with torch.no_grad():
            for running, now in ((self.mean, mean), (self.std, std)):
                running.mul_(self.alpha).add_(now.mean(0), alpha=1 - self.alpha)
        new = []
        for value, spread in ((mean, self.mean_spread), (std, self.std_spread)):
            weight = 1 / (1 + 1 / (spread + self.eps))
            gamma = self.channels * weight / sum(weight)  # type: ignore[arg-type]  # as they have it
            width = ((gamma + 1) * (value.var(0) + self.eps)).sqrt()
            new.append(value + torch.randn_like(value) * width)
        normal = (x - mean[:, :, None, None]) / std[:, :, None, None]
        return normal * new[1][:, :, None, None] + new[0][:, :, None, None]


class TwoConvolutions(nn.Module):
    """pfl-research's network for its CIFAR-10 benchmark: two convolutions, two fully connected layers."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, num_classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def federation(clients: int, samples: int, side: int) -> Federation:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (samples * min(clients, 20), 3, side, side), generator=draw, dtype=torch.uint8)
    none = torch.arange(0)
    index = {
        f"{number:04d}": ClientIndex(torch.arange(samples) + samples * (number % 20), none, none)
        for number in range(clients)
    }
    labels = torch.randint(10, (len(images),), generator=draw)
    return Federation("noise", "classification", images, labels, tuple(map(str, range(10))), index)


def rounds(
    kind: type[Sequential],
    model: nn.Module,
    data: Federation,
    batch: int,
    precision: Precision,
    algorithm: str = "fedavg",
    participation: float = 1.0,
    evaluated: bool = False,
    drop_last: bool = False,
    lr: float = 0.01,
    **own: Any,
) -> Callable[[], ServerState]:
    """A function that plays a round, waits for it, and returns the server's state."""
    rule = fedfa.ALGORITHMS[algorithm]()
    memory = Memory(Path(tempfile.mkdtemp()))
    local = Local(batch_size=batch, lr=lr, drop_last=drop_last)
    engine = kind(model, data, Classification(), rule, local, memory, 0, device="cuda", precision=precision, **own)
    plan = Plan(10**6, 0, tuple(data.clients), participation=participation, evaluate_every=10**6)
    state = collect_shares(first_state(model, rule, len(data.clients)).to("cuda"), rule, engine, plan)

    def play() -> ServerState:
        nonlocal state
        with arithmetic(precision):
            state, record = play_round(state, rule, engine, plan, Watcher())
            if evaluated:
                evaluate(state, rule, engine, plan)
        assert not record.refused
        torch.cuda.current_stream().synchronize()
        return state

    return play


def against(
    title: str,
    must: str,
    network: Callable[..., nn.Module],
    clients: int,
    batch: int,
    side: int,
    precision: Precision,
    steps: int,
    layer: Callable[[int], nn.Module] | None = None,
    participation: float = 1.0,
    repeats: int = 5,
    **loops: Callable[[int], nn.Module] | None,
) -> None:
    """Print how many times as fast a round is captured as it is in each of the loops."""
    data = federation(clients, steps * batch, side)

    def made(augment: Callable[[int], nn.Module] | None) -> nn.Module:
        torch.manual_seed(0)
        return network(10) if augment is None else network(10, augment=augment)

    def with_(kind: type[Sequential], augment: Callable[[int], nn.Module] | None) -> Callable[[], ServerState]:
        return rounds(kind, made(augment), data, batch, precision, participation=participation)

    variants = {"captured": with_(Captured, layer)}
    variants |= {name: with_(Sequential, augment) for name, augment in {"eager": layer, **loops}.items()}
    for _ in range(3):
        variants["captured"]()
    found = ratios("captured", variants, repeats, warmup=1)
    text = ", ".join(f"{ratio:.1f} x {name}" for name, ratio in found.items())
    print(f"{title}, {precision}: {text}  (must {must})", flush=True)
    torch.cuda.empty_cache()


def ffa_cost(precision: Precision) -> None:
    """What FFA adds to a captured round of AlexNet."""
    data = federation(4, 20 * 32, 256)
    variants = {}
    for name, layer in (("without", None), ("with", fedfa.FFA)):
        torch.manual_seed(0)
        variants[name] = rounds(Captured, AlexNet(10, augment=layer), data, 32, precision)
    for play in variants.values():
        play()
    ratio = ratios("without", variants, 24, warmup=2)["with"]
    print(f"FFA adds to a captured round, AlexNet 4 x 32, {precision}: {ratio - 1:+.1%}  (must +8 %)", flush=True)


def transforms_cost() -> None:
    """What flips and rotations add to a captured round of AlexNet, by our kernels and by torch's operations."""
    data, turned = federation(4, 20 * 32, 256), Transforms((Flip(), Rotate()))
    variants = {}
    for name in ("without", "kernels", "torch"):
        torch.manual_seed(0)
        own = None if name == "without" else turned
        variants[name] = rounds(Captured, AlexNet(10), data, 32, "bf16", transforms=own)
        with mock.patch("fedfa.data.transforms.kernels", return_value=None) if name == "torch" else nullcontext():
            for _ in range(2):  # in which steps are captured
                variants[name]()
    found = ratios("without", variants, 24)
    text = f"{found['kernels'] - 1:+.1%} by kernels, {found['torch'] - 1:+.1%} by torch's operations"
    print(f"flip and rotation add to a captured round, AlexNet 4 x 32, bf16: {text}", flush=True)


def over_ours(told: str, changed: Callable[[], Any]) -> None:
    """Captured rounds in bfloat16 whose steps were captured under a change, over those without it."""
    cases: tuple[tuple[Callable[..., nn.Module], int, int, int], ...] = ((ResNet18, 10, 10, 32), (AlexNet, 4, 32, 256))
    for network, clients, batch, side in cases:
        data, variants = federation(clients, 20 * batch, side), {}
        for name, context in (("ours", nullcontext()), (told, changed())):
            torch.manual_seed(0)
            variants[name] = rounds(Captured, network(10, augment=fedfa.FFA), data, batch, "bf16")
            with context:
                for _ in range(3):  # in which steps are captured
                    variants[name]()
        ratio = ratios("ours", variants, 24)[told]
        title = f"{network.__name__} with FFA, {clients} x {batch}, bf16"
        print(f"a captured round with {told}, over ours, {title}: {ratio:.3f}", flush=True)


def rounding_cost() -> None:
    """What rounding all weights together gains over autocast's way."""
    over_ours(
        "weights rounded one by one", lambda: mock.patch("fedfa.precision._rounded_weights", return_value=nullcontext())
    )


def sums_cost() -> None:
    """What it gains that a program sums over several tiles of rows in batch normalisation."""
    over_ours("a program for each tile of sums", lambda: mock.patch("fedfa.layers.normalisation_triton.TILES", 1))


def parts() -> None:
    """What ten lanes of ResNet-18 would gain if a part of the step took no time: captured rounds without it, over whole
    ones. Nothing is learnt, since without normalisation weights would go astray."""

    def plain(conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor, relu: nn.ReLU | None = None) -> Tensor:
        return convolve(conv, x)

    def straight(block: resnet.BasicBlock, x: Tensor) -> Tensor:
        return resnet.normalised(block.conv2, block.bn2, resnet.normalised(block.conv1, block.bn1, x, block.relu))

    without: dict[str, Any] = {
        "whole": nullcontext(),
        "without normalisation": mock.patch.object(resnet, "normalised", plain),
        "without shortcuts": mock.patch.object(resnet.BasicBlock, "forward", straight),
        "without the optimiser": mock.patch.object(torch.optim.SGD, "step", return_value=None),
    }
    data, variants = federation(10, 400, 32), {}
    for name, changed in without.items():
        torch.manual_seed(0)
        with changed:
            variants[name] = rounds(Captured, ResNet18(10), data, 10, "bf16", lr=0.0)
            for _ in range(3):  # in which steps are captured
                variants[name]()
    for name, ratio in ratios("whole", variants, 8).items():
        print(f"a captured round of ResNet-18, 10 x 10, bf16, {name}: {ratio:.3f} of a whole one", flush=True)


def uneven(runs: int = 6, first: int = 15, later: int = 15) -> None:
    """Rounds a second of some runs side by side on a federation of CIFAR-10's shape: a hundred clients, ten a round,
    with last batches of all sizes, most of which are captured in the first rounds."""
    shares = np.random.default_rng(0).dirichlet(np.full(100, 0.6), 10).sum(0)
    sizes = [max(10, round(4500 * share)) for share in shares]
    total = sum(sizes)
    images = torch.randint(256, (total, 3, 32, 32), dtype=torch.uint8)
    clients = {
        f"{number:02d}": ClientIndex(own, own[:0], own[:0])
        for number, own in enumerate(torch.arange(total).split(sizes))
    }
    data = Federation("uneven", "classification", images, torch.arange(total) % 10, tuple("abcdefghij"), clients)
    plays = []
    for seed in range(runs):
        torch.manual_seed(seed)
        plays.append(rounds(Captured, ResNet18(10, augment=fedfa.FFA), data, 10, "bf16", "fedfa", participation=0.1))
    speeds = [runs * count / side_by_side(plays, count) for count in (first, later)]
    print(
        f"FedFA, ResNet-18, 100 clients of 10 to {max(sizes)} images, 10 a round, batch 10, bf16, {runs} at once: "
        f"{speeds[0]:.1f} rounds a second in the first {first} rounds, {speeds[1]:.1f} in the next {later}",
        flush=True,
    )


def algorithms() -> None:
    """What a captured round of AlexNet takes by algorithm, over FedAvg's."""
    data = federation(4, 20 * 32, 256)
    variants = {}
    for name in ("fedavg", "fedsam", "fedrobust", "fedmix", "fedbn"):
        torch.manual_seed(0)
        variants[name] = rounds(Captured, AlexNet(10), data, 32, "bf16", algorithm=name)
        for _ in range(2):
            variants[name]()
    found = ratios("fedavg", variants, 8)
    text = ", ".join(f"{name} {ratio:.1f}" for name, ratio in found.items() if name != "fedavg")
    print(f"a captured round over FedAvg's, AlexNet 4 x 32, bf16: {text}", flush=True)


def side_by_side(plays: Sequence[Callable[[], ServerState]], times: int) -> float:
    """Seconds until each has played so many rounds, a thread each."""

    def several(play: Callable[[], ServerState]) -> None:
        with borrowed_streams(1, torch.device("cuda", 0)) as (own,), torch.cuda.stream(own):
            for _ in range(times):
                play()

    start = time.perf_counter()
    with ThreadPoolExecutor(len(plays)) as threads:
        list(threads.map(several, plays))
    return time.perf_counter() - start


def office_sizes() -> Federation:
    """Noise with Office-Caltech 10's sizes."""
    sizes = {"amazon": (459, 307, 192), "caltech": (538, 360, 225), "dslr": (75, 50, 32), "webcam": (141, 95, 59)}
    total = sum(sum(parts) for parts in sizes.values())
    images = torch.randint(256, (total, 3, 256, 256), dtype=torch.uint8)
    clients, first = {}, 0
    for name, parts in sizes.items():
        clients[name] = ClientIndex(*(torch.arange(first, first + sum(parts))).split(list(parts)))
        first += sum(parts)
    return Federation("office", "classification", images, torch.arange(total) % 10, tuple("abcdefghij"), clients)


def office(runs: int, must: str, count: int = 30) -> None:
    """Seconds that 400 rounds of FedFA take for each of some runs side by side on a federation of Office-Caltech 10's
    sizes, evaluated every round; the last incomplete batch is dropped, as in that experiment."""
    data = office_sizes()

    def play(seed: int) -> Callable[[], ServerState]:
        torch.manual_seed(seed)
        model = AlexNet(10, augment=fedfa.FFA)
        return rounds(Captured, model, data, 32, "bf16", algorithm="fedfa", evaluated=True, drop_last=True)

    plays = [play(seed) for seed in range(runs)]

    first, each = side_by_side(plays, 10), side_by_side(plays, count) / count
    whole = (first + 390 * each) / runs
    print(
        f"FedFA, AlexNet, Office's sizes, evaluated every round, bf16, {runs} at once: {whole:.1f} s "
        f"a run for 400 rounds (first ten rounds {first:.1f} s, then {1000 * each / runs:.1f} ms, timed over {count}; "
        f"must {must})",
        flush=True,
    )
    torch.cuda.empty_cache()


def memory() -> None:
    """The most memory that rounds take, by lanes and by clients."""
    found = {}
    for clients, lanes in ((10, 1), (10, 5), (10, 10), (100, 10), (1000, 10)):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        play = rounds(Captured, ResNet18(10), federation(clients, 20, 32), 10, "tf32", lanes=lanes)
        for _ in range(3):
            play()
        del play
        found[clients, lanes] = (torch.cuda.max_memory_allocated() - before) / 2**20
    text = ", ".join(f"{clients} clients in {lanes} lanes {used:.0f} MB" for (clients, lanes), used in found.items())
    print(f"ResNet-18, memory: {text}  (grows with lanes, not with clients)", flush=True)


def repeats() -> None:
    """Whether a few rounds give the same bits again."""
    cases: tuple[tuple[Callable[..., nn.Module], int, int, Precision], ...] = (
        (LeNet, 28, 10, "tf32"),
        (ResNet18, 32, 10, "tf32"),
        (AlexNet, 256, 32, "bf16"),
    )
    for network, side, batch, precision in cases:
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            model = network(10, augment=fedfa.FFA)
            play = rounds(Captured, model, federation(4, 8 * batch, side), batch, precision, algorithm="fedfa")
            found.append([play() for _ in range(5)][-1].model)
        same = all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
        how = "the same to the bit" if same else "NOT the same bits"
        print(f"{network.__name__} with FFA, {precision}, five rounds of four clients, twice: {how}", flush=True)


def small(network: Callable[..., nn.Module], side: int, precision: Precision, must: str) -> None:
    title = f"{network.__name__} with FFA, 10 x 10 at {side} px, 20 steps"
    against(title, must, network, 10, 10, side, precision, 20, fedfa.FFA)


CASES: dict[str, Callable[[], None]] = {
    "lenet": lambda: small(LeNet, 28, "tf32", "40"),
    "resnet": lambda: small(ResNet18, 32, "tf32", "12"),
    "resnet-bf16": lambda: small(ResNet18, 32, "bf16", "18"),
    "alexnet": lambda: against(
        "AlexNet with FFA, 4 x 32 at 256 px, 20 steps", "6 eager, 10 released", AlexNet, 4, 32, 256, "bf16", 20,
        fedfa.FFA, released=Released, repeats=3,
    ),
    "ffa": lambda: ffa_cost("bf16"),
    "ffa-tf32": lambda: ffa_cost("tf32"),
    "transforms": transforms_cost,
    "rounding": rounding_cost,
    "parts": parts,
    "sums": sums_cost,
    "uneven": uneven,
    "algorithms": algorithms,
    "office": lambda: office(1, "30 s"),
    "office-seeds": lambda: office(5, "20 s"),
    "memory": memory,
    "repeats": repeats,
    "pfl": lambda: against(
        "1,000 clients of 50 images, 50 a round, batch 10, two-conv CNN", "20",
        TwoConvolutions, 1000, 10, 32, "tf32", 5, participation=0.05,
    ),
}  # fmt: skip


def main(names: list[str]) -> None:
    if not torch.cuda.is_available():
        print("benchmarks.engines needs a CUDA device")
        return
    for name in names or CASES:
        CASES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
