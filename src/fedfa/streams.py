"""Random streams, each named by what it is for.

A draw depends on the run's seed, the round, the client and the name of its stream, and on nothing else: not on
how many clients train at once, on the order they finish in, or on what other streams were asked for.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def derive(*path: int | str) -> int:
    """A 63-bit seed for the stream with this path, the same on every machine."""
    digest = hashlib.blake2b(json.dumps(path).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*path: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator at the start of the stream with this path."""
    return torch.Generator(device).manual_seed(derive(*path))


class DrawnFrom(TorchDispatchMode):
    """While it lasts, draws of this thread into tensors on the CPU that name no generator take this one. torch's own is
    the process's: what a network's initialisation takes from it, another run's thread may have set back meanwhile."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        draws = any(argument.name == "generator" for argument in func._schema.arguments)
        if draws and given.get("generator") is None and isinstance(args[0], Tensor) and args[0].device.type == "cpu":
            given["generator"] = self._generator
        return func(*args, **given)


class Streams:
    """The streams of one client in one round; calling it with a name gives that stream's generator."""

    def __init__(self, seed: int, round: int, client: str, device: torch.device | str = "cpu") -> None:
        self._path = (seed, round, client)
        self._device = device
        self._open: dict[str, torch.Generator] = {}

    def __call__(self, name: str) -> torch.Generator:
        """The stream for draws on the client's device: the same object each time, further along."""
        if name not in self._open:
            self._open[name] = generator(*self._path, name, device=self._device)
        return self._open[name]

    def move(self, round: int, client: str) -> None:
        """Become the streams of another round or client: the same generators, seeded anew."""
        self._path = (self._path[0], round, client)
        for name, opened in self._open.items():
            opened.manual_seed(self.seed(name))

    def opened(self) -> list[torch.Generator]:
        """The generators that were asked for so far."""
        return list(self._open.values())

    def host(self, name: str) -> torch.Generator:
        """A fresh generator on the CPU: for what is laid out on the host, such as the order of the data."""
        return generator(*self._path, name)

    def seed(self, name: str) -> int:
        return derive(*self._path, name)
