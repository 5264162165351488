"""FedFA for a Flower app written without it: a strategy, and two lines for its client."""

from __future__ import annotations

from collections.abc import Iterable
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore import log
from torch import Tensor, nn

from fedfa.algorithms.fedfa import FedFA as Algorithm
from fedfa.reduction import BadUpdate, Reduction, Report, Update
from fedfa.server import first_state
from fedfa.state import entries, ffa_layers

KEPT = "fedfa"
"""The record of a client's context that holds running statistics, where the layers keep them."""
WEIGHT = "weight"
"""What a layer's statistics count with, sent in the place of its count of batches: 0 or 1."""


def algorithm_of(model: nn.Module) -> Algorithm:
    """FedFA with the settings of a model's own layers."""
    layers = [layer for _, layer in ffa_layers(model)]
    if not layers:
        raise ValueError("the model has no FFA layer: add some with fedfa.add_ffa, or fedfa.FFA(channels)")
    kinds = {(layer.fusion, layer.statistics) for layer in layers}
    if len(kinds) > 1:
        raise ValueError("the model's FFA layers differ in `fusion` or `statistics`")
    first = layers[0]
    return Algorithm(first.p, first.momentum, first.fusion, first.statistics, first.eps)


def unpack(model: nn.Module, message: Message, context: Context, arrays: str = "arrays") -> None:
    """Take the server's model and γ, before a client trains. In the place of `model.load_state_dict(…)`."""
    algorithm = algorithm_of(model)
    tensors = message.content.array_records[arrays].to_torch_state_dict()
    model.load_state_dict(tensors)
    kept = context.state.array_records.get(KEPT)
    memory = kept.to_torch_state_dict() if kept is not None else {}
    algorithm.load_statistics(model, memory, {name: tensors[name] for name in algorithm.start(model)})


def pack(model: nn.Module, context: Context) -> ArrayRecord:
    """A client's model with its FFA statistics, after it has trained. In the place of `ArrayRecord(…)`."""
    algorithm = algorithm_of(model)
    kept = algorithm.kept_statistics(model)
    if kept:
        context.state[KEPT] = ArrayRecord(kept)
    state = model.state_dict()
    sent = {name: state[name] for name in entries(model)}
    report = algorithm.report_of(model)
    sent |= dict(report.means)
    for name, (value, weight) in report.spreads.items():
        sent |= {name: value, f"{name}.{WEIGHT}": weight}
    return ArrayRecord(sent)


class FedFA(FedAvg):
    """Flower's FedAvg, with γ: models are averaged by `weighted_by_key`, each layer's statistics over clients, every
    client counting the same (Eqs. shareing and t).

    `model` is the server's, with its FFA layers: it shows which entries are statistics. Everything else is as FedAvg's,
    and a client's update that is misshapen or not finite is left out, as anywhere in this package.

    >>> strategy = FedFA(model, fraction_train=0.5)
    >>> strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=3)
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__(**settings)
        self.algorithm = algorithm_of(model)
        self._state = first_state(model, self.algorithm, population=1)
        self._start = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.left_out: dict[int, dict[int, str]] = {}
        """Updates that were left out, by round and node, and why."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        reduction = Reduction(self._state.model, self._state.centres, self.algorithm.expected(self._state))
        accepted: list[RecordDict] = []
        for reply in sorted(valid, key=lambda reply: reply.metadata.src_node_id):
            try:
                self._add(reduction, reply)
                accepted.append(reply.content)
            except BadUpdate as bad:
                node = reply.metadata.src_node_id
                self.left_out.setdefault(server_round, {})[node] = str(bad)
                log(WARNING, "\t> node %d is left out: %s", node, bad)
        if not accepted:
            return None, None
        self._state = self.algorithm.aggregate(self._state, reduction.result())
        log(INFO, "aggregate_train: γ of %d tensors from %d clients", len(self._state.memory), len(accepted))
        metrics = self.train_metrics_aggr_fn(accepted, self.weighted_by_key)
        return ArrayRecord({**self._start, **self._state.model, **self._state.memory}), metrics

    def _add(self, reduction: Reduction, reply: Message) -> None:
        """Add a reply's arrays to the sums; :class:`BadUpdate` where they are not those of a client of this app."""
        try:
            arrays = reply.content.array_records[self.arrayrecord_key].to_torch_state_dict()
            (metrics,) = reply.content.metric_records.values()
            weight = int(metrics[self.weighted_by_key])  # type: ignore[arg-type]  # a list is no number, and is refused
        except Exception as error:  # whatever a strange message gives
            raise BadUpdate(f"its message is not a model with {self.weighted_by_key!r}: {error}") from None
        model = {name: tensor for name, tensor in arrays.items() if name in self._state.model}
        report = self._report({name: tensor for name, tensor in arrays.items() if name not in model})
        doubt = self.algorithm.implausible(report)
        if doubt is not None:
            raise BadUpdate(doubt)
        reduction.add(Update(str(reply.metadata.src_node_id), weight, model, report))

    def _report(self, sent: dict[str, Tensor]) -> Report:
        weights = {name.removesuffix(f".{WEIGHT}"): t for name, t in sent.items() if name.endswith(f".{WEIGHT}")}
        values = {name: t for name, t in sent.items() if not name.endswith(f".{WEIGHT}")}
        if not weights:
            return Report(means=values)
        if weights.keys() != values.keys():
            raise BadUpdate("its statistics and their weights do not go together")
        return Report(spreads={name: (values[name], weights[name]) for name in values})
