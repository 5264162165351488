"""The low-frequency amplitudes of images: what FedHarmo measures and replaces.

A real image's spectrum is symmetric, so half of it is kept (`rfft2`): of a window of frequencies −b … b in both
directions, the columns 0 … b.
"""

from __future__ import annotations

import torch
from torch import Tensor


def amplitudes(x: Tensor, half: int) -> Tensor:
    """|F(x)| at frequencies −half … half of (..., H, W) images, as (..., 2·half + 1, half + 1)."""
    spectrum: Tensor = torch.fft.rfft2(x)
    return spectrum[..., _rows(x, half), : half + 1].abs()


def with_amplitudes(x: Tensor, amplitude: Tensor) -> Tensor:
    """The images with these amplitudes at low frequencies, and with their own phases and other amplitudes."""
    half = amplitude.shape[-1] - 1
    spectrum: Tensor = torch.fft.rfft2(x)
    rows = _rows(x, half)
    phases = spectrum[..., rows, : half + 1].angle()
    spectrum[..., rows, : half + 1] = torch.polar(amplitude.expand_as(phases), phases)
    image: Tensor = torch.fft.irfft2(spectrum, s=x.shape[-2:])
    return image


def _rows(x: Tensor, half: int) -> Tensor:
    """Rows of the spectrum that hold the frequencies −half … half."""
    return torch.arange(-half, half + 1, device=x.device) % x.shape[-2]
