"""FFA in networks that were written without it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fedfa
from fedfa.layers.ffa import FFA, channel_statistics
from fedfa.nets import ResNet18


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(16 * 16, 5),
    )


@pytest.fixture
def images() -> Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class TestAddFFA:
    def test_puts_layers_after_the_named_modules(self, images: Tensor) -> None:
        model = fedfa.add_ffa(convnet(), after=["0", "1"], p=1.0)
        found = {path: layer.channels for path, layer in model.named_modules() if isinstance(layer, FFA)}
        assert found == {"0.3.ffa": 8, "1.1.ffa": 16}
        model.train()
        torch.manual_seed(0)
        assert not torch.equal(model(images), model(images))
        assert all(layer.batches == 2 for layer in model.modules() if isinstance(layer, FFA))

    def test_eval_mode_and_old_keys_are_untouched(self, images: Tensor) -> None:
        plain, model = convnet().eval(), fedfa.add_ffa(convnet(), after=["0"]).eval()
        assert torch.equal(plain(images), model(images))
        missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
        assert not unexpected and all(".ffa." in name for name in missing)

    def test_sees_what_the_module_puts_out(self, images: Tensor) -> None:
        model = fedfa.add_ffa(convnet(), after=["0"], p=1.0, momentum=0.0)
        model.train()
        model[0].register_forward_hook(lambda *_: None)
        features = copy.deepcopy(convnet().train())[0](images)
        model(images)
        torch.testing.assert_close(model[0][3].ffa.mean, channel_statistics(features).mean(1)[0])

    def test_a_resnet_block(self, images: Tensor) -> None:
        model = fedfa.add_ffa(ResNet18(4), after=["layer1", "layer4"], fusion="total")
        channels = {path: layer.channels for path, layer in model.named_modules() if isinstance(layer, FFA)}
        assert channels == {"layer1.1.ffa": 64, "layer4.1.ffa": 512}
        assert model(images).shape == (6, 4)

    def test_a_deep_copy_uses_its_own_layer(self, images: Tensor) -> None:
        model = fedfa.add_ffa(convnet(), after=["0"], p=1.0).train()
        twin = copy.deepcopy(model)
        twin(images)
        assert twin[0][3].ffa.batches == 1 and model[0][3].ffa.batches == 0

    def test_compiles_whole(self, images: Tensor) -> None:
        model = fedfa.add_ffa(convnet(), after=["0"], p=1.0).train()
        torch.compile(model, fullgraph=True, backend="aot_eager")(images).sum().backward()
        assert model[0][3].ffa.batches == 1

    def test_a_wrong_path_lists_the_right_ones(self) -> None:
        with pytest.raises(ValueError, match=r"no module at 'feature'; the paths there are: 0, 0\.0, 0\.1, .*3"):
            fedfa.add_ffa(convnet(), after=["feature"])

    def test_nothing_is_changed_by_a_wrong_call(self) -> None:
        model = convnet()
        with pytest.raises(ValueError, match="no module at '9'"):
            fedfa.add_ffa(model, after=["0", "9"])
        assert not any(isinstance(module, FFA) for module in model.modules())

    def test_twice_after_the_same_module(self) -> None:
        model = fedfa.add_ffa(convnet(), after=["0"])
        with pytest.raises(ValueError, match="already"):
            fedfa.add_ffa(model, after=["0.3"])

    def test_all_or_nothing(self) -> None:
        for after, channels in ((["0", "0"], None), (["0", "2"], {"2": 0}), (["0"], {"9": 3})):
            model = convnet()
            with pytest.raises(ValueError, match=r"already|at least one channel|no module"):
                fedfa.add_ffa(model, after=after, channels=channels)
            assert not any(isinstance(module, FFA) for module in model.modules())

    def test_a_module_that_returns_no_tensor(self) -> None:
        class Pair(nn.Module):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                return x, x

        model = fedfa.add_ffa(nn.Sequential(nn.Conv2d(3, 4, 1), Pair()), after=["1"])
        with pytest.raises(ValueError, match="returns features, not tuple"):
            model(torch.zeros(1, 3, 2, 2))

    def test_a_string_is_not_a_list_of_paths(self) -> None:
        with pytest.raises(ValueError, match=r"after=\['layer1'\]"):
            fedfa.add_ffa(convnet(), after="layer1")

    def test_channels_can_be_told(self) -> None:
        odd = nn.Sequential(nn.PixelShuffle(2), nn.ReLU())
        with pytest.raises(ValueError, match="say channels="):
            fedfa.add_ffa(odd, after=["0"])
        fedfa.add_ffa(odd, after=["0"], channels={"0": 3}, p=1.0)
        assert odd.train()(torch.randn(2, 12, 4, 4)).shape == (2, 3, 8, 8)


class TestUpdateGamma:
    def test_is_the_variance_over_groups_modulated(self, images: Tensor) -> None:
        model = fedfa.add_ffa(convnet(), after=["0"]).train()
        domains = {"plain": images, "bright": images + 1.0, "flat": images * 0.2}
        fedfa.update_gamma(model, domains)
        plain = convnet().eval()
        means, stds = [], []
        for batch in domains.values():
            mean, std = channel_statistics(plain[0](batch))
            means.append(mean.mean(0))
            stds.append(std.mean(0))
        layer = model[0][3].ffa
        torch.testing.assert_close(layer.gamma_mean, fedfa.modulate(torch.stack(means).var(0, correction=0)))
        torch.testing.assert_close(layer.gamma_std, fedfa.modulate(torch.stack(stds).var(0, correction=0)))
        assert layer.gamma_mean.sum().item() == pytest.approx(8)
        assert model.training and layer.batches == 0

    def test_batches_of_a_group_count_by_sample(self, images: Tensor) -> None:
        whole, parts = (fedfa.add_ffa(convnet(), after=["0"], fusion="total") for _ in range(2))
        fedfa.update_gamma(whole, [images, images * 2])
        fedfa.update_gamma(parts, [images.split(4), iter([images * 2])])
        torch.testing.assert_close(whole[0][3].ffa.gamma_mean, parts[0][3].ffa.gamma_mean)
        assert whole[0][3].ffa.gamma_mean.max() > 0

    def test_a_loader_of_images_and_labels(self, images: Tensor) -> None:
        plain, loaded = (fedfa.add_ffa(convnet(), after=["0"]) for _ in range(2))
        fedfa.update_gamma(plain, [images, images * 2])
        labels = torch.zeros(6)
        fedfa.update_gamma(loaded, [[(images, labels)], [[images * 2, labels]]])
        assert torch.equal(plain[0][3].ffa.gamma_mean, loaded[0][3].ffa.gamma_mean)

    def test_says_what_is_missing(self, images: Tensor) -> None:
        with pytest.raises(ValueError, match="no FFA layer"):
            fedfa.update_gamma(convnet(), [images, images])
        model = fedfa.add_ffa(convnet(), after=["0"])
        with pytest.raises(ValueError, match="at least 2"):
            fedfa.update_gamma(model, [images])
        with pytest.raises(ValueError, match="no samples"):
            fedfa.update_gamma(model, [images, iter([])])

    def test_client_and_random_fusion_do_not_look_at_the_federation(self, images: Tensor) -> None:
        for fusion in ("client", "random"):
            model = fedfa.add_ffa(convnet(), after=["0"], fusion=fusion)
            fedfa.update_gamma(model, [images, images + 1])
            assert model[0][3].ffa.gamma_mean.abs().sum() == 0
