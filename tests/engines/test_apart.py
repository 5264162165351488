"""What a lane of the captured engine sends: copies, so that its next client can begin. On any device."""

from __future__ import annotations

import torch

from fedfa.engines.captured import _tensors
from fedfa.engines.lane import apart
from fedfa.reduction import Report, Update


def test_an_update_apart_is_the_same_in_tensors_of_its_own() -> None:
    model = {
        "conv": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "count": torch.tensor(7),
        "bias": torch.randn(4),
    }
    weight = torch.tensor(1)  # one for both statistics, as FedFA has it
    means = {"m": torch.randn(2, 3), "n": torch.tensor([5])}
    spreads = {"mean": (torch.randn(4), weight), "std": (torch.rand(4), weight)}
    update = Update("a", 3, model, Report(means, spreads), steps=2)
    sent = apart(update)
    assert list(sent.model) == list(model) and list(sent.report.means) == list(means)
    assert sent.row is not None and torch.equal(sent.row, torch.cat([model["conv"].flatten(), model["bias"]]))
    pairs = zip(_tensors(update), _tensors(sent), strict=False)  # a row comes besides
    for tensor, copied in pairs:
        assert torch.equal(tensor, copied) and tensor.dtype == copied.dtype
        assert tensor.untyped_storage().data_ptr() != copied.untyped_storage().data_ptr()
