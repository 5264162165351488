"""Transforms on a CUDA device: the same numbers as on the CPU, and captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedfa
from fedfa.data.transforms import Crop, Flip, Normalise, Rotate, Transforms
from fedfa.task import Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TRANSFORMED = Transforms((Flip(0.5, 0.5), Rotate(), Crop(), Crop(fill="mirror"), Normalise((0.4, 0.5, 0.6), (0.2,))))


def test_transforms_equal_the_cpu() -> None:
    """Images to rounding, and masks to the few points that are as near to two pixels."""
    x, y = torch.rand(16, 3, 33, 48), torch.randint(0, 4, (16, 33, 48))
    drawn = TRANSFORMED.sample(16, torch.Generator().manual_seed(0))
    here = TRANSFORMED.apply(Batch(x, y), drawn)
    there = TRANSFORMED.apply(Batch(x.cuda(), y.cuda()), [draw.cuda() for draw in drawn])
    torch.testing.assert_close(there.x.cpu(), here.x, atol=1e-3, rtol=0)
    assert (there.y.cpu() == here.y).float().mean() > 0.999


def test_captured_transforms_draw_anew_and_move_masks_with_images() -> None:
    """Images and masks that say which pixel they were: in every replay another one, and the same for both."""
    row, column = torch.meshgrid(torch.arange(24), torch.arange(40), indexing="ij")
    x = torch.stack((row, column)).float().expand(8, -1, -1, -1).contiguous().cuda()
    y = (row * 40 + column).expand(8, -1, -1).contiguous().cuda()
    transforms = Transforms((Flip(0.5, 0.5), Crop(3, "edge"), Rotate(30, "edge"), Normalise((1.0, 2.0), (2.0, 4.0))))
    generator = torch.Generator("cuda").manual_seed(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            transforms.apply(Batch(x, y), transforms.sample(8, generator))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        drawn = transforms.sample(8, generator)
        out = transforms.apply(Batch(x, y), drawn)
    angles = []
    for _ in range(20):
        graph.replay()
        was = torch.stack((out.y // 40, out.y % 40), dim=1)
        shown = (
            out.x * torch.tensor([2.0, 4.0]).view(1, 2, 1, 1).cuda() + torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).cuda()
        )
        assert (shown - was).abs().max() <= 0.51
        torch.testing.assert_close(transforms.apply(Batch(x, y), drawn).x, out.x)  # as it is without capture
        angles += drawn[2].tolist()
    assert len(set(angles)) == 160 and max(map(abs, angles)) <= 30


def test_a_run_with_transforms(tmp_path: Path) -> None:
    run = fedfa.run(
        "phantom-sites", root=tmp_path, device="cuda", rounds=2, transforms=["flip", "rotate", "crop", "normalise"]
    )
    assert run.done and run.metrics[-1]["loss"] == run.metrics[-1]["loss"]
