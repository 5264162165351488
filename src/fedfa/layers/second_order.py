"""Convolutions whose gradient has a fast gradient.

Where a gradient of a convolution's gradient is asked for, torch takes the weight's part as a convolution with a kernel
as large as the features, over samples in the channels' place: tens of thousands of products for each of a few results,
which leaves most of a GPU idle. But it is the gradient of a weight like any other, and there are kernels for those.
(On a CPU that gains nothing, so torch's own way stays.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from fedfa.kernels import transformed


class TwiceDifferentiable(TorchFunctionMode):
    """A context for a network's forward, in which 2-D convolutions on a GPU, transposed ones too, have a fast gradient
    of their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.of_inputs = False
        """Whether gradients of weights are not wanted now. (Autograd does not tell a function of ours.)"""

    def slope(self, loss: Tensor, x: Tensor) -> Tensor:
        """∂loss/∂x, to be differentiated once more. No weight of a convolution may depend on x."""
        self.of_inputs = True
        try:
            (found,) = torch.autograd.grad(loss, x, create_graph=True)
        finally:
            self.of_inputs = False
        return found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = _ASKED[function](*args, **kwargs) if function in _ASKED else None
        if asked is None or not _pays(asked[0][0]) or transformed():
            return function(*args, **kwargs)
        (x, weight, bias), way = asked
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # which knows torch's own functions, and not ours
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return _Convolution.apply(x, weight, bias, way, self)  # type: ignore[no-untyped-call]  # torch's


def _pays(x: Tensor) -> bool:
    return x.is_cuda


def _plain(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> _Asked | None:  # fmt: skip
    if isinstance(padding, str) or input.dim() != 4:
        return None
    return (input, weight, bias), _Way(_pair(stride), _pair(padding), _pair(dilation), False, (0, 0), groups)


def _transposed(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> _Asked | None:  # fmt: skip
    if input.dim() != 4:
        return None
    way = _Way(_pair(stride), _pair(padding), _pair(dilation), True, _pair(output_padding), groups)
    return (input, weight, bias), way


_ASKED: Mapping[Any, Callable[..., _Asked | None]] = {torch.conv2d: _plain, torch.conv_transpose2d: _transposed}
"""What a call of these asks for: tensors and a way. None where that is left to torch."""


class _Way(NamedTuple):
    """All that makes a convolution besides its tensors."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    transposed: bool
    output_padding: tuple[int, int]
    groups: int

    def there(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = torch.ops.aten.convolution(x, weight, bias, *self)
        return out

    def back(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of x, weight and bias, where they are wanted."""
        biases = [grad.shape[1]]
        return list(torch.ops.aten.convolution_backward(grad, x, weight, biases, *self, list(wanted)))


_Asked = tuple[tuple[Tensor, Tensor, Tensor | None], _Way]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, way: _Way, mode: TwiceDifferentiable
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.way, ctx.mode = way, mode
        return way.there(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, *others = ctx.needs_input_grad[:3]
        wanted = (of_x, *(other and not ctx.mode.of_inputs for other in others))
        found = _Back.apply(grads[0], *ctx.saved_tensors, ctx.way, wanted)  # type: ignore[no-untyped-call]  # torch's
        return (*found, None, None)


class _Back(torch.autograd.Function):
    """The gradients g·w of x, g·x of the weight and Σg of the bias, each linear in both of its factors: so their own
    gradients are convolutions and gradients of convolutions again."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, way: _Way, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(grad, x, weight)
        ctx.way = way
        ctx.set_materialize_grads(False)
        return tuple(way.back(grad, x, weight, wanted))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = grads
        way, (grads_wanted, x_wanted, weight_wanted) = ctx.way, ctx.needs_input_grad[:3]
        parts = []
        if grads_wanted:
            parts += [] if to_x is None else [way.there(to_x, weight)]
            parts += [] if to_weight is None else [way.there(x, to_weight)]
            parts += [] if to_bias is None else [to_bias.view(-1, 1, 1).expand_as(grad)]
        dgrad = sum(parts[1:], parts[0]) if parts else None
        dx = dweight = None
        if to_weight is not None and x_wanted:
            dx, *_ = way.back(grad, x, to_weight, (True, False, False))
        if to_x is not None and weight_wanted:
            _, dweight, _ = way.back(grad, to_x, weight, (False, True, False))
        return dgrad, dx, dweight, None, None
