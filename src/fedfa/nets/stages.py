"""Where the layers that augment features go: after the convolutional stages of a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

Augment = Callable[[int], nn.Module]
"""Makes the layer that augments features of so many channels, such as :class:`fedfa.layers.ffa.FFA`."""


def scaled(channels: Sequence[int], width: float) -> tuple[int, ...]:
    """Numbers of channels, times `width`: a network for small machines has the same stages and less in them.

    >>> scaled((64, 192), 0.25)
    (16, 48)
    """
    if not 0 < width < float("inf"):
        raise ValueError(f"width is above 0, not {width}")
    return tuple(max(1, round(count * width)) for count in channels)


def augment_layers(
    channels: Sequence[int], augment: Augment | None, stages: Sequence[int] | None = None
) -> list[nn.Module]:
    """One layer for each stage: `augment(C)` after the chosen ones, the identity after the others.

    `channels` are the stages' output channels; `stages` counts from 1, None being all of them. Networks keep the
    layers in a list apart from the stages, so that the names of their parameters do not depend on them, and make
    them last, so that neither do the initial weights.

    >>> augment_layers((6, 16), nn.BatchNorm2d, [2])[0]
    Identity()
    """
    existing = range(1, len(channels) + 1)
    chosen = existing if stages is None else stages
    for stage in chosen:
        if stage not in existing:
            raise ValueError(f"there is no stage {stage}: the network's stages are {', '.join(map(str, existing))}")
    return [
        augment(count) if augment is not None and stage in chosen else nn.Identity()
        for stage, count in zip(existing, channels, strict=True)
    ]
