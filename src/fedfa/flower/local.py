"""A grid without a network: sites in this process, each with its ClientApp. For dry runs and for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity

CLIENT_APP_RAISED = 1
SERVER = 1
"""The server's own node id."""


class LocalGrid(Grid):
    """Every node is a node config, and all run the same app, when their replies are asked for."""

    def __init__(self, app: ClientApp, nodes: Mapping[int, Mapping[str, str | int | float | bool]]) -> None:
        self.app = app
        self.nodes = dict(nodes)
        self._waiting: dict[str, Message] = {}
        self._numbers = count(1)
        # Flower's messages say which task of which run they come from, and refuse to be made outside of one.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER, 1

    @property
    def run(self) -> FlowerRun:
        return FlowerRun.create_empty(1)

    def set_run(self, run: FlowerRun) -> None: ...

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node) for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            number = str(next(self._numbers))
            message.metadata.__dict__["_message_id"] = number  # as Flower's own grids do
            self._waiting[number] = message
            ids.append(number)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.answer(self._waiting.pop(number)) for number in message_ids if number in self._waiting]

    def answer(self, message: Message) -> Message:
        """What the node that a message is for replies."""
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return Message(Error(CLIENT_APP_RAISED, "the node is gone"), reply_to=message)
        context = Context(1, node, dict(self.nodes[node]), RecordDict(), {})
        try:
            return self.app(message, context)
        except Exception as error:  # as a SuperNode does
            return Message(Error(CLIENT_APP_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
