"""Sums on the server: exact, in no order, in memory that does not grow."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedfa.reduction import BadUpdate, ExactSum, Reduction, Report, Update

one = torch.tensor(1)
floats = st.floats(-1e6, 1e6, width=32).filter(lambda v: v == 0 or abs(v) > 1e-6)


def update(name: str, weight: int = 1, report: Report | None = None, **tensors: Tensor) -> Update:
    return Update(name, weight, tensors, report or Report(), steps=1)


def reduced(updates: list[Update], centres: dict[str, Tensor] | None = None):  # type: ignore[no-untyped-def]  # what it is is plain from its use
    like = updates[0].model
    reduction = Reduction(like, centres)
    for each in updates:
        reduction.add(each)
    return reduction.result()


class TestExactSum:
    @settings(deadline=None)
    @given(st.lists(st.tuples(floats, st.integers(1, 10_000)), min_size=1, max_size=30), st.randoms())
    def test_is_the_rational_sum_in_any_order(self, terms: list[tuple[float, int]], random) -> None:  # type: ignore[no-untyped-def]  # what it is is plain from its use
        total = sum((Fraction(value) * weight for value, weight in terms), Fraction())
        weights = sum(weight for _, weight in terms)
        wanted = torch.tensor(float(total / weights), dtype=torch.float64).float()
        for _ in range(3):
            random.shuffle(terms)
            exact = ExactSum()
            for value, weight in terms:
                exact.add({"x": torch.tensor([value])}, weight)
            assert torch.equal(exact.divided(weights)["x"], wanted.view(1))

    def test_keeps_what_float64_would_lose(self) -> None:
        exact = ExactSum()
        for value in (2.0**60, 1.0, -(2.0**60)):
            exact.add({"x": torch.tensor([value])})
        assert exact.divided(1)["x"].item() == 1.0

    def test_the_first_term_is_as_good_as_one_added_to_zeros(self) -> None:
        first, zeros = ExactSum(), ExactSum()
        values = torch.tensor([-0.0, 0.0, 1e-38, -3.3e38, 0.1])
        zeros.add({"x": torch.zeros(5)})
        for each in (first, zeros):
            each.add({"x": values}, 459)
        assert torch.equal(first._high, zeros._high) and torch.equal(first._low, zeros._low)
        assert not first._high[:2].signbit().any(), "a sum has no −0"

    def test_types_stay(self) -> None:
        tensors = {"a": torch.tensor([1.5]), "b": torch.tensor([2.5]).double(), "c": torch.tensor([3])}
        exact = ExactSum()
        exact.add(tensors, 3)
        for name, mean in exact.divided(3).items():
            assert mean.dtype == tensors[name].dtype and torch.equal(mean, tensors[name])

    def test_many_chunks_and_shapes(self) -> None:
        tensors = {"a": torch.randn(300, 400), "b": torch.randn(7), "c": torch.tensor(2.0)}
        exact = ExactSum()
        for _ in range(3):
            exact.add(tensors, 5)
        for name, mean in exact.divided(15).items():
            assert torch.equal(mean, tensors[name])


class TestMeans:
    def test_weighted_by_hand(self) -> None:
        result = reduced([update("a", 1, w=torch.tensor([1.0, 4.0])), update("b", 3, w=torch.tensor([5.0, 0.0]))])
        assert result.model["w"].tolist() == [4.0, 1.0]
        assert result.clients == 2

    def test_one_client_comes_back_bit_for_bit(self) -> None:
        w = torch.randn(1000) * 10 ** torch.randint(-30, 30, (1000,)).float()
        assert torch.equal(reduced([update("a", 459, w=w)]).model["w"], w)

    def test_integers_stay_integers(self) -> None:
        result = reduced([update("a", 1, n=torch.tensor(7)), update("b", 1, n=torch.tensor(10))])
        assert result.model["n"].dtype == torch.int64 and result.model["n"].item() == 8

    def test_order_of_arrival_does_not_show(self) -> None:
        torch.manual_seed(0)
        clients = [
            update(
                f"client-{i}",
                i + 1,
                Report(means={"m": torch.randn(50)}, spreads={"s": (torch.randn(50) * 10 ** (i % 7 - 3), one)}),
                w=torch.randn(4000) * 10 ** (i % 9 - 4),
            )
            for i in range(40)
        ]
        first = reduced(clients)
        for seed in range(5):
            order = torch.randperm(40, generator=torch.Generator().manual_seed(seed)).tolist()
            again = reduced([clients[i] for i in order])
            assert torch.equal(again.model["w"], first.model["w"])
            assert torch.equal(again.means["m"], first.means["m"])
            assert torch.equal(again.spreads["s"].variance, first.spreads["s"].variance)

    def test_reported_means_weigh_one_a_client(self) -> None:
        updates = [
            update(name, weight, Report(means={"c": torch.tensor([value])}), w=torch.zeros(1))
            for name, weight, value in (("a", 1, 0.0), ("b", 99, 1.0))
        ]
        assert reduced(updates).means["c"].item() == 0.5


class TestVariances:
    def test_by_hand(self) -> None:
        values = torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]])
        updates = [update(str(i), 1, Report(spreads={"mu": (v, one)}), w=torch.zeros(1)) for i, v in enumerate(values)]
        across = reduced(updates).spreads["mu"]
        torch.testing.assert_close(across.mean, torch.tensor([2.0, 1.0]))
        torch.testing.assert_close(across.variance, torch.tensor([8 / 3, 0.0]))
        assert across.clients == 3

    def test_weights_of_zero_leave_a_client_out(self) -> None:
        values = [(1.0, one), (3.0, one), (1000.0, torch.tensor(0))]
        updates = [
            update(str(i), 1, Report(spreads={"mu": (torch.tensor([v]), w)}), w=torch.zeros(1))
            for i, (v, w) in enumerate(values)
        ]
        across = reduced(updates).spreads["mu"]
        assert (across.mean.item(), across.variance.item(), across.clients) == (2.0, 1.0, 2)

    def test_nobody_left(self) -> None:
        report = Report(spreads={"mu": (torch.tensor([5.0]), torch.tensor(0))})
        across = reduced([update("a", 1, report, w=torch.zeros(1))]).spreads["mu"]
        assert across.clients == 0 and across.variance.item() == 0

    @pytest.mark.parametrize("centre", [0.0, 1e4, -3.0])
    def test_the_centre_does_not_show(self, centre: float) -> None:
        values = 1e4 + torch.tensor([0.001, 0.002, 0.004]).double()
        updates = [
            update(str(i), 1, Report(spreads={"mu": (v.view(1), one)}), w=torch.zeros(1)) for i, v in enumerate(values)
        ]
        across = reduced(updates, {"mu": torch.tensor([centre])}).spreads["mu"]
        wanted = values.var(correction=0).item()
        assert across.variance.item() == pytest.approx(wanted, rel=1e-6 if centre == 1e4 else 0.02)
        assert across.mean.item() == pytest.approx(values.mean().item())

    def test_never_negative(self) -> None:
        value = torch.full((1000,), 0.1)
        updates = [update(str(i), 1, Report(spreads={"mu": (value, one)}), w=torch.zeros(1)) for i in range(7)]
        assert reduced(updates).spreads["mu"].variance.min() >= 0


class TestRefusals:
    good = {"w": torch.zeros(2, 3), "n": torch.tensor(1)}

    @pytest.mark.parametrize(
        ("bad", "reason"),
        [
            ({"w": torch.zeros(2, 3)}, "entries are not the model's: n"),
            ({"w": torch.zeros(3, 2), "n": torch.tensor(1)}, r"w is \(3, 2\)"),
            ({"w": torch.zeros(2, 3).double(), "n": torch.tensor(1)}, "float64"),
            ({"w": torch.full((2, 3), torch.nan), "n": torch.tensor(1)}, "w is not finite"),
            ({"w": torch.tensor([[0, 0, torch.inf], [0, 0, 0]]), "n": torch.tensor(1)}, "w is not finite"),
            ({**good, "extra": torch.zeros(1)}, "extra"),
        ],
    )
    def test_bad_updates_leave_the_sum_as_it_was(self, bad: dict[str, Tensor], reason: str) -> None:
        reduction = Reduction(self.good)
        reduction.add(update("good", 2, w=torch.ones(2, 3), n=torch.tensor(5)))
        with pytest.raises(BadUpdate, match=reason):
            reduction.add(Update("bad", 1, bad))
        result = reduction.result()
        assert result.clients == 1 and torch.equal(result.model["w"], torch.ones(2, 3)) and result.model["n"] == 5

    def test_weights_and_reports(self) -> None:
        reduction = Reduction(self.good)
        with pytest.raises(BadUpdate, match="weight is 0"):
            reduction.add(Update("a", 0, self.good))
        reduction.add(Update("a", 1, self.good, Report(means={"m": torch.zeros(2)})))
        with pytest.raises(BadUpdate, match=r"m is \(3,\)"):
            reduction.add(Update("b", 1, self.good, Report(means={"m": torch.zeros(3)})))
        with pytest.raises(BadUpdate, match="not what is asked for: m"):
            reduction.add(Update("b", 1, self.good))
        with pytest.raises(BadUpdate, match="m is not finite"):
            reduction.add(Update("b", 1, self.good, Report(means={"m": torch.full((2,), torch.nan)})))
        for weight in (0.5, 5, -1):
            with pytest.raises(BadUpdate, match="not 0 or 1"):
                Reduction(self.good).add(
                    Update("b", 1, self.good, Report(spreads={"s": (torch.zeros(2), torch.tensor(weight))}))
                )

    def test_a_misshapen_report_that_comes_first_harms_nobody(self) -> None:
        expected, centres = {"s": torch.zeros(4)}, {"s": torch.ones(4)}
        reduction = Reduction(self.good, centres, expected)
        with pytest.raises(BadUpdate, match=r"s is \(5,\)"):
            reduction.add(Update("bad", 1, self.good, Report(spreads={"s": (torch.zeros(5), one)})))
        for name in "abc":
            reduction.add(Update(name, 1, self.good, Report(spreads={"s": (torch.full((4,), 2.0), one)})))
        result = reduction.result()
        assert result.clients == 3 and result.spreads["s"].mean.tolist() == [2.0] * 4

    def test_nothing_added(self) -> None:
        with pytest.raises(ValueError, match="nothing"):
            Reduction(self.good).result()


PEAK = """
import resource, sys, torch
torch.set_num_threads(1)
from fedfa.reduction import Reduction, Report, Update
clients = int(sys.argv[1])
like = {"w": torch.zeros(1_000_000)}
reduction = Reduction(like)
for number in range(clients):
    w = torch.full((1_000_000,), float(number))
    spread = {"s": (torch.full((1000,), float(number)), torch.tensor(1))}
    reduction.add(Update(str(number), 1, {"w": w}, Report(spreads=spread)))
assert reduction.result().model["w"][0] == (clients - 1) / 2
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_peak_memory_is_the_same_for_10_and_for_1000_clients() -> None:
    """A client's update is 4 MB here: a thousand of them would be 4 GB."""

    def peak(clients: int) -> int:
        run = subprocess.run([sys.executable, "-c", PEAK, str(clients)], capture_output=True, text=True, check=True)
        return int(run.stdout)  # in KiB

    few, many = peak(10), peak(1000)
    assert abs(many - few) < 4 * 1024, f"{few} KiB with 10 clients, {many} KiB with 1,000"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_kernel_adds_what_a_dozen_operations_add() -> None:
    draw = torch.Generator().manual_seed(0)
    on_cpu, on_gpu = ExactSum(), ExactSum()
    for number in range(20):
        size = 10.0 ** torch.randint(-6, 7, (5000,), generator=draw)
        row = {"a": (torch.randn(5000, generator=draw) * size).view(50, 100), "b": torch.randn(7, generator=draw)}
        on_cpu.add(row, number + 1)
        on_gpu.add({name: tensor.cuda() for name, tensor in row.items()}, number + 1)
    assert torch.equal(on_gpu._high.cpu(), on_cpu._high) and torch.equal(on_gpu._low.cpu(), on_cpu._low)
    for name, tensor in on_gpu.divided(210).items():
        assert torch.equal(tensor.cpu(), on_cpu.divided(210)[name])
