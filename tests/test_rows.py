"""Many tensors as one row, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedfa.files import read_tensors, write_tensors
from fedfa.rows import copies, copy_all, cut, in_a_row, joined, owners

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def mixed(device: str) -> dict[str, Tensor]:
    """Entries as a network has them: of several shapes, a convolution in channels_last, and a counter."""
    return {
        "conv": torch.randn(4, 3, 5, 5, device=device).to(memory_format=torch.channels_last),
        "bias": torch.randn(4, device=device, requires_grad=True),
        "count": torch.tensor(7, device=device),
        "scalar": torch.tensor(0.5, device=device),
        "large": torch.randn(300, 400, device=device),
    }


@pytest.mark.parametrize("device", DEVICES)
class TestRows:
    def test_a_row_is_the_floats_in_their_order_and_cut_gives_them_back(self, device: str) -> None:
        tensors = mixed(device)
        floats = [tensor.detach() for name, tensor in tensors.items() if name != "count"]
        row = in_a_row(tensors)
        assert torch.equal(row, torch.cat([tensor.reshape(-1) for tensor in floats])) and not row.requires_grad
        parts = cut(row, [tensor.shape for tensor in floats])
        for part, tensor in zip(parts, floats, strict=True):
            assert torch.equal(part, tensor) and part.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()

    def test_a_row_is_no_view(self, device: str) -> None:
        tensor = torch.ones(3, device=device)
        joined([tensor]).zero_()
        assert torch.equal(tensor, torch.ones(3, device=device))

    def test_nothing_gives_an_empty_row(self, device: str) -> None:
        assert in_a_row({"count": torch.tensor(7, device=device)}).shape == (0,)

    def test_types_that_differ_go_to_the_wider(self, device: str) -> None:
        row = joined([torch.ones(2, device=device), torch.ones(2, device=device, dtype=torch.float64)])
        assert row.dtype == torch.float64

    def test_copies_whatever_types_and_formats(self, device: str) -> None:
        sources = {name: tensor.detach() for name, tensor in mixed(device).items()}
        places = {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in sources.items()
        }
        places["large"] = places["large"].double()
        copy_all(places.values(), sources.values())
        for name, place in places.items():
            assert torch.equal(place, sources[name].to(place.dtype))
            assert place.is_contiguous(), "a place stays as it lies"

    def test_owners(self, device: str) -> None:
        assert owners((2, 0, 3), torch.device(device)).tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_the_same_on_another_device(device: str) -> None:
    tensors = {
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "count": torch.tensor(3),
        "row": torch.randn(7),
        "flags": torch.tensor([True, False]),
        "none": torch.zeros(0),
    }
    there = copies({name: tensor.to(device) for name, tensor in tensors.items()})
    back = copies(there, torch.device("cpu"))
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype
        assert there[name].device.type == device
    assert not copies({})


@pytest.mark.parametrize("device", DEVICES)
def test_files_take_tensors_from_any_device(device: str, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2, 3), "b": torch.tensor(4), "c": torch.randn(5)}
    write_tensors(tmp_path / "x", {name: tensor.to(device) for name, tensor in tensors.items()})
    write_tensors(tmp_path / "y", {**tensors, "b": tensors["b"].to(device), "c": tensors["c"].to(device)})
    for file in ("x", "y"):
        for name, tensor in read_tensors(tmp_path / file).items():
            assert torch.equal(tensor, tensors[name])
