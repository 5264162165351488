"""The networks against the numbers of the paper's tables: parameters, shapes, and where augmentation happens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfa.layers.ffa import FFA
from fedfa.nets import AlexNet, LeNet, ResNet18, UNet, augment_layers

Build = Callable[..., Any]

NETWORKS: list[tuple[Build, tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]] = [
    # network, input, output, features that reach each stage's layer
    (
        partial(AlexNet, 10),
        (2, 3, 256, 256),
        (2, 10),
        [(64, 31, 31), (192, 15, 15), (384, 15, 15), (256, 15, 15), (256, 7, 7)],
    ),
    (
        partial(UNet, 2),
        (2, 3, 64, 32),
        (2, 2, 64, 32),
        [(32, 32, 16), (64, 16, 8), (128, 8, 4), (256, 4, 2), (512, 4, 2)],
    ),
    (partial(LeNet, 10, in_channels=1), (2, 1, 28, 28), (2, 10), [(6, 14, 14), (16, 5, 5)]),
    (
        partial(ResNet18, 10),
        (2, 3, 32, 32),
        (2, 10),
        [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)],
    ),
    (
        partial(ResNet18, 5, in_channels=1, stem="imagenet"),
        (2, 1, 64, 64),
        (2, 5),
        [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2)],
    ),
]
NAMES = ["alexnet", "unet", "lenet", "resnet18-cifar", "resnet18-imagenet"]
every_network = pytest.mark.parametrize(("build", "given", "expected", "features"), NETWORKS, ids=NAMES)


class Recorder:
    """An `augment` whose layers are identities that note what they were made for and what reaches them."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, channels: int) -> nn.Module:
        self.made.append(channels)
        layer = nn.Identity()
        layer.register_forward_hook(lambda module, args, output: self.seen.append(tuple(output.shape[1:])))
        return layer


class Shift(nn.Module):
    """Adds a constant that no feature could hide."""

    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e4


def seeded(build: Build, **settings: Any) -> Any:
    torch.manual_seed(0)
    return build(**settings)


def images(shape: Sequence[int]) -> Tensor:
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("network", "count"),
    [
        (partial(AlexNet, 10), 12_974_154),
        (partial(UNet, 2, in_channels=3), 7_763_074),
        (partial(LeNet, 10, in_channels=1), 61_706),
        (partial(ResNet18, 10), 11_173_962),
        (partial(ResNet18, 1000, stem="imagenet"), 11_689_512),
    ],
    ids=NAMES,
)
def test_number_of_parameters(network: Build, count: int) -> None:
    assert sum(parameter.numel() for parameter in network().parameters()) == count


@pytest.mark.parametrize(("network", "size"), [(AlexNet, 18_432), (UNet, 15_872)])
def test_statistics_add_this_many_bytes(network: Any, size: int) -> None:
    """Four vectors (two statistics up, two γ down) of float32 for each layer: FACTS 2.10."""
    layers = [layer for layer in network(10, augment=FFA).augments if isinstance(layer, FFA)]
    vectors = [(layer.mean, layer.std, layer.gamma_mean, layer.gamma_std) for layer in layers]
    assert 4 * sum(network.stage_channels) * 4 == size
    assert sum(tensor.numel() * tensor.element_size() for four in vectors for tensor in four) == size


@every_network
def test_every_stage_is_augmented_in_order(
    build: Build, given: tuple[int, ...], expected: tuple[int, ...], features: list[tuple[int, ...]]
) -> None:
    recorder = Recorder()
    network = build(augment=recorder).eval()
    with torch.no_grad():
        assert network(images(given)).shape == expected
    assert recorder.made == list(network.stage_channels) == [shape[0] for shape in features]
    assert recorder.seen == features


@every_network
@pytest.mark.parametrize("stages", [[], [1], [2, 1], [-1]], ids=str)
def test_only_chosen_stages_are_augmented(
    build: Build, given: tuple[int, ...], expected: tuple[int, ...], features: list[tuple[int, ...]], stages: list[int]
) -> None:
    stages = [stage if stage > 0 else len(features) for stage in stages]
    recorder = Recorder()
    network = build(augment=recorder, stages=stages).eval()
    with torch.no_grad():
        network(images(given))
    assert recorder.seen == [shape for stage, shape in enumerate(features, 1) if stage in stages]
    assert recorder.made == [shape[0] for shape in recorder.seen]


def test_augment_layers_of_stages_1_2_5() -> None:
    layers = augment_layers(AlexNet.stage_channels, FFA, [1, 2, 5])
    assert [layer.channels if isinstance(layer, FFA) else None for layer in layers] == [64, 192, None, None, 256]
    assert all(type(layer) is nn.Identity for layer in augment_layers((6, 16), None, [1]))


@pytest.mark.parametrize("stage", [0, 3, -1])
@pytest.mark.parametrize("augment", [None, FFA])
def test_a_stage_that_does_not_exist(stage: int, augment: Any) -> None:
    with pytest.raises(ValueError, match=rf"^there is no stage {stage}: the network's stages are 1, 2$"):
        LeNet(10, augment=augment, stages=[1, stage])


@every_network
def test_parameters_do_not_depend_on_augment(
    build: Build, given: tuple[int, ...], expected: tuple[int, ...], features: list[tuple[int, ...]]
) -> None:
    """Neither their names nor their initial values, even where making the layers draws random numbers."""

    def drawing(channels: int) -> nn.Module:
        torch.rand(channels)
        return FFA(channels)

    plain, augmented = seeded(build), seeded(build, augment=drawing)
    parameters = dict(augmented.named_parameters())
    assert list(parameters) == [name for name, _ in plain.named_parameters()]
    assert all(torch.equal(parameters[name], value) for name, value in plain.named_parameters())
    extra = set(augmented.state_dict()) - set(plain.state_dict())
    assert len(extra) == 5 * len(features) and all(name.startswith("augments.") for name in extra)
    missing, unexpected = augmented.load_state_dict(plain.state_dict(), strict=False)
    assert set(missing) == extra and not unexpected


@every_network
def test_gradient_reaches_every_parameter(
    build: Build, given: tuple[int, ...], expected: tuple[int, ...], features: list[tuple[int, ...]]
) -> None:
    # In evaluation mode: over a batch, BN takes the gradient from the biases before it.
    network = seeded(build).eval()
    network(images(given)).square().sum().backward()
    still = [name for name, value in network.named_parameters() if value.grad is None or not value.grad.any()]
    assert still == []


@every_network
def test_with_ffa(
    build: Build, given: tuple[int, ...], expected: tuple[int, ...], features: list[tuple[int, ...]]
) -> None:
    plain, augmented = seeded(build), seeded(build, augment=partial(FFA, p=1.0))
    x = images(given)
    with torch.no_grad():
        assert torch.equal(augmented.eval()(x), plain.eval()(x))
    assert [int(layer.batches) for layer in augmented.augments] == [0] * len(features)

    output = augmented.train()(x)
    output.square().mean().backward()
    assert output.shape == expected
    assert not torch.allclose(output, plain.train()(x))
    assert [int(layer.batches) for layer in augmented.augments] == [1] * len(features)
    assert all(value.grad is not None and value.grad.isfinite().all() for value in augmented.parameters())


def decoder_inputs(network: UNet, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What comes from below and what comes across into each decoder block, from stage 1's to stage 4's."""
    inputs: list[Tensor] = []
    for decoder in network.decoders:
        decoder.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        network.eval()(x)
    halves = [both.chunk(2, dim=1) for both in reversed(inputs)]
    return [half[0] for half in halves], [half[1] for half in halves]


@pytest.mark.parametrize("stage", [1, 2, 3, 4, 5])
def test_unet_skips_are_not_augmented(stage: int) -> None:
    """Augmenting stage k changes what comes from below and the skips of deeper stages, not the first k skips."""
    x = images((1, 3, 32, 32))
    below, across = decoder_inputs(seeded(partial(UNet, 2)), x)
    below_shifted, across_shifted = decoder_inputs(seeded(partial(UNet, 2), augment=Shift, stages=[stage]), x)
    assert [tuple(skip.shape[1:]) for skip in across] == [(32, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4)]
    unchanged = [torch.equal(one, other) for one, other in zip(across, across_shifted, strict=True)]
    assert unchanged == [number <= stage for number in (1, 2, 3, 4)]
    assert not any(torch.allclose(one, other) for one, other in zip(below, below_shifted, strict=True))


def test_unet_skips_are_the_encoders_features() -> None:
    network = seeded(partial(UNet, 2), augment=Shift)
    encoded: list[Tensor] = []
    for encoder in network.encoders:
        encoder.register_forward_hook(lambda module, args, output: encoded.append(output))
    _, across = decoder_inputs(network, images((1, 3, 32, 32)))
    assert all(torch.equal(one, other) for one, other in zip(encoded[:4], across, strict=True))


@pytest.mark.parametrize("size", [(40, 32), (32, 40), (8, 8)])
def test_unet_rejects_sides_that_do_not_halve_four_times(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"multiples of 16, not {size[0]}x{size[1]}$"):
        UNet(2)(images((1, 3, *size)))


@pytest.mark.parametrize("sides", [(16, 16), (16, 48)])
def test_unet_takes_multiples_of_16(sides: tuple[int, int]) -> None:
    assert UNet(4, in_channels=1).eval()(images((1, 1, *sides))).shape == (1, 4, *sides)


def test_alexnet_is_as_the_table_says() -> None:
    network = AlexNet(7)
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert [
        (conv.in_channels, conv.out_channels, conv.kernel_size[0], conv.stride[0], int(conv.padding[0]))
        for conv in convolutions
    ] == [(3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1)]
    assert all(conv.bias is not None for conv in convolutions)
    pools = [[isinstance(layer, nn.MaxPool2d) for layer in stage][3:] for stage in network.features]  # type: ignore[attr-defined]  # its own fields
    assert pools == [[True], [True], [], [], [True]]
    fully_connected = [module for module in network.modules() if isinstance(module, nn.Linear)]
    assert [(fc.in_features, fc.out_features) for fc in fully_connected] == [(9216, 1024), (1024, 1024), (1024, 7)]


@pytest.mark.parametrize(("network", "smallest"), [(AlexNet, 63), (LeNet, 12)])
def test_smallest_image(network: Any, smallest: int) -> None:
    assert network(10).eval()(images((1, 3, smallest, smallest))).shape == (1, 10)
    with pytest.raises(RuntimeError, match="too small"):
        network(10).eval()(images((1, 3, smallest - 1, smallest - 1)))


def test_lenet_averages_to_5_by_5() -> None:
    network = LeNet(10)
    x = images((2, 16, 5, 5))
    assert torch.equal(network.classifier[0](x), x)
    assert network(images((2, 3, 64, 48))).shape == (2, 10)


def test_resnet_has_torchvisions_names() -> None:
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = {"conv1.weight", "fc.weight", "fc.bias", *(f"bn1.{entry}" for entry in norm)}
    for block in (f"layer{layer}.{number}" for layer in (1, 2, 3, 4) for number in (0, 1)):
        names |= {f"{block}.conv{number}.weight" for number in (1, 2)}
        names |= {f"{block}.bn{number}.{entry}" for number in (1, 2) for entry in norm}
    for shortcut in (f"layer{layer}.0.downsample" for layer in (2, 3, 4)):
        names |= {f"{shortcut}.0.weight", *(f"{shortcut}.1.{entry}" for entry in norm)}
    assert len(names) == 122
    assert set(ResNet18(1000, stem="imagenet").state_dict()) == names


def test_resnet_block_adds_its_shortcut_before_the_last_relu() -> None:
    """With bn2 the constant 0.3, a block is relu(shortcut(x) + 0.3): the second block's shortcut is x itself."""
    network = seeded(partial(ResNet18, 10)).eval()
    for block in (*network.layer1, *network.layer2):
        nn.init.zeros_(block.bn2.weight)
        nn.init.constant_(block.bn2.bias, 0.3)
    x = images((1, 64, 8, 8)) - 0.5
    with torch.no_grad():
        torch.testing.assert_close(network.layer1(x), (x + 0.3).relu() + 0.3)
        projection = nn.functional.conv2d(x, network.layer2[0].downsample[0].weight, stride=2) / math.sqrt(1 + 1e-5)
        torch.testing.assert_close(network.layer2(x), (projection + 0.3).relu() + 0.3)
    assert network.layer2[0].conv1.stride == (2, 2) and network.layer2[0].conv2.stride == (1, 1)


def test_resnet_weights_are_drawn_by_fan_out() -> None:
    network = seeded(partial(ResNet18, 10))
    first, last = network.layer4[0].conv1.weight, network.layer4[0].downsample[0].weight
    assert first.std().item() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)
    assert last.std().item() == pytest.approx(math.sqrt(2 / 512), rel=0.02)


def test_resnet_stem_is_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"^stem is one of cifar, imagenet, not 'small'$"):
        ResNet18(10, stem="small")  # type: ignore[arg-type]  # text where one of some words is asked for
