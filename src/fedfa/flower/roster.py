"""Which sites are in: names and data behind Flower's node ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from flwr.proto.node_pb2 import NodeInfo

from fedfa.errors import UserError
from fedfa.flower.parcel import Malformed, Parcel
from fedfa.flower.post import Answer, Post
from fedfa.flower.wire import Facts, Reply, RequestHead

ASK_AGAIN = 60.0
"""Seconds until a node that was turned away, or has not answered, is asked again: its site may have been put right."""
REMIND = 30.0
"""Seconds between two lines that say who is waited for."""


class Listener(Protocol):
    """Who is told of sites that come and go."""

    def noticed(self, line: str) -> None: ...

    def sites_changed(self, present: Sequence[str], turned_away: dict[str, str]) -> None: ...


class Roster:
    """Finds out which node is which site. A site is known by the name in its node config, never by its node id, which
    changes; where the operator registered a node's key under a name, no other name is taken from it."""

    def __init__(self, post: Post, sites: Sequence[str], experiment: str, listener: Listener) -> None:
        self._post, self._sites, self._experiment, self._listener = post, tuple(sites), experiment, listener
        self.facts: dict[str, Facts] = {}
        """Of every site that was ever in."""
        self.nodes: dict[str, int] = {}
        """The node of every site that is in."""
        self.turned_away: dict[str, str] = {}
        """Nodes or sites that may not join, and why."""
        self._names: dict[int, str] = {}
        self._asked: dict[str, int] = {}
        self._ask_next: dict[int, float] = {}

    def refresh(self) -> None:
        """Look who is connected, ask those that are new who they are, and take what others have answered."""
        before = (dict(self.nodes), dict(self.turned_away))
        nodes = {node.node_id: node for node in self._post.grid.get_nodes()}
        self.nodes = {name: node for name, node in self.nodes.items() if node in nodes}
        for node, name in self._names.items():
            if node in nodes:
                self.nodes.setdefault(name, node)
        self._ask([node for node in nodes if node not in self._names])
        for id, answer in self._post.replies(self._asked):
            del self._asked[id]
            self._take(answer, nodes.get(answer.node))
        if before != (self.nodes, self.turned_away):
            self._listener.sites_changed(sorted(self.nodes), dict(self.turned_away))

    def wait_for(self, wanted: int, names: Sequence[str], limit: float, stop_below: int) -> None:
        """Wait until `wanted` of the named sites are in. When the time is up, go on if at least `stop_below` are;
        an error otherwise."""
        end, remind = time.monotonic() + limit, time.monotonic() + 1
        while True:
            self.refresh()
            here = [name for name in names if name in self.nodes]
            now = time.monotonic()
            if len(here) >= wanted or (now > end and len(here) >= stop_below):
                return
            missing = ", ".join(name for name in names if name not in self.nodes)
            if now > end:
                raise UserError(
                    f"{len(here)} of at least {stop_below} sites are in after {limit:g} s, without {missing}: stopped; "
                    "start the app again when they are, and the run goes on from its last round"
                )
            if now > remind:
                remind = now + REMIND
                self._listener.noticed(f"{len(here)} of {wanted} sites are in; waiting {end - now:.0f} s for {missing}")
            time.sleep(min(1.0, limit / 10))

    def _ask(self, nodes: Sequence[int]) -> None:
        now = time.monotonic()
        due = [node for node in nodes if self._ask_next.get(node, 0) <= now]
        self._ask_next.update(dict.fromkeys(due, now + ASK_AGAIN))
        # Who is asked is not known yet: a site answers with its own name.
        head = RequestHead(kind="join", run="", round=0, site="anyone", experiment=self._experiment)
        self._asked.update(self._post.send("join", 0, dict.fromkeys(due, Parcel(head.model_dump_json()))))

    def _take(self, answer: Answer, node: NodeInfo | None) -> None:
        if node is None:
            return
        try:
            if answer.parcel is None:
                raise Malformed(answer.reason)
            reply = Reply.of(answer.parcel, most=0)
            name = reply.head.site
            if reply.head.refused:
                raise Malformed(reply.head.refused)
            self._admit(name, reply.head.facts, node)
        except Malformed as error:
            title = node.name or f"node {node.node_id}"
            if self.turned_away.get(title) != str(error):
                self._listener.noticed(f"{title} is turned away: {error}")
            self.turned_away[title] = str(error)
            return
        for title in (name, f"node {node.node_id}"):
            self.turned_away.pop(title, None)
        self._names[node.node_id], self.nodes[name] = name, node.node_id
        self._listener.noticed(f"{name} is in: {self.facts[name].samples[0]} training samples")

    def _admit(self, name: str, facts: Facts | None, node: NodeInfo) -> None:
        """Let a site in, or raise the reason why not."""
        if node.name and node.name != name:
            raise Malformed(f"its key is registered for {node.name}, and it calls itself {name}")
        if name not in self._sites:
            raise Malformed(f"{name} is not among this run's sites")
        if self.nodes.get(name, node.node_id) != node.node_id:
            raise Malformed(f"another node is {name} already")
        if facts is None:
            raise Malformed("it says nothing of its data")
        for other, known in self.facts.items():
            misfit = facts.misfit(known)
            if misfit is not None:
                raise Malformed(f"{misfit} (as at {other})")
        if name in self.facts and facts.division != self.facts[name].division:
            raise Malformed("its samples or splits are not those that it joined with")
        self.facts[name] = facts
