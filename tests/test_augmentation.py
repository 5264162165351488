"""Augmentations: labels are mixed as images and features are, streams stay apart, and all of it trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import fedfa
from fedfa import ClientIndex, Federation, Run, UserError
from fedfa.augmentation import DSU, Augmentation, CutMix, ManifoldMixup, MixStyle, Mixup, MoEx
from fedfa.augmentation.cutmix import box
from fedfa.experiment import parse_override
from fedfa.layers import FFA
from fedfa.layers import ManifoldMixup as ManifoldMixupLayer
from fedfa.layers import MixStyle as MixStyleLayer
from fedfa.layers import MoEx as MoExLayer
from fedfa.layers.manifold_mixup import Drawn
from fedfa.layers.randomness import Draws
from fedfa.simulate import build_model
from fedfa.streams import Streams, generator
from fedfa.task import Batch, Classification, Segmentation
from reference import augmentations as reference

NAMES = ["mixup", "cutmix", "manifold-mixup", "mixstyle", "moex"]
every_name = pytest.mark.parametrize("name", NAMES)


def images(batch: int = 6, channels: int = 3, side: int = 8, seed: int = 0) -> Tensor:
    return torch.rand(batch, channels, side, side, generator=torch.Generator().manual_seed(seed))


class Step:
    """What an augmentation does to batches whose labels say which sample is which."""

    def __init__(self, augmentation: Augmentation, stages: int = 3, seed: int = 0) -> None:
        made = [augmentation.layer(3, stage) for stage in range(1, stages + 1)]
        self.layers = [layer for layer in made if layer is not None]
        self.augmentation = augmentation
        self.draws = Draws(nn.Sequential(*self.layers))
        self.streams = Streams(seed, 1, "a")

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Batch:
        self.draws.sample(len(x), self.streams)
        y = torch.arange(len(x)) if y is None else y
        return self.augmentation.mix(Batch(x, y), self.draws, self.streams)


def number(tensor: Tensor | None) -> float:
    assert tensor is not None
    return tensor.item()


def order(batch: Batch) -> list[int]:
    """Who is mixed with whom, which the labels tell."""
    assert batch.partner is not None
    return [int(label) for label in batch.partner]


class TestMixup:
    def test_images_and_labels_have_the_same_share_and_partners(self) -> None:
        step, x = Step(Mixup()), images()
        for _ in range(20):
            batch = step(x)
            wanted = reference.mixup(x.double().numpy(), order(batch), number(batch.share))
            torch.testing.assert_close(batch.x.double(), torch.from_numpy(wanted), atol=1e-6, rtol=1e-5)
            assert torch.equal(batch.y, torch.arange(6))

    @pytest.mark.parametrize("alpha", [0.2, 1.0])
    def test_one_share_a_batch_from_beta(self, alpha: float) -> None:
        step, x = Step(Mixup(alpha)), images(2, 1, 1)
        shares = [number(step(x).share) for _ in range(3000)]
        assert all(0 <= share <= 1 for share in shares)
        assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).statistic < 1.95 / math.sqrt(3000)

    def test_masks_are_mixed_by_the_loss(self) -> None:
        step, x = Step(Mixup()), images()
        masks = torch.randint(2, (6, 8, 8), generator=torch.Generator().manual_seed(1))
        other = Step(Mixup())(x)
        batch = step(x, masks)
        assert batch.partner is not None and torch.equal(batch.partner, masks[order(other)])
        output = torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(2))
        share, task = number(batch.share), Segmentation()
        wanted = share * task.loss(output, masks) + (1 - share) * task.loss(output, masks[order(other)])
        torch.testing.assert_close(task.batch_loss(output, batch), wanted)


class TestCutMix:
    def test_a_box_by_hand(self) -> None:
        """λ = 3/4: half of each side, two pixels of four; in the corner the rest is cut off."""
        quarter = torch.tensor(0.75)
        middle = torch.zeros(4, 4, dtype=torch.bool)
        middle[1:3, 1:3] = True
        assert torch.equal(box(quarter, torch.tensor([0.5, 0.5]), (4, 4)), middle)
        corner = torch.zeros(4, 4, dtype=torch.bool)
        corner[0, 3] = True
        assert torch.equal(box(quarter, torch.tensor([0.0, 1.0]), (4, 4)), corner)
        assert box(torch.tensor(0.0), torch.tensor([0.5, 0.5]), (4, 6)).all()
        assert not box(torch.tensor(1.0), torch.tensor([0.5, 0.5]), (5, 5)).any()

    @pytest.mark.parametrize("sides", [(7, 11), (8, 8), (1, 5), (3, 4, 5)])
    def test_boxes_equal_the_reference(self, sides: tuple[int, ...]) -> None:
        draw = torch.Generator().manual_seed(0)
        for _ in range(100):
            share, centre = torch.rand((), generator=draw), torch.rand(len(sides), generator=draw)
            wanted = reference.box_pixels(share.item(), centre.tolist(), sides)
            assert [tuple(place) for place in box(share, centre, sides).nonzero().tolist()] == wanted

    def test_the_area_is_right_on_average(self) -> None:
        """A box whose middle is uniform covers r − r²/4 of a side of 1, for r = √(1 − λ) of it."""
        draw, share = torch.Generator().manual_seed(0), torch.tensor(0.36)
        areas = [box(share, torch.rand(2, generator=draw), (40, 40)).float().mean().item() for _ in range(4000)]
        assert np.mean(areas) == pytest.approx((0.8 - 0.16) ** 2, abs=4 * np.std(areas) / math.sqrt(4000))

    def test_the_share_is_the_area_kept_and_labels_follow_pixels(self) -> None:
        step = Step(CutMix())
        x = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 8, 8).contiguous()  # every pixel says whose it is
        shares = []
        for _ in range(60):
            batch = step(x)
            kept = (batch.x == x).float().mean((1, 2, 3))
            for sample, partner in enumerate(order(batch)):
                assert set(batch.x[sample].unique().tolist()) <= {float(sample), float(partner)}
                if partner != sample:
                    assert kept[sample].item() == pytest.approx(number(batch.share), abs=1e-6)
            shares.append(number(batch.share))
        assert len(set(shares)) > 20

    def test_equals_the_reference(self) -> None:
        step, x = Step(CutMix()), images()
        own = torch.arange(6.0).view(6, 1, 1, 1).expand_as(x)
        cut = (Step(CutMix())(own).x != own).any(0).any(0)  # the same draws: which pixels are another's
        batch = step(x)
        wanted = reference.cutmix(x.double().numpy(), order(batch), [(row, column) for row, column in cut.nonzero()])
        assert cut.any() and torch.equal(batch.x.double(), torch.from_numpy(wanted))

    def test_masks_are_pasted_with_the_images(self) -> None:
        masks = torch.randint(3, (6, 8, 8), generator=torch.Generator().manual_seed(1))
        x = masks.float().unsqueeze(1).repeat(1, 3, 1, 1)
        step, changed = Step(CutMix()), 0
        for _ in range(20):
            batch = step(x, masks)
            assert batch.partner is None and batch.share is None and batch.y.dtype == torch.long
            assert torch.equal(batch.x, batch.y.float().unsqueeze(1).repeat(1, 3, 1, 1))
            changed += not torch.equal(batch.y, masks)
        assert changed > 10

    def test_averaged_masks_are_pasted_too(self) -> None:
        """Labels as shares of the classes, (B, classes, H, W)."""
        masks = torch.rand(6, 2, 8, 8, generator=torch.Generator().manual_seed(1))
        batch = Step(CutMix())(masks.clone(), masks)
        assert batch.partner is None and torch.equal(batch.x, batch.y) and not torch.equal(batch.y, masks)

    def test_p(self) -> None:
        x, step = images(), Step(CutMix(p=0.3, alpha=8.0))
        changed = [not torch.equal(step(x).x, x) for _ in range(600)]
        assert np.mean(changed) == pytest.approx(0.3, abs=0.06)
        batch = Batch(x, torch.arange(6))
        assert CutMix(p=0).mix(batch, step.draws, step.streams) is batch


class TestManifoldMixup:
    def test_labels_are_mixed_as_the_one_place_that_is(self) -> None:
        step, x = Step(ManifoldMixup()), images()
        features = [images(seed=seed) for seed in (1, 2, 3)]
        places = set()
        for _ in range(60):
            batch = step(x)
            outputs = [layer(feature) for layer, feature in zip(step.layers, features, strict=True)]
            mixed = []
            for place, (before, after) in enumerate(zip([x, *features], [batch.x, *outputs], strict=True)):
                if torch.equal(before, after):
                    continue
                mixed.append(place)
                wanted = reference.mixup(before.double().numpy(), order(batch), number(batch.share))
                torch.testing.assert_close(after.double(), torch.from_numpy(wanted), atol=1e-6, rtol=1e-5)
            assert len(mixed) == 1
            places.update(mixed)
        assert places == {0, 1, 2, 3}

    def test_without_the_input(self) -> None:
        step, x = Step(ManifoldMixup(input=False)), images()
        for _ in range(30):
            assert step(x).x is x
            assert sum(not torch.equal(layer(x), x) for layer in step.layers) == 1

    def test_skips_above_the_chosen_stage_stay_unmixed_in_a_unet(self) -> None:
        """What the docs say: with stage 3 mixed, skips of stages 1 to 3 are as they were, that of stage 4 is not."""
        torch.manual_seed(0)
        model = fedfa.nets.UNet(2, augment=lambda c: ManifoldMixupLayer())
        for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
            norm.eval()  # whose statistics would tell all samples of all others
        skips: list[Tensor] = []
        for encoder in model.encoders:
            encoder.register_forward_hook(lambda module, args, output: skips.append(output.detach()))
        x, outputs = images(4, 3, 32), []
        for place in (None, 3):
            for stage, layer in enumerate(model.augments, start=1):
                layer.drawn = Drawn(torch.tensor(stage == place), torch.tensor(0.5), torch.tensor([1, 2, 3, 0]))
            skips.clear()
            model(x)
            outputs.append(list(skips))
        same = [torch.equal(plain, mixed) for plain, mixed in zip(*outputs, strict=True)]
        assert same == [True, True, True, False, False]


class TestMixStyle:
    def test_labels_are_kept_and_shallow_stages_alone_are_mixed(self) -> None:
        step, x = Step(MixStyle(), stages=5), images()
        assert [isinstance(layer, MixStyleLayer) for layer in step.layers] == [True, True]
        batch = step(x)
        assert batch.x is x and batch.partner is None and batch.share is None
        assert len(Step(MixStyle(stages=(4,)), stages=5).layers) == 1


class TestMoEx:
    def test_labels_are_mixed_where_the_gate_fires_with_the_same_partners(self) -> None:
        step, x = Step(MoEx(p=0.4, lam=0.7)), images()
        assert len(step.layers) == 1
        fired = 0
        for _ in range(200):
            batch = step(x)
            assert batch.x is x
            out = step.layers[0](x)
            if number(batch.share) == 1:
                assert torch.equal(out, x)
                continue
            fired += 1
            assert number(batch.share) == pytest.approx(0.7)
            wanted = reference.moex(x.double().numpy(), order(batch), 1e-5)
            torch.testing.assert_close(out.double(), torch.from_numpy(wanted), atol=1e-4, rtol=1e-4)
        assert fired / 200 == pytest.approx(0.4, abs=0.12)

    def test_the_loss_where_the_gate_is_shut_is_the_plain_one(self) -> None:
        step, x = Step(MoEx(p=1e-9)), images()
        batch, output = step(x), torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
        assert torch.equal(Classification().batch_loss(output, batch), Classification().loss(output, batch.y))


class TestStreams:
    @pytest.mark.parametrize("augmentation", [Mixup(), CutMix(), ManifoldMixup(), MixStyle(), MoEx()])
    def test_draws_depend_on_nothing_else_that_is_drawn(self, augmentation: Augmentation) -> None:
        def seen(busy: bool) -> list[Tensor]:
            step, x, found = Step(augmentation), images(), []
            step.draws = Draws(nn.Sequential(*step.layers, *([FFA(3), FFA(3)] if busy else [])))
            for _ in range(3):
                if busy:
                    torch.rand(7)
                    torch.rand(7, generator=step.streams("another"))
                batch = step(x)
                found += [batch.x, *(layer(x) for layer in step.layers)]
                found += [batch.share] if batch.share is not None else []
            return found

        for alone, beside in zip(seen(False), seen(True), strict=True):
            assert torch.equal(alone, beside)


@dataclass(frozen=True)
class Spots:
    """Two clients with bright squares to segment, 16 pixels a side: a U-Net's bottleneck sees one pixel."""

    def build(self, seed: int) -> Federation:
        draw = generator(seed, "spots")
        x = 80 * torch.rand(20, 3, 16, 16, generator=draw)
        y = torch.zeros(20, 16, 16, dtype=torch.uint8)
        for sample, (row, column) in enumerate(torch.randint(10, (20, 2), generator=draw).tolist()):
            y[sample, row : row + 6, column : column + 6] = 1
            x[sample, :, row : row + 6, column : column + 6] += 120
        index = torch.arange(20).view(2, 10)
        clients = {name: ClientIndex(own[:6], own[6:8], own[8:]) for name, own in zip("ab", index, strict=True)}
        return Federation("spots", "segmentation", x.to(torch.uint8), y, ("background", "spot"), clients)


if "spots" not in list(fedfa.SOURCES):
    fedfa.SOURCES.register("spots", Spots, "squares to segment")


class TestRuns:
    @every_name
    @pytest.mark.parametrize("algorithm", ["fedavg", "fedfa", "fedsam", "fedmix", "fedbn"])
    def test_trains_and_repeats_itself(
        self, play: Callable[..., Run], assert_same: Callable[[Run, Run], None], name: str, algorithm: str
    ) -> None:
        """TinyNet has one stage: Manifold Mixup mixes there or the images, MixStyle and MoEx there."""
        settings: dict[str, Any] = {"algorithm": algorithm, "augmentation": name, "rounds": 2}
        settings |= {"augmentation.p": 1.0} if name in ("mixstyle", "moex") else {}
        first, second = play("one", **settings), play("two", **settings)
        assert_same(first, second)
        plain = play("plain", algorithm=algorithm, rounds=2)
        assert all(math.isfinite(line["loss"]) and not line["refused"] for line in first.metrics)
        assert first.metrics[-1]["loss"] != plain.metrics[-1]["loss"]

    def test_fedfa_finds_its_layers_beside_others(self, play: Callable[..., Run]) -> None:
        run = play(algorithm="fedfa", augmentation="mixstyle", **{"algorithm.p": 1.0})
        latest = run.latest()
        assert latest is not None
        gamma = latest[0].memory["augments.0.1.gamma_mean"]
        assert gamma.sum().item() == pytest.approx(4) and gamma.std() > 0

    @pytest.mark.parametrize("name", ["mixstyle", "moex", "cutmix"])
    @pytest.mark.parametrize("algorithm", ["fedavg", "fedfa"])
    def test_p_zero_is_no_augmentation_bit_for_bit(self, play: Callable[..., Run], name: str, algorithm: str) -> None:
        off = play("off", algorithm=algorithm, augmentation=name, **{"augmentation.p": 0})
        plain = play("plain", algorithm=algorithm)
        ours, theirs = off.latest(), plain.latest()
        assert ours is not None and theirs is not None
        assert [line["loss"] for line in off.metrics] == [line["loss"] for line in plain.metrics]
        assert all(torch.equal(ours[0].model[key], value) for key, value in theirs[0].model.items())
        memory = zip(ours[0].memory.values(), theirs[0].memory.values(), strict=True)  # names differ: augments.0.1
        assert all(torch.equal(one, other) for one, other in memory)

    @every_name
    def test_segmentation(self, tmp_path: Path, name: str) -> None:
        config = {
            "source": "spots", "network": "unet", "algorithm": "fedfa", "augmentation": name, "rounds": 1,
            "batch_size": 3, "lr": 0.05, "threads": 1, "device": "cpu",
        }  # fmt: skip
        run = fedfa.run(config, root=tmp_path)
        assert math.isfinite(run.metrics[-1]["loss"]) and not run.metrics[-1]["refused"]
        assert run.metrics[-1]["clients"] == ["a", "b"]


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"name": "mixup", "alpha": 0}, "alpha, of the Beta distribution, must be positive, not 0.0"),
            ({"name": "cutmix", "alpha": -1}, "alpha, of the Beta distribution, must be positive, not -1.0"),
            ({"name": "cutmix", "p": 1.1}, "p is a probability, between 0 and 1, not 1.1"),
            ({"name": "manifold-mixup", "alpha": 0}, "alpha, of the Beta distribution, must be positive, not 0.0"),
            ({"name": "mixstyle", "p": -0.1}, "p is a probability, between 0 and 1, not -0.1"),
            ({"name": "mixstyle", "alpha": 0}, "alpha, of the Beta distribution, must be positive, not 0.0"),
            ({"name": "mixstyle", "eps": 0}, "eps must be positive, not 0.0"),
            (
                {"name": "mixstyle", "stages": []},
                "stages counts the network's stages from 1, and names at least one, not ()",
            ),
            (
                {"name": "mixstyle", "stages": [0, 1]},
                "stages counts the network's stages from 1, and names at least one, not (0, 1)",
            ),
            ({"name": "moex", "p": 2}, "p is a probability, between 0 and 1, not 2.0"),
            ({"name": "moex", "lam": 1.5}, "lam is the share of a sample's own label, between 0 and 1, not 1.5"),
            ({"name": "moex", "stage": 0}, "stage counts the network's stages from 1, not 0"),
            ({"name": "moex", "eps": 0}, "eps must be positive, not 0.0"),
            ({"name": "dsu", "p": 2}, "p is a probability, between 0 and 1, not 2.0"),
        ],
    )
    def test_out_of_range_is_one_line(self, tiny: dict[str, Any], settings: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError) as error:
            fedfa.load(tiny, {"augmentation": settings})
        assert str(error.value) == f"augmentation: {message}"

    def test_defaults(self) -> None:
        assert (Mixup().alpha, CutMix().alpha, CutMix().p, ManifoldMixup().alpha) == (1.0, 1.0, 1.0, 2.0)
        assert (MixStyle().p, MixStyle().alpha, MixStyle().stages) == (0.5, 0.1, (1, 2))
        assert (MoEx().p, MoEx().lam, MoEx().stage) == (0.5, 0.9, 1)
        assert isinstance(DSU().layer(2, 3), FFA)

    def test_lists_from_the_command_line(self, tiny: dict[str, Any]) -> None:
        key, value = parse_override("augmentation.stages=[1]")
        config = fedfa.load(tiny, {"augmentation": "mixstyle", key: value})
        assert config.build("augmentation") == MixStyle(stages=(1,))
        again = fedfa.load(config)
        assert again.digest() == config.digest()

    @pytest.mark.parametrize(
        "settings", [{"name": "moex", "stage": 2}, {"name": "mixstyle", "stages": [3]}], ids=["moex", "mixstyle"]
    )
    def test_a_network_without_such_a_stage(self, play: Callable[..., Run], settings: dict[str, Any]) -> None:
        with pytest.raises(UserError, match=f"^augmentation '{settings['name']}' follows no stage that network 'tiny-"):
            play(augmentation=settings)

    def test_layers_of_a_network_know_their_stage(self) -> None:
        """`network.stages` leaves the count of stages as it is."""
        given = {"source": "tiny", "network": {"name": "lenet", "stages": [2]}}
        config = fedfa.load(given, {"augmentation": "moex", "augmentation.stage": 2})
        federation = config.build("source").build(0)
        model = build_model(config, federation, config.build("algorithm"), config.build("augmentation"))
        assert isinstance(model, fedfa.nets.LeNet)
        assert [isinstance(layer, MoExLayer) for layer in model.augments] == [False, True]
