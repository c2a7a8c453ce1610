"""The form in which a caller gives the items of a request, and gets the results: one, a mapping, or a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mmcopy.errors import DeviceError, PayloadError
from mmcopy.tensors import TensorData

__all__ = ["take_apart", "values_of"]


def take_apart(
    items: TensorData | Mapping[Any, TensorData] | Sequence[TensorData], out: Any
) -> tuple[list[TensorData], list[Any] | None, Callable[[list[Any]], Any]]:
    """The items as a list, ``out`` in the same order, and what gives a list of results the form of ``items``.

    Raises :class:`PayloadError` for items that are none, and :class:`DeviceError` for an ``out`` of another form.
    """
    if isinstance(items, TensorData):
        return [items], None if out is None else [out], lambda results: results[0]
    flat = values_of(items)
    for n, item in enumerate(flat):
        if not isinstance(item, TensorData):
            raise PayloadError(f"item {n} of {len(flat)} is {type(item).__name__}, want a TensorData")
    if isinstance(items, Mapping):
        keys = list(items)
        if out is not None and (not isinstance(out, Mapping) or set(out) != set(keys)):
            given = sorted(map(str, out)) if isinstance(out, Mapping) else type(out).__name__
            raise DeviceError(f"out has the keys {given}, items has {sorted(map(str, keys))}")
        flat_out = None if out is None else [out[key] for key in keys]
        return flat, flat_out, lambda results: dict(zip(keys, results, strict=True))
    if out is not None and not isinstance(out, Sequence):
        raise DeviceError(f"out is {type(out).__name__}, want a sequence of {len(items)} tensors as items is one")
    if out is not None and len(out) != len(items):
        raise DeviceError(f"out has {len(out)} tensors, items has {len(items)}")
    return flat, None if out is None else list(out), lambda results: results


def values_of(items: Mapping[Any, Any] | Sequence[Any]) -> list[Any]:
    """What a mapping or a sequence holds, in order. Raises :class:`PayloadError` for what is neither."""
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise PayloadError(f"items is {type(items).__name__}, want a TensorData, or a mapping or a sequence of them")
    return list(items.values() if isinstance(items, Mapping) else items)
