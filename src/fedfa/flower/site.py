"""A site: its own data, its private state on its own disk, and its answers to the server."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfa.data.federation import Federation, Split
from fedfa.engines.base import Engine, Refused
from fedfa.engines.client import Broadcast
from fedfa.errors import UserError
from fedfa.experiment import Experiment
from fedfa.files import beside, write_text
from fedfa.flower.audit import Audit
from fedfa.flower.parcel import MOST_BYTES, Malformed, Parcel
from fedfa.flower.settings import SiteSettings
from fedfa.flower.wire import (
    Facts,
    Metrics,
    Reply,
    ReplyHead,
    Request,
    share_tensors,
    unpack,
    update_tensors,
)
from fedfa.memory import Memory
from fedfa.precision import arithmetic
from fedfa.reduction import BadUpdate, Update, check
from fedfa.registry import nearest
from fedfa.server import Watcher
from fedfa.simulate import Parts, build_engine, build_federation, find_device, find_threads
from fedfa.state import entries

SPLITS: tuple[Split, ...] = ("val", "test")
log = logging.getLogger("fedfa.flower")


class Refusal(Exception):
    """Why the site does not do what it is asked, in a line that the server may read."""


@dataclass
class Prepared:
    """An experiment that is ready to be trained here."""

    config: Experiment
    parts: Parts
    facts: Facts
    device: torch.device
    threads: int
    like: Mapping[str, Tensor]
    """The entries that the server's model must have."""
    run: str = ""
    engine: Engine | None = None
    memory: Memory | None = None


class Site:
    """Answers requests one at a time. Between them it keeps the last experiment's data and network, so a worker that
    lives on reads its data once."""

    def __init__(self, settings: SiteSettings) -> None:
        self.settings = settings
        self.audit = Audit(settings.place)
        self._prepared: tuple[str, Prepared] | None = None

    def answer(self, parcel: Parcel) -> Parcel:
        """The reply to a request. Whatever goes wrong is in this site's log; the server is told no more than it needs,
        since messages of errors may hold names of files."""
        request = Request.of(parcel)
        try:
            reply = self._answer(request)
        except (Refusal, Malformed) as error:
            reply = self._refusal(request, str(error))
        except UserError as error:
            log.error("%s", error)
            reply = self._refusal(request, "its data or settings do not allow it; the site's log says why")
        except Exception as error:
            log.exception("the request could not be answered")
            reply = self._refusal(request, f"it failed with {type(error).__name__}; the site's log says why")
        self.audit.write(reply)
        log.info("%s, round %d: answered", request.head.kind, request.head.round)
        return reply.parcel()

    def _answer(self, request: Request) -> Reply:
        head = request.head
        if head.kind == "join":  # whoever asks does not know our name yet
            prepared = self.prepare(head.experiment)
            return self._reply(request, prepared, facts=prepared.facts)
        if head.site != self.settings.name:
            raise Refusal(f"this is {self.settings.name}, and the request is for {head.site}")
        prepared = self.prepare(head.experiment)
        progress = Progress(self._folder(head.run))
        progress.check(head.kind, head.round)
        broadcast = self._broadcast(request, prepared)
        if broadcast is None:
            return self._reply(request, prepared, refused="it has not kept what never changes", wants_constants=True)
        engine = self._engine(prepared, head.run)
        before = torch.get_num_threads()
        with arithmetic(prepared.config.precision):
            try:
                torch.set_num_threads(prepared.threads)
                if head.kind == "evaluate":
                    return self._evaluate(request, prepared, engine, broadcast)
                reply = (self._share if head.kind == "share" else self._train)(request, prepared, engine, broadcast)
            finally:
                torch.set_num_threads(before)
        if prepared.memory is not None:
            prepared.memory.sync()  # the server checkpoints this round as soon as it is over
        progress.note(head.round)
        return reply

    def prepare(self, text: str) -> Prepared:
        """Read the data and build the network: all that can be wrong with them shows here."""
        if self._prepared is None or self._prepared[0] != text:
            config = self.settings.experiment(text)
            federation = self._own(build_federation(config))
            # The server decides who is held out; here there is one client, which trains when it is asked to.
            parts = Parts.around(config.model_copy(update={"held_out": ()}), federation)
            private = parts.algorithm.private(parts.model)
            tensors = parts.model.state_dict()
            like = {name: tensors[name] for name in entries(parts.model) if name not in private}
            facts = Facts.of(federation, self.settings.name)
            device = find_device(config.device)
            threads = config.threads or find_threads(config, parts, device)
            self._prepared = text, Prepared(config, parts, facts, device, threads, like)
        return self._prepared[1]

    def _own(self, federation: Federation) -> Federation:
        """The federation with this site alone, under its name."""
        wanted = self.settings.client or self.settings.name
        if wanted not in federation.clients and (self.settings.client or len(federation.clients) > 1):
            hint = nearest(wanted, federation.clients)
            raise UserError(f"{federation.name} has no client {wanted!r}; {hint} (say which with client=…)")
        index = federation.clients.get(wanted) or next(iter(federation.clients.values()))
        return replace(federation, clients={self.settings.name: index})

    def _folder(self, run: str) -> Path:
        if not run:
            raise Refusal("the request names no run")
        return self.settings.place / "runs" / run

    def _engine(self, prepared: Prepared, run: str) -> Engine:
        if prepared.engine is None or prepared.run != run:
            prepared.run, prepared.memory = run, Memory(self._folder(run) / "memory")
            prepared.engine = build_engine(prepared.config, prepared.parts, prepared.memory, prepared.device, _Logged())
        return prepared.engine

    def _broadcast(self, request: Request, prepared: Prepared) -> Broadcast | None:
        """What the server sent, checked; None where it counts on something that is not here."""
        try:
            check(Update(self.settings.name, 1, request.model), prepared.like)
        except BadUpdate as bad:
            raise Refusal(f"the server's model is not of this network: {bad}") from None
        constants = self._constants(request)
        if constants is None:
            return None
        extras = {**request.extras, **constants}
        on = prepared.device
        return Broadcast(
            request.head.round,
            {n: t.to(on) for n, t in request.model.items()},
            {n: t.to(on) for n, t in extras.items()},
        )

    def _constants(self, request: Request) -> dict[str, Tensor] | None:
        """Tensors that never change, from the request or from the disk."""
        if not request.head.constants:
            return {}
        path = self._folder(request.head.run) / "constants" / f"{request.head.constants}.safetensors"
        if request.constants is not None:
            if hashlib.sha256(request.constants).hexdigest() != request.head.constants:
                raise Refusal("what never changes is not what its name says")
            with beside(path) as part:
                part.write_bytes(request.constants)
        return unpack(path.read_bytes(), MOST_BYTES) if path.exists() else None

    def _train(self, request: Request, prepared: Prepared, engine: Engine, broadcast: Broadcast) -> Reply:
        for update in engine.train(broadcast, [self.settings.name]):
            if isinstance(update, Refused):
                raise Refusal(update.reason)
            tensors = update_tensors(update)
            return self._reply(request, prepared, tensors, weight=update.weight, steps=update.steps)
        raise Refusal("it has nothing to train on")

    def _share(self, request: Request, prepared: Prepared, engine: Engine, broadcast: Broadcast) -> Reply:
        ((_, share),) = engine.share(broadcast, [self.settings.name])
        return self._reply(request, prepared, share_tensors(share))

    def _evaluate(self, request: Request, prepared: Prepared, engine: Engine, broadcast: Broadcast) -> Reply:
        name = self.settings.name
        found = {split: engine.evaluate(broadcast, [name], split) for split in SPLITS}
        scores = {
            split: Metrics(metric=of[name].metric, loss=of[name].loss, samples=of[name].samples)
            for split, of in found.items()
            if name in of
        }
        return self._reply(request, prepared, scores=scores)

    def _reply(
        self, request: Request, prepared: Prepared, tensors: Mapping[str, Tensor] | None = None, **said: Any
    ) -> Reply:
        return Reply(self._head(request, division=prepared.facts.division, **said), tensors or {})

    def _refusal(self, request: Request, reason: str) -> Reply:
        log.warning("%s, round %d: refused: %s", request.head.kind, request.head.round, reason)
        return Reply(self._head(request, refused=reason[:500] or "no reason given"))

    def _head(self, request: Request, **said: Any) -> ReplyHead:
        head = request.head
        return ReplyHead(kind=head.kind, run=head.run, round=head.round, site=self.settings.name, **said)


class Progress:
    """The last round that a site has trained in a run, on its disk.

    That round may be asked for again, since the server may have lost it; its state before it is still there. An older
    round is over, and a request for it is refused: it is a replay, or the server was set back.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "progress.json"

    @property
    def last(self) -> int:
        return int(json.loads(self._path.read_text())["trained"]) if self._path.exists() else 0

    def check(self, kind: str, round: int) -> None:
        # Whoever starts anew from nothing asks for shares again, when round 1 may have been trained but not kept.
        if round < (self.last - 1 if kind == "share" else self.last):
            raise Refusal(f"round {round} is over: it has trained round {self.last}")

    def note(self, round: int) -> None:
        if round != self.last:
            write_text(self._path, json.dumps({"trained": round}) + "\n")


class _Logged(Watcher):
    def noticed(self, line: str) -> None:
        log.warning("%s", line)
