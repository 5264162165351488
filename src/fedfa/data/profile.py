"""What a federation looks like, in numbers small enough to lie in every run's folder: reports are made from these."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfa.data.federation import Federation
from fedfa.data.look import by_chunks
from fedfa.data.preview import MOST_LOOKS, area_of, chosen, distances, statistics
from fedfa.data.sheets import MOST_IMAGES, Channels, all_of, spread
from fedfa.data.splits import SIDES

MOST_CLIENTS = 200
"""Clients that are described; of more, some are chosen, from the largest to the smallest."""
PIXELS = 64
"""Rows and columns of an image that are looked at, about: statistics need no more, and a run should not wait."""
BINS = 32
"""Of the histograms of intensities."""


def profile(federation: Federation) -> dict[str, Any]:
    """Labels of every client and side, and how its images look.

    `labels` counts images of each class; of masks, it is the share of pixels that each class takes. `mean` and `std`
    are brightness and contrast of each channel, on a scale of 0–1: the mean over images and the standard deviation
    over images. `histogram` is the share of pixels by intensity, channel by channel. `distances` are those of
    :func:`fedfa.data.preview.distances`, between the clients that `apart` names.
    """
    size = list(federation.images.shape[1:])
    federation = _thinned(federation)
    names = chosen(federation, MOST_CLIENTS)
    channels = Channels.of(federation.images)
    each = max(20, MOST_IMAGES * MOST_LOOKS // max(len(names), MOST_LOOKS))
    looks = {name: statistics(federation, name, channels.picks, each) for name in names}
    apart = [names[place] for place in spread(len(names), MOST_LOOKS).tolist()]
    clients = {}
    for name in names:
        index = federation.clients[name]
        look = looks[name] if len(looks[name]) else np.full((1, 2, len(channels.picks)), np.nan)
        clients[name] = {
            "samples": [len(index.of(side)) for side in SIDES],
            "labels": {side: _labels(federation, index.of(side), each) for side in SIDES},
            **{
                what: {"mean": _rounded(look[:, place].mean(0)), "sd": _rounded(look[:, place].std(0))}
                for place, what in enumerate(("mean", "std"))
            },
            "histogram": _histogram(federation, all_of(index), channels, each),
        }
    return {
        "name": federation.name,
        "task": federation.task,
        "classes": list(federation.classes),
        "image": size,
        "channels": list(channels.names),
        "population": len(federation.clients),
        "clients": clients,
        "apart": apart,
        "distances": [_rounded(row) for row in distances([looks[name] for name in apart])],
    }


def _thinned(federation: Federation) -> Federation:
    """The same federation with some of the rows and columns of its images and masks."""
    step = max(1, max(federation.images.shape[2:]) // PIXELS)
    masks = federation.task == "segmentation"
    labels = federation.labels[:, ::step, ::step] if masks else federation.labels
    return replace(federation, images=federation.images[:, :, ::step, ::step], labels=labels)


def _labels(federation: Federation, index: Tensor, most: int) -> list[float]:
    number = len(federation.classes)
    if federation.task == "classification":
        return [int(count) for count in torch.bincount(federation.labels[index].long(), minlength=number)[:number]]
    masks = federation.labels[index[spread(len(index), most)]]
    areas = [by_chunks(masks, partial(area_of, place)).sum() for place in range(number)]
    return [round(float(area) / max(len(masks), 1), 5) for area in areas]


def _histogram(federation: Federation, index: Tensor, channels: Channels, most: int) -> list[list[float | None]]:
    images = federation.images[index[spread(len(index), most)]]
    found = []
    for channel in channels.picks:
        counts = torch.bincount(images[:, channel].flatten() // (256 // BINS), minlength=BINS).double()
        found.append(_rounded((counts / counts.sum().clamp(min=1)).numpy()))
    return found


def _rounded(values: Any) -> list[float | None]:
    """Of four digits; of a client without images there is nothing to say."""
    return [None if np.isnan(value) else round(float(value), 4) for value in values]
