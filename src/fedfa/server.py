"""The server's side: one round, read from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm
from fedfa.data.federation import Split
from fedfa.engines.base import Engine, Refused, Score
from fedfa.engines.client import Broadcast
from fedfa.reduction import BadUpdate, Reduction, Report, Update, check
from fedfa.state import ServerState, entries, size_in_bytes
from fedfa.streams import generator


class Watcher:
    """Someone who is told how a run goes. Every method may be overridden; none needs to be."""

    def run_started(self, run: Any, round: int) -> None:
        """A :class:`fedfa.Run` begins, or goes on after the given round."""

    def noticed(self, line: str) -> None:
        """Something that whoever started the run should know."""

    def round_started(self, round: int, clients: Sequence[str]) -> None: ...

    def client_done(self, client: str, loss: Tensor | None, refused: str | None) -> None: ...

    def round_done(self, record: Record) -> None: ...


@dataclass(frozen=True)
class Plan:
    """Who takes part in a run, and when it is evaluated."""

    rounds: int
    seed: int
    clients: tuple[str, ...]
    """Clients that may train, in the order of their names."""
    held_out: tuple[str, ...] = ()
    """Clients that never train: the model is tested on them as on ones it has not seen."""
    participation: float = 1.0
    evaluate_every: int = 1
    evaluate_last: int = 1
    """The last rounds are all evaluated, this many."""

    @property
    def clients_a_round(self) -> int:
        """A share of all, at least one."""
        return min(max(1, int(self.participation * len(self.clients) + 0.5)), len(self.clients))

    def evaluates(self, round: int) -> bool:
        return round % self.evaluate_every == 0 or round > self.rounds - self.evaluate_last


@dataclass(frozen=True)
class Evaluation:
    """The global model on every client's split. Means are over clients, each counting the same."""

    clients: Mapping[str, Score]
    mean: float
    """Over the clients that take part in training."""
    unseen: float | None = None
    """Over the clients held out."""

    @property
    def gap(self) -> float | None:
        """The participation gap: seen minus unseen."""
        return None if self.unseen is None else self.mean - self.unseen


@dataclass(frozen=True)
class Record:
    """What is written down of a round."""

    round: int
    clients: Sequence[str]
    loss: float | None
    """Mean training loss over the round's clients; None where none sent an update."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Clients whose update was left out, and why."""
    bytes_down: int = 0
    """Sent to each client; what never changes is counted in the first round."""
    bytes_up: int = 0
    """Sent by each client."""
    val: Evaluation | None = None
    test: Evaluation | None = None

    def as_json(self) -> dict[str, Any]:
        """A line of `metrics.jsonl`."""
        line: dict[str, Any] = {
            "round": self.round,
            "clients": list(self.clients),
            "loss": self.loss,
            "refused": dict(self.refused),
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
        }
        for split, evaluation in (("val", self.val), ("test", self.test)):
            if evaluation is not None:
                line[split] = {
                    "mean": evaluation.mean,
                    "unseen": evaluation.unseen,
                    "gap": evaluation.gap,
                    "clients": {name: score.metric for name, score in evaluation.clients.items()},
                    "losses": {name: score.loss for name, score in evaluation.clients.items()},
                }
        finite: dict[str, Any] = _finite(line)
        return finite


def first_state(model: nn.Module, algorithm: Algorithm, population: int) -> ServerState:
    """The server's state before the first round."""
    tensors = model.state_dict()
    private = algorithm.private(model)
    shared = {name: tensors[name].detach().clone() for name in entries(model) if name not in private}
    return ServerState(0, population, shared, algorithm.start(model))


def collect_shares(
    server: ServerState, algorithm: Algorithm, engine: Engine, plan: Plan, watcher: Watcher | None = None
) -> ServerState:
    """Before the first round: what every client gives away once, if the algorithm asks for it. Clients that have
    nothing to give are passed over, bad shares are left out."""
    if not algorithm.shares:
        return server
    reduction = Reduction({})
    gathered: dict[str, list[Tensor]] = {}
    for name, share in engine.share(Broadcast(0, server.model, algorithm.broadcast(server)), plan.clients):
        if not (share.report.means or share.report.spreads or share.gathered):
            continue
        given = Report({**share.report.means, **share.gathered}, share.report.spreads)
        whole, report = Update(name, 1, {}, given), Update(name, 1, {}, share.report)
        reason = _refusal(check, whole, {}) or _refusal(reduction.add, report)
        if reason is not None and watcher is not None:
            watcher.noticed(f"what {name} shares is left out: {reason}")
        if reason is None:
            for key, tensor in share.gathered.items():
                gathered.setdefault(key, []).append(tensor)
    return algorithm.receive(server, reduction.result(), gathered) if reduction.clients else server


def play_round(
    server: ServerState, algorithm: Algorithm, engine: Engine, plan: Plan, watcher: Watcher
) -> tuple[ServerState, Record]:
    """One round: sample, broadcast, train, reduce, aggregate, evaluate, record."""
    round = server.round + 1
    chosen = sample_clients(plan, round)
    watcher.round_started(round, chosen)
    broadcast = Broadcast(round, server.model, algorithm.broadcast(server), algorithm.expected(server))
    reduction = Reduction(server.model, server.centres, broadcast.expected)
    losses: dict[str, Tensor] = {}
    refused: dict[str, str] = {}
    bytes_up = 0
    for update in engine.train(broadcast, chosen):
        reason = update.reason if isinstance(update, Refused) else _refusal(reduction.add, update)
        if reason is not None:
            refused[update.client] = reason
        elif isinstance(update, Update):
            losses[update.client] = update.loss if update.loss is not None else torch.zeros(())
            bytes_up = max(bytes_up, _bytes_of(update))
        watcher.client_done(update.client, losses.get(update.client), reason)
    if reduction.clients:
        reduced = reduction.result()
        server = algorithm.aggregate(server, reduced)
        server = replace(server, centres={name: across.mean for name, across in reduced.spreads.items()})
    server = replace(server, round=round)
    sent = {name: t for name, t in broadcast.extras.items() if round == 1 or name not in algorithm.constants}
    record = Record(
        round=round,
        clients=chosen,
        loss=_mean_loss([losses[name] for name in chosen if name in losses]),
        refused=refused,
        bytes_down=size_in_bytes(broadcast.model) + size_in_bytes(sent),
        bytes_up=bytes_up,
    )
    if plan.evaluates(round):
        found = evaluate(server, algorithm, engine, plan)
        record = replace(record, val=found.get("val"), test=found.get("test"))
    watcher.round_done(record)
    return server, record


def sample_clients(plan: Plan, round: int) -> list[str]:
    """The round's clients: a share of all, at least one, drawn without replacement."""
    count = plan.clients_a_round
    if count >= len(plan.clients):
        return list(plan.clients)
    drawn = torch.randperm(len(plan.clients), generator=generator(plan.seed, round, "clients"))[:count]
    return [plan.clients[number] for number in sorted(drawn.tolist())]


def evaluate(server: ServerState, algorithm: Algorithm, engine: Engine, plan: Plan) -> dict[Split, Evaluation]:
    """The global model on every client's validation and test split."""
    broadcast = Broadcast(server.round, server.model, algorithm.broadcast(server))
    found: dict[Split, Evaluation] = {}
    splits: tuple[Split, ...] = ("val", "test")
    for split in splits:
        scores = engine.evaluate(broadcast, (*plan.clients, *plan.held_out), split)
        seen = [scores[name].metric for name in plan.clients if name in scores]
        unseen = [scores[name].metric for name in plan.held_out if name in scores]
        if seen:
            found[split] = Evaluation(scores, _mean(seen), _mean(unseen) if unseen else None)
    return found


def _refusal(take: Callable[..., None], *given: Any) -> str | None:
    """Take an update; the reason if it must not be."""
    try:
        take(*given)
    except BadUpdate as bad:
        return str(bad)
    return None


def _mean_loss(losses: Sequence[Tensor]) -> float | None:
    """Over clients, in the order of their names: a mean of floats depends on its order, and a result must not on who
    was first. An engine may have some of them on the host, others not."""
    return float(torch.stack([loss.to(losses[0].device) for loss in losses]).mean()) if losses else None


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _bytes_of(update: Update) -> int:
    report = update.report
    values = {name: value for name, (value, _) in report.spreads.items()}
    return size_in_bytes(update.model) + size_in_bytes(report.means) + size_in_bytes(values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
