"""FedFA in a Flower app written without it: the example, and the strategy against the project's own algorithm."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

import fedfa
from fedfa.flower import FedFA, pack, unpack
from fedfa.flower.local import LocalGrid
from fedfa.layers.ffa import between
from fedfa.state import entries, ffa_layers

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-quickstart"


def test_the_difference_is_at_most_15_lines() -> None:
    lines = (EXAMPLE / "fedfa.patch").read_text().splitlines()
    changed = [line for line in lines if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))]
    assert 0 < len(changed) <= 15


RUN = """
import sys
sys.path.insert(0, {app!r})
import torch
torch.manual_seed(0)
from flwr.app import Context, RecordDict
from fedfa.flower.local import LocalGrid
from quickstart import client_app, server_app

class Fixed(LocalGrid):
    states = {{}}
    def answer(self, message):
        node = message.metadata.dst_node_id
        context = Context(1, node, self.nodes[node], self.states.setdefault(node, RecordDict()), {config!r})
        return self.app(message, context)

grid = Fixed(client_app.app, {{n: {{"partition-id": n - 2, "num-partitions": 3}} for n in (2, 3, 4)}})
server_app.main(grid, Context(1, 1, {{}}, RecordDict(), {config!r}))
state = torch.load("final_model.pt")
print(sum("gamma" in name for name in state), [t.var().item() > 0 for n, t in state.items() if "gamma" in n])
"""


@pytest.mark.parametrize(("patched", "told"), [(False, "0 []"), (True, "4 [True, True, True, True]")])
def test_the_example_runs(patched: bool, told: str, tmp_path: Path) -> None:
    app = tmp_path / "app"
    shutil.copytree(EXAMPLE, app)
    if patched:
        subprocess.run(["git", "apply", "fedfa.patch"], cwd=app, check=True)
    config = {"num-server-rounds": 2, "fraction-train": 1.0, "local-epochs": 1, "lr": 0.05}
    code = RUN.format(app=str(app), config=config)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == told
    assert "Aggregated MetricRecord" in done.stderr and "eval_acc" in done.stderr


class Net(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), fedfa.FFA(3, p=1.0, **settings))
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.conv(x).mean((2, 3)))
        return out


def trained(model: nn.Module, node: int) -> None:
    """What a client does: a step on data of its own."""
    torch.manual_seed(node)
    nn.functional.cross_entropy(model(torch.rand(4, 1, 6, 6) * node), torch.tensor([0, 1, 0, 1])).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


class App:
    """A Flower app with FedFA over three nodes, whose updates a test can see and change."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.model = Net(**settings)
        self.strategy = FedFA(self.model)
        self.states: dict[int, RecordDict] = {}
        self.sent: dict[int, dict[str, Tensor]] = {}
        self.change: Callable[[int, dict[str, Tensor]], Any] = lambda node, tensors: None

    def client(self, message: Message, context: Context) -> Message:
        node = context.node_id
        context = Context(1, node, {}, self.states.setdefault(node, RecordDict()), {})
        if message.metadata.message_type == "evaluate":
            model = Net(**self.settings)
            model.load_state_dict(message.content["arrays"].to_torch_state_dict())
            return Message(RecordDict({"m": MetricRecord({"num-examples": 1})}), reply_to=message)
        model = Net(**self.settings)
        unpack(model, message, context)
        trained(model, node)
        tensors = dict(pack(model, context).to_torch_state_dict())
        self.sent[node] = {name: tensor.clone() for name, tensor in tensors.items()}
        metrics = MetricRecord({"num-examples": node, "loss": 1.0})
        other = self.change(node, tensors)
        content = other or RecordDict({"arrays": ArrayRecord(tensors), "metrics": metrics})
        return Message(content, reply_to=message)

    def run(self, rounds: int = 1) -> dict[str, Tensor]:
        grid = LocalGrid(self.client, {2: {}, 3: {}, 4: {}})  # type: ignore[arg-type]  # any callable answers as an app does
        result = self.strategy.start(grid, ArrayRecord(self.model.state_dict()), num_rounds=rounds)
        return dict(result.arrays.to_torch_state_dict())


def test_models_by_examples_and_statistics_by_client() -> None:
    app = App()
    after = app.run()
    for name in entries(app.model):
        values = torch.stack([app.sent[node][name].double() for node in (2, 3, 4)])
        mean = torch.tensordot(torch.tensor([2.0, 3.0, 4.0]).double(), values, 1) / 9
        wanted = mean.floor() if name.endswith("tracked") else mean
        torch.testing.assert_close(after[name].double(), wanted)
    ((path, _),) = ffa_layers(app.model)
    for statistic in ("mean", "std"):
        values = torch.stack([app.sent[node][f"{path}.{statistic}"] for node in (2, 3, 4)])
        torch.testing.assert_close(after[f"{path}.gamma_{statistic}"], between("adaptive", values.var(0, correction=0)))
    assert after.keys() == app.model.state_dict().keys()
    assert torch.equal(after[f"{path}.mean"], torch.zeros(3)) and int(after[f"{path}.batches"]) == 0


@pytest.mark.parametrize("statistics", ["paper", "corrected", "kept", "released"])
def test_what_happens_to_the_statistics(statistics: str) -> None:
    app = App(statistics=statistics)
    app.run(rounds=2)
    kept = app.states[2].array_records.get("fedfa")
    assert (kept is not None) == (statistics == "kept")
    if kept is not None:
        assert int(kept.to_torch_state_dict()["conv.2.batches"]) == 2


NOTHING = RecordDict({"metrics": MetricRecord({"loss": 1.0})})

BAD: dict[str, tuple[Callable[[int, dict[str, Tensor]], Any], str]] = {
    "a NaN": (lambda n, t: t.update({"fc.bias": torch.full((2,), torch.nan)}), "fc.bias is not finite"),
    "a shape": (lambda n, t: t.update({"fc.bias": torch.zeros(3)}), "fc.bias is \\(3,\\)"),
    "a type": (lambda n, t: t.update({"fc.bias": torch.zeros(2).double()}), "float64"),
    "a negative std": (lambda n, t: t.update({"conv.2.std": torch.full((3,), -9.0)}), "conv.2.std is negative"),
    "one less": (lambda n, t: t.update({"fc.bais": t.pop("fc.bias")}), "do not go together"),
    "one more": (lambda n, t: t.update({"more": torch.zeros(1)}), "do not go together"),
    "no examples": (
        lambda n, t: RecordDict({"arrays": ArrayRecord(t), "metrics": MetricRecord({"loss": 1.0})}),
        "is not a model with 'num-examples'",
    ),
    "nothing": (lambda n, t: NOTHING, "is not a model with 'num-examples'"),
}


@pytest.mark.parametrize("what", list(BAD))
def test_a_bad_update_is_left_out(what: str) -> None:
    change, reason = BAD[what]
    app, without = App(), App()
    without.model.load_state_dict(app.model.state_dict())
    without.strategy = FedFA(without.model)
    app.change = lambda node, tensors: change(node, tensors) if node == 3 else None
    without.change = lambda node, tensors: NOTHING if node == 3 else None
    after, wanted = app.run(), without.run()
    assert list(app.strategy.left_out) == [1] and list(app.strategy.left_out[1]) == [3]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(app.strategy.left_out[1][3])
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in after.items())


def test_a_round_without_updates_changes_nothing() -> None:
    app = App()
    app.change = lambda node, tensors: NOTHING
    assert app.strategy.aggregate_train(1, []) == (None, None)
    grid = LocalGrid(app.client, {2: {}, 3: {}})  # type: ignore[arg-type]  # any callable answers as an app does
    assert not app.strategy.start(grid, ArrayRecord(app.model.state_dict()), num_rounds=1).arrays


def test_models_that_have_no_layers_or_several_kinds() -> None:
    with pytest.raises(ValueError, match="the model has no FFA layer"):
        FedFA(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="differ in `fusion` or `statistics`"):
        FedFA(nn.Sequential(fedfa.FFA(2), fedfa.FFA(2, fusion="client")))


def test_the_package_says_what_it_has() -> None:
    assert importlib.import_module("fedfa.flower").FedFA is FedFA
    with pytest.raises(AttributeError, match=r"module 'fedfa\.flower' has no attribute 'FedAvg'"):
        importlib.import_module("fedfa.flower").FedAvg  # noqa: B018  # looking it up is what is tested
