"""A site's log of everything that left it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfa.flower.wire import Reply


class Audit:
    """`audit.jsonl` in a site's folder: a line for every reply, on the disk before the reply is sent."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "audit.jsonl"

    def write(self, reply: Reply) -> None:
        head = reply.head.model_dump(mode="json", exclude_defaults=True, exclude={"kind", "run", "round", "site"})
        line = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "run": reply.head.run,
            "round": reply.head.round,
            "kind": reply.head.kind,
            "numbers": head,
            "tensors": [describe(name, tensor) for name, tensor in reply.tensors.items()],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(opened, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> Iterator[dict[str, Any]]:
        if self.path.exists():
            with open(self.path) as file:
                yield from map(json.loads, file)


def describe(name: str, tensor: Tensor) -> dict[str, Any]:
    """A tensor as the log has it; the hash shows later that a tensor at hand is the one that left."""
    plain = tensor.detach().cpu().contiguous()
    return {
        "name": name,
        "type": str(plain.dtype).removeprefix("torch."),
        "shape": list(plain.shape),
        "bytes": plain.nbytes,
        "sha256": hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
    }


def table(lines: Iterable[dict[str, Any]]) -> list[str]:
    """What a log holds, tensor by tensor, as lines to read."""
    from fedfa.data.check import table

    text: list[str] = []
    for line in lines:
        numbers = ", ".join(f"{key} {_short(value)}" for key, value in _flat(line["numbers"]))
        text.append(f"{line['kind']}, round {line['round']}: {numbers or 'no numbers'}")
        rows = [
            [t["name"], t["type"], "×".join(map(str, t["shape"])) or "1", f"{t['bytes']:,}"] for t in line["tensors"]
        ]
        if rows:
            total = sum(t["bytes"] for t in line["tensors"])
            text += [f"  {row}" for row in table([["tensor", "type", "shape", "bytes"], *rows], left=3)]
            text.append(f"  {len(rows)} tensors, {total:,} bytes")
    return text


def _flat(numbers: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in numbers.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
