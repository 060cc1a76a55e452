"""Lets a model compute a batch without rows.

Models of transformers split and join axes by views that leave one length to be guessed (-1). Of an empty tensor it
cannot be: any length would fit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_VIEWS = (torch.Tensor.view, torch.Tensor.reshape)


class EmptyBatches(TorchFunctionMode):
    """While it is entered, such a length follows from the axes behind the first one, which is the batch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _VIEWS and not kwargs:
            tensor, *given = args
            sizes = list(given[0] if isinstance(given[0], (tuple, list)) else given)
            if -1 in sizes[1:]:
                place = sizes.index(-1)
                known = math.prod(sizes[1:place] + sizes[place + 1 :])
                sizes[place] = math.prod(tensor.shape[1:]) // known
                return func(tensor, sizes)
        if func is torch.Tensor.flatten and not kwargs and len(args) == 2 and args[1] > 0:
            tensor, start = args
            return tensor.reshape(*tensor.shape[:start], math.prod(tensor.shape[start:]))
        return func(*args, **(kwargs or {}))
