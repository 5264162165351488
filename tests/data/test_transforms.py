"""Transforms: against Pillow, SciPy and NumPy, masks beside images, what is drawn, and what a run sees of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fedfa
from fedfa import Algorithm, Run, UserError, load
from fedfa.data.transforms import (
    Crop,
    Fill,
    Flip,
    Normalise,
    Rotate,
    Transform,
    Transforms,
    flip,
    normalise,
    rotate,
    shift,
)
from fedfa.experiment import parse_override
from fedfa.streams import Streams
from fedfa.task import Batch

Play = Callable[..., Run]
FloatArray = NDArray[np.float32]
FILLS: tuple[Fill, ...] = ("zeros", "edge", "mirror")
SHAPES = [(28, 28), (20, 33), (17, 8)]


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, channels: int = 3, size: tuple[int, int] = (20, 33)) -> Tensor:
    return torch.rand(count, channels, *size, generator=draw())


def each(x: Tensor, one: Callable[[FloatArray, int], FloatArray]) -> Tensor:
    """What a reference makes of every channel of every image; it is given the channel and the image's number."""
    done = [[one(channel.numpy(), number) for channel in image] for number, image in enumerate(x)]
    return torch.from_numpy(np.stack([np.stack(image) for image in done]))


def coordinates(count: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Images whose two channels are row and column, and masks that number the pixels."""
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    image, mask = torch.stack((row, column)).float(), row * width + column
    return image.expand(count, -1, -1, -1).clone(), mask.expand(count, -1, -1).clone()


# Against independent references


def test_flips_are_pillow_s() -> None:
    Image = pytest.importorskip("PIL.Image")
    x = pictures(4)
    columns, rows = torch.tensor([False, True, False, True]), torch.tensor([False, False, True, True])

    def reference(channel: FloatArray, number: int) -> FloatArray:
        image = Image.fromarray(channel)
        if columns[number]:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if rows[number]:
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        return np.array(image)

    assert torch.equal(flip(flip(x, columns), rows, side=-2), each(x, reference))
    part = Flip(0.5, 0.5)
    assert torch.equal(part.apply(x, torch.stack((columns, rows), dim=1)), each(x, reference))


@pytest.mark.parametrize("size", SHAPES)
def test_rotation_is_pillow_s(size: tuple[int, int]) -> None:
    """Where Pillow looks inside the image; it repeats the outermost half pixel, which torch and torchvision blend."""
    Image = pytest.importorskip("PIL.Image")
    angles = torch.tensor([-30.0, -11.3, 4.0, 29.9, 90.0, 180.0])
    x = pictures(len(angles), size=size)
    ours = rotate(x, angles)
    pillow = each(x, lambda c, n: np.array(Image.fromarray(c).rotate(float(angles[n]), Image.Resampling.BILINEAR)))
    inside = _looked_at(angles, *size, margin=1e-3)
    assert inside.float().mean() > 0.5
    assert ((ours - pillow).abs() * inside.unsqueeze(1)).max() < 2e-4


@pytest.mark.parametrize("size", SHAPES)
def test_masks_are_turned_as_pillow_turns_them(size: tuple[int, int]) -> None:
    """Pixel for pixel, but where a point is as near to two pixels, to within Pillow's fixed-point steps."""
    Image = pytest.importorskip("PIL.Image")
    angles = torch.tensor([-30.0, -11.3, 4.0, 29.9])
    mask = torch.randint(0, 5, (len(angles), 1, *size), generator=draw())
    ours = rotate(mask, angles, nearest=True)
    assert ours.dtype == mask.dtype
    pillow = each(
        mask,
        lambda c, n: np.array(Image.fromarray(c.astype(np.uint8)).rotate(float(angles[n]), Image.Resampling.NEAREST)),
    )
    rows, columns = _source(angles, *size)
    clear = torch.stack([((place % 1) - 0.5).abs() > 5e-3 for place in (rows, columns)]).all(0)
    assert clear.float().mean() > 0.95
    assert torch.equal(ours.squeeze(1)[clear], pillow.long().squeeze(1)[clear])


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize(("fill", "mode"), list(zip(FILLS, ("grid-constant", "nearest", "reflect"), strict=True)))
def test_rotation_and_its_fills_are_scipy_s(size: tuple[int, int], fill: Fill, mode: str) -> None:
    """All over the image, and as far outside as a turn by 90° of an oblong image looks."""
    ndimage = pytest.importorskip("scipy.ndimage")
    angles = torch.tensor([-30.0, 7.7, 30.0, 90.0, 135.0])
    x = pictures(len(angles), size=size)
    places = np.stack([place.numpy() for place in _source(angles, *size)])
    scipy = each(x, lambda c, n: ndimage.map_coordinates(c, places[:, n], order=1, mode=mode))
    assert (rotate(x, angles, fill) - scipy).abs().max() < 2e-4


def _source(angles: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the image that a turned one's pixels show, in float64."""
    turn = torch.deg2rad(angles.double()).view(-1, 1, 1)
    y = torch.arange(height).view(1, -1, 1) - (height - 1) / 2
    x = torch.arange(width).view(1, 1, -1) - (width - 1) / 2
    rows = turn.sin() * x + turn.cos() * y + (height - 1) / 2
    columns = turn.cos() * x - turn.sin() * y + (width - 1) / 2
    return rows, columns


def _looked_at(angles: Tensor, height: int, width: int, margin: float) -> Tensor:
    rows, columns = _source(angles, height, width)
    down = (rows >= margin) & (rows <= height - 1 - margin)
    return down & (columns >= margin) & (columns <= width - 1 - margin)


def test_a_quarter_turn_goes_against_the_clock() -> None:
    x = pictures(1, size=(9, 9))
    assert torch.allclose(rotate(x, torch.tensor([90.0])), torch.rot90(x, 1, (-2, -1)), atol=1e-5)


@pytest.mark.parametrize("size", [*SHAPES, (2, 3)])
@pytest.mark.parametrize(("fill", "mode"), list(zip(FILLS, ("constant", "edge", "symmetric"), strict=True)))
def test_crops_are_numpy_s(size: tuple[int, int], fill: Fill, mode: Any) -> None:
    """Padding (by more than the image's size, for the smallest), and then a cut at every corner and between."""
    by = torch.tensor([[-4, -4], [4, 4], [0, 0], [3, -2], [-1, 4]])
    x = pictures(len(by), size=size)

    def reference(channel: FloatArray, number: int) -> FloatArray:
        top, left = (by[number] + 4).tolist()
        return np.pad(channel, 4, mode)[top : top + size[0], left : left + size[1]]

    assert torch.equal(shift(x, by, fill), each(x, reference))


def test_crops_are_pillow_s() -> None:
    ImageOps = pytest.importorskip("PIL.ImageOps")
    Image = pytest.importorskip("PIL.Image")
    x = pictures(3)
    by = torch.tensor([[-4, 4], [2, 1], [0, -3]])

    def reference(channel: FloatArray, number: int) -> FloatArray:
        down, along = by[number].tolist()
        padded = ImageOps.expand(Image.fromarray(channel), 4)
        return np.array(padded.crop((4 + along, 4 + down, 4 + along + 33, 4 + down + 20)))

    assert torch.equal(shift(x, by), each(x, reference))


def test_normalising_is_what_numpy_says() -> None:
    x = pictures(3)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    wanted = (x.numpy() - np.array(mean, np.float32)[:, None, None]) / np.array(std, np.float32)[:, None, None]
    assert torch.equal(normalise(x, mean, std), torch.from_numpy(wanted))
    assert torch.equal(normalise(x, (0.5,), (0.25,)), (x - 0.5) * 4)


# Masks beside images


@pytest.mark.parametrize("part", [Flip(0.5, 0.5), Crop(5, "edge"), Crop(5, "mirror"), Rotate(30, "edge")])
def test_a_mask_moves_with_its_image(part: Transform) -> None:
    """Every pixel of the mask says which pixel it was; the image says the same, to half a pixel where interpolated.
    At the edge, a point outside is as near to the last pixel as it gets, which the image says too."""
    x, y = coordinates(64, 21, 34)
    transforms = Transforms((part,))
    batch = transforms.apply(Batch(x, y), transforms.sample(64, draw()))
    assert not torch.equal(batch.x, x)
    was = torch.stack((batch.y // 34, batch.y % 34), dim=1)
    gap = (batch.x - was).abs().max()
    assert gap <= (0.5 + 1e-3 if isinstance(part, Rotate) else 0)


def test_all_of_them_together_keep_mask_and_image_together() -> None:
    x, y = coordinates(64, 32, 32)
    transforms = Transforms((Flip(0.5, 0.5), Crop(3, "edge"), Rotate(30, "edge"), Normalise((16.0,), (8.0,))))
    batch = transforms.apply(Batch(x, y), transforms.sample(64, draw()))
    was = torch.stack((batch.y // 32, batch.y % 32), dim=1)
    assert (batch.x * 8 + 16 - was).abs().max() <= 0.5 + 1e-3


def test_where_there_was_no_image_the_mask_is_background() -> None:
    ones, zeros = torch.ones(8, 1, 16, 16), torch.zeros(8, 1, 16, 16)
    for part in (Rotate(30), Crop(4)):
        drawn = part.sample(8, draw())
        for outside in (part.apply(ones, drawn) == 0, part.apply(ones.long(), drawn, mask=True) == 0):
            assert outside.any() and not outside[:, :, 5:11, 5:11].any()
        assert torch.equal(part.apply(zeros, drawn), zeros)


def test_labels_of_images_stay_as_they_are() -> None:
    x, y = pictures(6), torch.arange(6)
    transforms = Transforms((Flip(1.0), Rotate(), Crop(), Normalise()))
    batch = transforms.apply(Batch(x, y), transforms.sample(6, draw()))
    assert torch.equal(batch.y, y) and batch.x.shape == x.shape


# What is drawn


def test_flips_come_as_often_as_they_should() -> None:
    drawn = Flip(0.5, 0.2).sample(20_000, draw()).double()
    assert drawn.mean(0).tolist() == pytest.approx([0.5, 0.2], abs=4 * 0.5 / 20_000**0.5)
    assert (drawn[:, 0] * drawn[:, 1]).mean().item() == pytest.approx(0.1, abs=0.01)  # one says nothing of the other
    assert not Flip(0.0, 0.0).sample(1000, draw()).any() and Flip(1.0, 1.0).sample(1000, draw()).all()


def test_angles_are_uniform() -> None:
    stats = pytest.importorskip("scipy.stats")
    angles = Rotate(30).sample(20_000, draw())
    assert angles.abs().max() <= 30
    assert stats.kstest(angles.numpy(), "uniform", args=(-30, 60)).pvalue > 0.001


def test_places_of_crops_are_uniform() -> None:
    stats = pytest.importorskip("scipy.stats")
    by = Crop(2).sample(20_000, draw())
    assert by.min() == -2 and by.max() == 2
    counts = torch.bincount((by[:, 0] + 2) * 5 + by[:, 1] + 2, minlength=25)  # all pairs, so both sides independent
    assert stats.chisquare(counts.numpy()).pvalue > 0.001


def test_every_sample_has_a_draw_of_its_own() -> None:
    x = pictures(1).expand(16, -1, -1, -1)
    for part in (Rotate(), Crop()):
        out = part.apply(x, part.sample(16, draw()))
        assert len({image.numpy().tobytes() for image in out}) >= 12
    assert len({image.numpy().tobytes() for image in Flip().apply(x, Flip().sample(16, draw()))}) == 2


def test_draws_follow_the_stream() -> None:
    transforms = Transforms((Flip(0.5, 0.5), Rotate(), Crop()))
    x, y = coordinates(8, 16, 16)

    def seen(round: int = 1, client: str = "a", other: str = "") -> Tensor:
        streams = Streams(0, round, client)
        if other:
            torch.rand(5, generator=streams(other))
        return transforms.training(Batch(x, y), streams).x

    assert torch.equal(seen(), seen()) and torch.equal(seen(), seen(other="noise"))
    assert not torch.equal(seen(), seen(round=2)) and not torch.equal(seen(), seen(client="b"))


# Edges


@pytest.mark.parametrize("part", [Flip(0.5, 0.5), Rotate(), Crop(), Crop(fill="mirror"), Normalise()])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 1, 9), (2, 1, 7, 1), (3, 5, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shapes_and_types_stay(part: Transform, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.rand(shape, generator=draw()).to(dtype)
    kept = x.clone()
    out = part.apply(x, part.sample(shape[0], draw()))
    assert out.shape == x.shape and out.dtype == dtype and torch.isfinite(out).all()
    assert torch.equal(x, kept)  # what was given is not written to
    for kind in (torch.uint8, torch.int64):
        mask = torch.randint(0, 4, (shape[0], 1, *shape[2:]), generator=draw()).to(kind)
        moved = part.apply(mask, part.sample(shape[0], draw()), mask=True)
        assert moved.shape == mask.shape and moved.dtype == kind and set(moved.unique().tolist()) <= {0, 1, 2, 3}


def test_images_that_are_not_contiguous() -> None:
    x = pictures(4)
    for laid_out in (x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        for part in (Flip(), Rotate(), Crop()):
            drawn = part.sample(4, draw())
            assert torch.equal(part.apply(laid_out, drawn), part.apply(x, drawn))


def test_no_flip_no_shift_and_no_turn_change_nothing() -> None:
    x = pictures(4)
    for part in (Flip(0.0), Crop(0)):
        assert torch.equal(part.apply(x, part.sample(4, draw())), x)
    assert torch.allclose(Rotate(0).apply(x, Rotate(0).sample(4, draw())), x, atol=1e-5)


def test_nothing_goes_to_the_host() -> None:
    """Tensors without numbers in them: whatever read a number, or branched on one, would raise."""
    transforms = Transforms((Flip(0.5, 0.5), Rotate(), Crop(), Crop(fill="mirror"), Normalise((0.1, 0.2, 0.3), (1.0,))))
    x, y = pictures(4), torch.zeros(4, 20, 33, dtype=torch.int64)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        batch = Batch(fake.from_tensor(x), fake.from_tensor(y))
        out = transforms.apply(batch, transforms.sample(4, draw()))
        assert out.x.shape == x.shape and out.y.shape == y.shape
        with pytest.raises(Exception, match="_local_scalar_dense"):
            out.x.sum().item()  # so that this test can fail


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Flip(1.5), "flip: horizontal is a probability, between 0 and 1, not 1.5"),
        (lambda: Flip(vertical=-0.1), "flip: vertical is a probability, between 0 and 1, not -0.1"),
        (lambda: Rotate(-3), "rotate: degrees is the largest angle, between 0 and 180, not -3"),
        (lambda: Rotate(float("nan")), "rotate: degrees is the largest angle, between 0 and 180, not nan"),
        (lambda: Crop(-1), "crop: padding is a number of pixels, 0 or more, not -1"),
        (lambda: Normalise(std=(1.0, 0.0)), r"normalise: std is of numbers above 0, not \[1.0, 0.0\]"),
        (lambda: Normalise(mean=(float("inf"),)), r"normalise: mean is of finite numbers, not \[inf\]"),
        (lambda: Normalise(mean=()), "normalise: mean and std are a number for every channel, or one for all"),
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], Transform], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}$"):
        make()


# In an experiment


def test_the_key_takes_names_tables_and_one_of_them(tiny: dict[str, Any]) -> None:
    wanted = (
        {"name": "flip", "horizontal": 0.5, "vertical": 0.0},
        {"name": "rotate", "degrees": 15.0, "fill": "zeros"},
    )
    assert load(tiny, {"transforms": ["flip", {"name": "rotate", "degrees": 15}]}).transforms == wanted
    assert load(tiny, {"transforms": "flip"}).transforms == wanted[:1]
    assert load(tiny, {"transforms": {"name": "rotate", "degrees": 15}}).transforms == wanted[1:]
    assert load(tiny).transforms == load(tiny, {"transforms": []}).transforms == ()
    typed = [parse_override("transforms=[flip,rotate]"), parse_override("transforms=[{name='crop', padding=2}]")]
    assert [part["name"] for part in load(tiny, dict(typed[:1])).transforms] == ["flip", "rotate"]
    assert load(tiny, dict(typed[1:])).transforms == ({"name": "crop", "padding": 2, "fill": "zeros"},)


def test_the_order_of_transforms_is_in_a_run_s_name(tiny: dict[str, Any]) -> None:
    names = [[], ["flip"], ["flip", "rotate"], ["rotate", "flip"]]
    assert len({load(tiny, {"transforms": part}).digest() for part in names}) == 4


def test_a_config_with_transforms_can_be_written_and_read(tiny: dict[str, Any], tmp_path: Any) -> None:
    config = load(tiny, {"transforms": ["flip", {"name": "normalise", "mean": [0.1, 0.2, 0.3]}]})
    (tmp_path / "shown.toml").write_text(config.toml())
    again = load(tmp_path / "shown.toml")
    assert again.transforms == config.transforms and again.digest() == config.digest()


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("flp", "no transform is named 'flp'; did you mean 'flip'?"),
        (["flip", 3], "transform is a name or a table with a name, not 3"),
        (7, "transform is a name or a table with a name, not 7"),
        ([{"degrees": 3}], "transform is a name or a table with a name, not {'degrees': 3}"),
        ([{"name": "rotate", "degree": 3}], "transform 'rotate' has no setting 'degree'; did you mean 'degrees'?"),
        ([{"name": "rotate", "degrees": 400}], "transform: rotate: degrees is the largest angle, between 0 and 180"),
        ([{"name": "rotate", "fill": "black"}], "transform.fill: should be 'zeros', 'edge' or 'mirror', not 'black'"),
        ([{"name": "normalise", "std": [0.0]}], "transform: normalise: std is of numbers above 0, not [0.0]"),
    ],
)
def test_a_mistake_is_one_line(tiny: dict[str, Any], value: Any, line: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tiny, {"transforms": value})
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_normalising_channels_that_are_not_there(play: Play) -> None:
    with pytest.raises(UserError, match=r"^normalise: mean has 2 numbers, and the images have 3 channels$"):
        play(transforms=[{"name": "normalise", "mean": [0.5, 0.5]}])


# In a run


def test_draws_of_transforms_disturb_no_others(play: Play, assert_same: Callable[[Run, Run], None]) -> None:
    """A flip that never happens draws as often as one that does; all else is as without it, bit for bit."""
    settings: dict[str, Any] = {"algorithm": "fedfa", "epochs": 2}
    assert_same(play("none", **settings), play("never", transforms=[{"name": "flip", "horizontal": 0}], **settings))


def test_the_same_run_twice(play: Play, assert_same: Callable[[Run, Run], None]) -> None:
    parts = ["flip", "rotate", {"name": "crop", "padding": 2}, "normalise"]
    one, other, plain = play("one", transforms=parts), play("other", transforms=parts), play("plain")
    assert_same(one, other)
    assert one.metrics[-1]["loss"] != plain.metrics[-1]["loss"]


@dataclass(frozen=True)
class Watching(Algorithm):
    """FedAvg that notes what the network is given."""

    def inputs(self, x: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        SEEN.append((torch.is_grad_enabled(), x))
        return x


SEEN: list[tuple[bool, Tensor]] = []


def test_training_sees_all_and_evaluation_what_always_applies(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fedfa.ALGORITHMS._targets, "watching", Watching)
    monkeypatch.setitem(fedfa.ALGORITHMS.lines, "watching", "")
    federation = fedfa.SOURCES["tiny"]().build(0)
    black = torch.tensor((0 - 0.25) / 0.5)
    SEEN.clear()
    play(
        algorithm="watching",
        rounds=1,
        transforms=[{"name": "rotate", "degrees": 180}, {"name": "normalise", "mean": [0.25], "std": [0.5]}],
    )
    trained = torch.cat([x for training, x in SEEN if training])
    evaluated = torch.cat([x for training, x in SEEN if not training])
    assert len(trained) == 14 + 10 + 7 and (trained == black).any((1, 2, 3)).float().mean() > 0.8
    wanted = [
        federation.batch(client.of(split))[0] for split in ("val", "test") for client in federation.clients.values()
    ]
    assert torch.equal(evaluated, (torch.cat(wanted) - 0.25) / 0.5)


@pytest.mark.parametrize("name", ["fedmix", "fedharmo"])
def test_what_clients_share_is_normalised_as_their_batches_are(play: Play, name: str) -> None:
    """Normalising images in the run is the same as training on a federation that was normalised beforehand."""
    run = play(algorithm=name, rounds=1, transforms=[{"name": "normalise", "mean": [0.0], "std": [0.5]}])
    plain = play(algorithm=name, rounds=1)
    for key in ("images", "amplitude"):
        mine, theirs = (found[0].memory.get(key) for r in (run, plain) if (found := r.latest()) is not None)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, 2 * theirs)


def test_segmentation_with_every_transform(play: Play) -> None:
    run = play(
        source={"name": "phantom-sites", "size": 32, "cases": 6},
        network="unet",
        transforms=["flip", "rotate", "crop", "normalise"],
        rounds=1,
    )
    assert run.done and np.isfinite(run.metrics[-1]["loss"])


def test_batches_keep_what_else_they_hold() -> None:
    x, y = coordinates(4, 8, 8)
    batch = replace(Batch(x, y), partner=y, share=torch.tensor(0.5))
    out = Transforms((Flip(1.0),)).apply(batch, [torch.ones(4, 2, dtype=torch.bool)])
    assert out.share is batch.share and out.partner is batch.partner
