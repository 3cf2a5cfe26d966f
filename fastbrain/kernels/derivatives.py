"""Backward passes that are not differentiable themselves, and say so."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses `create_graph=True`.

    PyTorch's own decorator notices a second derivative only through the incoming gradient: that of
    a sum has no graph, and a gradient penalty would silently be a constant.
    """
    first: Callable[..., Any] = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        # autograd runs backward in grad mode exactly when a graph of it is wanted
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "fastbrain's operations are differentiated once: their gradients have no graph, "
                "so create_graph=True (a gradient penalty, a Hessian) is not offered"
            )
        return first(ctx, *gradients)

    return refusing
