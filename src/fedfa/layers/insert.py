"""FFA layers in a network that was written without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedfa.layers.ffa import FFA, channel_statistics


def add_ffa(
    model: nn.Module, after: Sequence[str], channels: Mapping[str, int] | None = None, **settings: Any
) -> nn.Module:
    """Put an FFA layer after each of the modules at the paths `after`, in place, and return the model.

    >>> model = fedfa.add_ffa(resnet, after=["layer1", "layer2", "layer3", "layer4"], p=0.5)

    The layer becomes a child named ``ffa`` of the module it follows (of its last part, if that is a Sequential)
    and is called by a forward hook, so neither the forward code nor any existing state_dict key changes. The number
    of channels is read off the last convolution or normalisation up to that path; `channels` says it where that
    guess is wrong. `settings` are :class:`FFA`'s. A module that is called twice in a forward (a shared ReLU) is
    followed by its layer both times. Load old checkpoints before adding layers, or with ``strict=False``.
    """
    paths = {path: module for path, module in model.named_modules() if path}
    if isinstance(after, str):
        raise ValueError(f"after is a list of module paths: after=[{after!r}]")
    for path in (*after, *(channels or ())):
        if path not in paths:
            raise ValueError(f"no module at {path!r}; the paths there are: {', '.join(paths)}")
    layers: dict[nn.Module, FFA] = {}  # first all, then any: a wrong call changes nothing
    for path in after:
        count = channels[path] if channels and path in channels else _channels_at(paths, path)
        host = paths[path]
        while isinstance(host, nn.Sequential) and len(host):  # a layer inside would run twice: once as its part
            host = host[len(host) - 1]
        if host in layers or isinstance(getattr(host, "ffa", None), FFA):
            raise ValueError(f"there is an FFA layer after {path!r} already")
        layers[host] = FFA(count, **settings).to(_device(model)).train(model.training)
    for host, layer in layers.items():
        host.add_module("ffa", layer)
        host.register_forward_hook(layer.follow)
    return model


@torch.no_grad()
def update_gamma(
    model: nn.Module, groups: Mapping[str, Tensor | Iterable[Tensor]] | Sequence[Tensor | Iterable[Tensor]]
) -> None:
    """Set γ of every FFA layer from groups of samples (domains) at hand in one process.

    For each group the model's features are taken without augmentation (in evaluation mode); the mean over samples
    of their channel statistics stands for a client's running statistics, and the variance of those over groups for
    the federation's (Eqs. shareing and t). A group is a batch of inputs, or an iterable of batches, such as a
    DataLoader.
    """
    members = list(groups.values()) if isinstance(groups, Mapping) else list(groups)
    layers = [module for module in model.modules() if isinstance(module, FFA)]
    if not layers:
        raise ValueError("the model has no FFA layer: fedfa.add_ffa puts them in")
    if len(members) < 2:
        raise ValueError(f"a variance over groups needs at least 2 of them, not {len(members)}")
    found: dict[FFA, list[Tensor]] = {layer: [] for layer in layers}
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    sums: dict[FFA, Tensor] = {}

    def collect(layer: FFA) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            total = channel_statistics(args[0], layer.eps, layer.statistics == "released").sum(1)
            sums[layer] = sums[layer] + total if layer in sums else total

        return hook

    handles = [layer.register_forward_pre_hook(collect(layer)) for layer in layers]
    try:
        for member in members:
            sums.clear()
            samples = 0
            for batch in [member] if isinstance(member, Tensor) else member:
                x = batch[0] if isinstance(batch, (tuple, list)) else batch  # a loader's (images, labels)
                model(x)
                samples += len(x)
            if not samples:
                raise ValueError("a group has no samples")
            for layer in layers:
                if layer not in sums:
                    raise ValueError("an FFA layer was not reached by the model's forward")
                found[layer].append(sums[layer] / samples)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in was_training:
            module.training = training
    for layer, statistics in found.items():
        layer.set_between(*torch.stack(statistics).var(0, correction=0))


def _channels_at(paths: Mapping[str, nn.Module], path: str) -> int:
    """Channels of what the module at `path` returns, as far as modules tell: its last part that says how many it
    puts out, or the nearest such module before it (activations and pooling do not change the number)."""
    inside = [module for name, module in paths.items() if name == path or name.startswith(f"{path}.")]
    names = list(paths)
    before = [paths[name] for name in names[: names.index(path)]]
    for module in reversed([*before, *inside]):
        for attribute in ("out_channels", "num_features", "num_channels"):
            if isinstance(getattr(module, attribute, None), int):
                return int(getattr(module, attribute))
    raise ValueError(f"cannot tell how many channels come out of {path!r}: say channels={{{path!r}: N}}")


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
