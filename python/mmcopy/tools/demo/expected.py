"""What the gateway should send for a picture, computed independently with numpy, for one family: Qwen3-VL.

Nothing here is shared with mmcopy's own copies or casts: each byte goes through a table of 256 values (float32
arithmetic in the family's order of steps, then one rounding to the encoder's dtype), and reshape and transpose arrange
them. Only pictures that the family does not resize are covered: the gateway's resize filters are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmcopy.errors import ConfigError

from .families import RECOMPUTED, Family

__all__ = [
    "ENCODER_DTYPES",
    "Recomputed",
    "by_item",
    "check_picture",
    "expected_tensors",
    "kept_size",
    "prepared",
    "rounded",
]

ENCODER_DTYPES = ("float32", "bfloat16", "float16", "uint8")

PATCH, MERGE, FRAMES = 16, 2, 2
SIDE = PATCH * MERGE
MIN_PIXELS, MAX_PIXELS = 4 * SIDE * SIDE, 16384 * SIDE * SIDE

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Recomputed:
    """A tensor's dtype by torch's name, and its elements: real ones, or the bits where numpy lacks the dtype."""

    dtype: str
    elements: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape


def expected_tensors(
    family: Family, pictures: Sequence[tuple[Bytes | None, int, int]], *, engine: str, dtype: str
) -> dict[tuple[int, str], Recomputed | None]:
    """All tensors of one request: (item, name) -> what it should be, None where that can't be recomputed.

    Args:
        family: A tensor of any other than :data:`RECOMPUTED` is not in the answer.
        pictures: (pixels or None when not known exactly, width, height) of each.
        engine: TokenSpeed has one item per picture, vLLM one for all of them, joined along the first dimension.
        dtype: The encoder's.
    """
    if family.name != RECOMPUTED:
        return {}
    inputs = [None if pixels is None else _encoder_input(pixels, dtype) for pixels, _, _ in pictures]
    return by_item(inputs, [_side_tensors(width, height) for _, width, height in pictures], engine=engine)


def by_item(
    inputs: Sequence[Recomputed | None], sides: Sequence[dict[str, NDArray[np.int64]]], *, engine: str
) -> dict[tuple[int, str], Recomputed | None]:
    """The encoder input and the side tensors of each picture, as the engine's request has them."""
    name = "pixel_values" if engine == "vllm" else "encoder_input"
    each: list[dict[str, Recomputed | None]] = [
        {name: pixels, **{key: Recomputed("int64", value) for key, value in beside.items()}}
        for pixels, beside in zip(inputs, sides, strict=True)
    ]
    if engine != "vllm":
        return {(item, key): tensor for item, tensors in enumerate(each) for key, tensor in tensors.items()}
    joined: dict[tuple[int, str], Recomputed | None] = {}
    for key in {key for tensors in each for key in tensors}:
        parts = [tensors.get(key) for tensors in each]
        known = [part for part in parts if part is not None]
        whole = len(known) == len(parts)
        joined[0, key] = Recomputed(known[0].dtype, np.concatenate([p.elements for p in known])) if whole else None
    return joined


def kept_size(width: int, height: int) -> bool:
    """Whether the family takes a picture of this size as it is."""
    return width % SIDE == 0 and height % SIDE == 0 and MIN_PIXELS <= width * height <= MAX_PIXELS


def check_picture(family: Family, width: int, height: int) -> None:
    """Raises :class:`ConfigError` for a picture that :func:`prepared` cannot prepare."""
    if family.name != RECOMPUTED:
        raise ConfigError(f"gateway mmcopy preprocesses {RECOMPUTED} alone, not {family.name}: use --gateway smg")
    if not kept_size(width, height):
        raise ConfigError(
            f"gateway mmcopy does not resize pictures, and {family.name} does not take {width}x{height} as it is "
            f"(both sides have to be multiples of {SIDE}, for example 640x480): use --gateway smg or other pictures"
        )


def prepared(family: Family, pictures: Sequence[Bytes], *, engine: str, dtype: str) -> dict[tuple[int, str], Any]:
    """(item, name) -> the arrays of one request for RGB ``pictures`` ``[height, width, 3]``: a preprocessor.

    Pixels are float32, for the sender to cast, or uint8 when ``dtype`` is. Raises :class:`ConfigError`.
    """
    for pixels in pictures:
        check_picture(family, pixels.shape[1], pixels.shape[0])
    sized = [(pixels, pixels.shape[1], pixels.shape[0]) for pixels in pictures]
    made = expected_tensors(family, sized, engine=engine, dtype="uint8" if dtype == "uint8" else "float32")
    return {key: tensor.elements for key, tensor in made.items() if tensor is not None}


def _encoder_input(pixels: Bytes, dtype: str) -> Recomputed | None:
    """``[patches, 3 * frames * patch * patch]``: blocks of merge x merge patches, row by row, and within a patch
    channel, frame, row, column. A picture stands for every frame of its temporal patch."""
    height, width = pixels.shape[:2]
    if not kept_size(width, height):
        return None
    rows, columns = height // PATCH, width // PATCH
    blocks = _table(dtype)[pixels].reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, PATCH, PATCH)
    return Recomputed(dtype, np.repeat(patches, FRAMES, axis=2).reshape(rows * columns, -1))


def _side_tensors(width: int, height: int) -> dict[str, NDArray[np.int64]]:
    if not kept_size(width, height):
        return {}
    rows, columns = height // PATCH, width // PATCH
    return {"image_grid_thw": np.array([[1, rows, columns]]), "patches_per_image": np.array([rows * columns])}


def _table(dtype: str) -> NDArray[Any]:
    """``[256]``: what each byte becomes, of any channel: (byte - 255 mean) / (255 std), with mean and std 0.5."""
    values = np.arange(256, dtype=np.uint8)
    if dtype == "uint8":
        return values
    half = np.float32(255) * np.float32(0.5)
    return rounded((values.astype(np.float32) - half) / half, dtype)


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Finite float32 values in another dtype, to nearest and ties to even; bfloat16 as its 16 bits."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    if dtype != "bfloat16":
        raise ValueError(f"encoder dtype is {dtype!r}, want one of {', '.join(ENCODER_DTYPES)}")
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + odd + 0x7FFF) >> 16).astype(np.uint16)
