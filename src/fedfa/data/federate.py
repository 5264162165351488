"""From what a source reads to a federation: who has which samples, and what they are used for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedfa.data.federation import ClientIndex, Federation
from fedfa.data.partition import Natural, Partition
from fedfa.data.pool import Pool
from fedfa.data.splitfile import read_splits
from fedfa.data.splits import Shares, Splits, classes_of, reduce, split
from fedfa.errors import UserError, some
from fedfa.registries import Reader, Source


def federate(source: Source | Reader, partition: Partition, splits: Splits, seed: int) -> Federation:
    """The federation of an experiment: the source's samples, divided among clients and into splits."""
    if not isinstance(source, Reader):
        seed = seed if splits.seed is None else splits.seed
        return _divided_already(source.build(seed), partition, splits, seed)
    pool = source.pool()
    clients = divide(pool, partition, splits, seed, source)
    return Federation(pool.name, pool.task, pool.images, pool.labels, pool.classes, clients, notes_of(pool))


def divide(
    pool: Pool, partition: Partition, splits: Splits, seed: int, source: Reader | None = None
) -> dict[str, ClientIndex]:
    """Every client's training, validation and test samples, in the shares that `splits` asks for, or else in the
    source's own."""
    fatal = [problem for problem in pool.problems if problem.fatal]
    if fatal:
        more = f" (and {len(fatal) - 1} more: fedfa data check says which)" if len(fatal) > 1 else ""
        raise UserError(": ".join(part for part in (pool.name, fatal[0].file, fatal[0].what) if part) + more)
    seed = seed if splits.seed is None else splits.seed
    if splits.file:
        if partition != Natural():
            raise UserError(f"split.file says whose each sample is: leave {_spelled(partition)} out")
        clients = read_splits(splits.file, pool)
    else:
        seen = _as_asked(pool, splits)
        shares = splits.shares(getattr(source, "shares", Shares()))
        clients = split(seen, partition.divide(seen, seed), shares, seed, splits.stratify)
    _check(pool.name, clients)
    return reduce(clients, splits, classes_of(pool), seed)


def notes_of(pool: Pool) -> tuple[str, ...]:
    """What a run should say of its data: that sites are absent or files were left out, if some were."""
    notes = [f"{pool.name}: {problem.what}" for problem in pool.problems if problem.absent]
    left_out = [problem for problem in pool.problems if problem.left_out]
    if left_out:
        first = f"{left_out[0].file}: {left_out[0].what}"
        many = f"{len(left_out)} files or folders were left out"
        notes.append(f"{pool.name}: {many} ({first}); fedfa data check says which")
    return tuple(notes)


def _as_asked(pool: Pool, splits: Splits) -> Pool:
    """The pool without its groups or its own split, where those are not to count."""
    if splits.by == "sample":
        pool = replace(pool, groups=range(len(pool)))
    return pool if splits.given else replace(pool, given=[""] * len(pool))


def _check(name: str, clients: dict[str, ClientIndex]) -> None:
    idle = [client for client, index in clients.items() if not len(index.train)]
    if idle:
        raise UserError(
            f"{name}: {some(idle)} would have nothing to train on; divide the data anew with split.given=false, "
            "or leave small clients out with partition.smallest"
        )
    if not any(len(index.test) for index in clients.values()):
        raise UserError(f"{name}: no client has anything to test on: raise split.test")


def _divided_already(federation: Federation, partition: Partition, splits: Splits, seed: int) -> Federation:
    """An embedded federation, which comes with clients and splits; of those only a fraction can be asked for."""
    asked = [f"split.{key}" for key in (*splits.drawn(), *(["file"] if splits.file else []))]
    if partition != Natural():
        asked.insert(0, _spelled(partition))
    if asked:
        raise UserError(f"{federation.name} comes divided into clients and splits: leave {', '.join(asked)} out")
    labels = np.asarray(federation.labels) if federation.task == "classification" else None
    return replace(federation, clients=reduce(dict(federation.clients), splits, labels, seed))


def _spelled(partition: Partition) -> str:
    """How a partition is asked for."""
    if isinstance(partition, Natural):
        return "partition.clients and partition.smallest"
    return f"partition={type(partition).__name__.lower()}"
