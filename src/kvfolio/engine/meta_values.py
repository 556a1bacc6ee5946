"""Lets a forward run on meta tensors, which have a shape and no values: what asks for values gets a neutral answer.

Routing to experts and placing images among tokens depend on values; what a cache holds does not. Knows nothing of
models or caches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class NoValues(TorchFunctionMode):
    """Answers what asks a meta tensor for its values: zero, false, nothing chosen. Tensors elsewhere are as always."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None:
            replaced = answer(*args, **(kwargs or {}))
            if replaced is not NotImplemented:
                return replaced
        return func(*args, **(kwargs or {}))


def _on_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _none_chosen(tensor: torch.Tensor, *rest: Any, as_tuple: bool = False, **_: Any) -> Any:
    if not _on_meta(tensor):
        return NotImplemented
    if as_tuple:
        return tuple(tensor.new_empty(0, dtype=torch.long) for _ in range(max(1, tensor.dim())))
    return tensor.new_empty((0, tensor.dim()), dtype=torch.long)


def _where(*args: Any, **_: Any) -> Any:
    return _none_chosen(args[0], as_tuple=True) if len(args) == 1 else NotImplemented


def _masks(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(_on_meta(part) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _chosen_by_mask(tensor: torch.Tensor, index: Any) -> Any:
    if not _masks(index):
        return NotImplemented
    parts = index if isinstance(index, tuple) else (index,)
    emptied: list[Any] = []
    for part in parts:
        if _on_meta(part) and part.dtype in (torch.bool, torch.uint8):
            emptied += [torch.zeros(0, dtype=torch.long, device="meta")] * part.dim()
        else:
            emptied.append(part)
    return tensor[tuple(emptied)]


def _put_by_mask(tensor: torch.Tensor, index: Any, value: Any) -> Any:
    return None if _masks(index) else NotImplemented


def _split(tensor: torch.Tensor, sizes: Any, dim: int = 0, **_: Any) -> Any:
    """Sizes that were counted from values add up to nothing: the first part takes what is left."""
    if not _on_meta(tensor) or not isinstance(sizes, list | tuple) or any(sizes):
        return NotImplemented
    return torch.split(tensor, [tensor.shape[dim], *sizes[1:]], dim)


def _listed(tensor: torch.Tensor) -> Any:
    if not _on_meta(tensor):
        return NotImplemented
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu").tolist()


def _constant(value: Any) -> Callable[..., Any]:
    return lambda tensor, *_, **__: value if _on_meta(tensor) else NotImplemented


def _bincount(tensor: torch.Tensor, *_: Any, minlength: int = 0, **__: Any) -> Any:
    return tensor.new_zeros(minlength) if _on_meta(tensor) else NotImplemented


def _same(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    return tensor if _on_meta(tensor) else NotImplemented


_ANSWERS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nonzero: _none_chosen,
    torch.Tensor.nonzero: _none_chosen,
    torch.where: _where,
    torch.Tensor.__getitem__: _chosen_by_mask,
    torch.Tensor.__setitem__: _put_by_mask,
    torch.split: _split,
    torch.Tensor.split: _split,
    torch.Tensor.tolist: _listed,
    torch.Tensor.item: _constant(0),
    torch.Tensor.__bool__: _constant(False),
    torch.Tensor.__int__: _constant(0),
    torch.Tensor.__index__: _constant(0),
    torch.Tensor.__float__: _constant(0.0),
    torch.equal: _constant(False),
    torch.Tensor.equal: _constant(False),
    torch.allclose: _constant(False),
    torch.bincount: _bincount,
    torch.Tensor.bincount: _bincount,
    torch.Tensor.masked_scatter: _same,
    torch.masked_scatter: _same,
    torch.Tensor.cpu: _same,
}
