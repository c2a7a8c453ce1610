"""What the gateway ought to send for a picture of any family, computed a second time with numpy alone.

Nothing here is shared with mmcopy's own copies or casts: pixels go through a table of 256 values a channel (float32
arithmetic in the family's order of steps, then one rounding to the encoder's dtype) and are arranged by reshape and
transpose. It covers pictures that the family does not have to resize; for the others the answer is None, because the
resize filters of the gateway are its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmcopy.tools.demo.expected import Recomputed, by_item, rounded
from mmcopy.tools.demo.families import Family

from .oracle_families import PREPROCESSING, Arithmetic, Layout, Preprocessing

__all__ = ["channel_tables", "encoder_input", "expected_tensors", "kept_size", "normalised", "side_tensors"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def expected_tensors(
    family: Family, pictures: Sequence[tuple[Bytes | None, int, int]], *, engine: str, dtype: str
) -> dict[tuple[int, str], Recomputed | None]:
    """All tensors of one request: (item, name) -> what it ought to be, None where that can't be recomputed.

    ``pictures``: (pixels or None when not known exactly, width, height) each. TokenSpeed has one item per picture,
    vLLM one for all of them, joined along the first dimension. A name that is not in the answer is not known either.
    """
    rules = PREPROCESSING[family.name]
    if rules.layout is Layout.CROPS and not all(kept_size(rules, width, height) for _, width, height in pictures):
        return {}  # each item has as many crops as the picture with most of them
    inputs = [None if pixels is None else encoder_input(rules, pixels, dtype) for pixels, _, _ in pictures]
    return by_item(inputs, [side_tensors(rules, width, height) for _, width, height in pictures], engine=engine)


def encoder_input(family: Preprocessing, pixels: Bytes, dtype: str) -> Recomputed | None:
    """The encoder's input for one RGB picture ``[height, width, 3]``; None when the family has to resize it."""
    height, width = pixels.shape[:2]
    if dtype == "uint8" and family.arithmetic is not Arithmetic.SCALED:
        return None  # raw bytes are meant for the families that send them; others round their floats
    if not kept_size(family, width, height):
        return None
    table = channel_tables(family, dtype)
    match family.layout:
        case Layout.MERGED_PATCHES:
            elements = _merged_patches(family, pixels, table)
        case Layout.PLAIN_PATCHES:
            elements = _plain_patches(family, pixels, table)
        case Layout.PADDED_PATCHES:
            elements = _padded_patches(family, pixels, table)
        case Layout.EXTRA_COLUMN:
            elements = _extra_column(family, pixels, table, dtype)
        case Layout.TILES:
            elements = _one_tile(pixels, table)
        case Layout.CROP:
            elements = _crop(pixels, table)
        case Layout.CROPS:
            elements = _crops(pixels, table)
        case _:
            return None
    return Recomputed(dtype, np.ascontiguousarray(elements))


def side_tensors(family: Preprocessing, width: int, height: int) -> dict[str, Ints]:
    """The small integer tensors beside it, for one picture that is not resized; empty otherwise."""
    if not kept_size(family, width, height):
        return {}
    rows, columns = math.ceil(height / family.patch), math.ceil(width / family.patch)
    count = np.array([rows * columns])
    match family.layout:
        case Layout.MERGED_PATCHES:
            return {"image_grid_thw": np.array([[1, rows, columns]]), "patches_per_image": count}
        case Layout.PLAIN_PATCHES if family.arithmetic is Arithmetic.STEPS:
            down, across = math.ceil(rows / family.merge), math.ceil(columns / family.merge)
            types = np.array([0, *([1] * across + [2]) * down, 3])  # start, a row of tokens and its end ..., end
            return {
                "vit_grid": np.array([[rows, columns]]),
                "llm_grid": np.array([[down, across]]),
                "types": types,
                "patches_per_image": count,
                "types_per_image": np.array([types.size]),
            }
        case Layout.PLAIN_PATCHES:
            rows, columns = (family.merge * math.ceil(n / family.merge) for n in (rows, columns))
            return {"grid_thws": np.array([[1, rows, columns]]), "patches_per_image": np.array([rows * columns])}
        case Layout.PADDED_PATCHES:
            ids = np.full((1, PADDED_PATCH_COUNT, 2), -1)
            y, x = np.divmod(np.arange(rows * columns), columns)
            ids[0, : rows * columns] = np.stack([x, y], axis=1)
            return {"pixel_position_ids": ids}
        case Layout.EXTRA_COLUMN:
            return {"tokens_per_item": np.array([rows * (width // family.patch + 1)])}
        case Layout.TILES:
            return {"aspect_ratios": np.array([[1, 1]]), "patches_per_image": np.array([1])}
        case Layout.CROPS:
            return {"image_sizes": np.array([[height, width]])}
        case _:
            return {}


def kept_size(family: Preprocessing, width: int, height: int) -> bool:
    """Whether the family takes a picture of this size as it is."""
    shorter, longer, area = min(width, height), max(width, height), width * height
    inside = family.min_side <= shorter and longer <= family.max_side
    match family.layout:
        case Layout.MERGED_PATCHES:
            whole = width % family.factor == 0 and height % family.factor == 0
            return inside and whole and family.min_pixels <= area <= family.max_pixels
        case Layout.PLAIN_PATCHES if family.arithmetic is Arithmetic.STEPS:
            whole = width % family.patch == 0 and height % family.patch == 0
            down, across = (math.ceil(side / family.factor) for side in (height, width))
            return inside and whole and family.min_pixels <= area and down * (across + 1) + 2 <= family.max_tokens
        case Layout.PLAIN_PATCHES:
            patches = max(1, width // family.patch) * max(1, height // family.patch)
            return inside and patches * family.patch**2 <= family.max_pixels
        case Layout.PADDED_PATCHES:
            grow = math.sqrt(PADDED_PATCH_COUNT * family.patch**2 / area)
            return all(int(grow * side / family.factor) * family.factor == side for side in (width, height))
        case Layout.EXTRA_COLUMN:
            return True
        case Layout.TILES:
            return max(width, height) == TILE
        case Layout.CROP:
            return min(width, height) == TILE
        case Layout.CROPS:
            return width == height == TILE
        case _:
            return False


# ---- from a byte to the encoder's dtype ----------------------------------

TILE = 336
PADDED_PATCH_COUNT = 280 * 9  # soft tokens x pooled patches each


def channel_tables(family: Preprocessing, dtype: str) -> NDArray[Any]:
    """``[3, 256]``: what each byte of each channel becomes."""
    if dtype == "uint8":
        return np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 256))
    return rounded(normalised(family, np.arange(256, dtype=np.float32)), dtype)


def normalised(family: Preprocessing, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """``[3, n]`` float32: values 0..255 after rescale and normalisation, in the family's order of steps."""
    one, full = np.float32(1), np.float32(255)
    mean, std = (np.array(three, np.float32)[:, None] for three in (family.mean, family.std))
    result: NDArray[np.float32]
    match family.arithmetic:
        case Arithmetic.FOLDED:
            result = values * (one / (full * std)) + -mean / std
        case Arithmetic.FOLDED_WIDE:
            wide_mean, wide_std = (np.array(three)[:, None] for three in (family.mean, family.std))
            scale, bias = 1 / (255 * wide_std), -wide_mean / wide_std
            result = values * scale.astype(np.float32) + bias.astype(np.float32)
        case Arithmetic.SCALED:
            result = (values - full * mean) / (full * std)
        case Arithmetic.RESCALED:
            result = (values * (one / full) - mean) * (one / std)
        case Arithmetic.STEPS:
            result = (values / full - mean) / std
    return result


def _through(table: NDArray[Any], pixels: Bytes, channel_axis: int) -> NDArray[Any]:
    """Each byte through the table of its channel."""
    out = np.empty(pixels.shape, table.dtype)
    for channel in range(3):
        at = (slice(None),) * channel_axis + (channel,)
        out[at] = table[channel][pixels[at]]
    return out


# ---- from a picture to the encoder's layout ------------------------------


def _merged_patches(family: Preprocessing, pixels: Bytes, table: NDArray[Any]) -> NDArray[Any]:
    """``[patches, 3 * temporal * patch * patch]``: blocks of merge x merge patches, row by row, and within a patch
    channel, frame, row, column. A picture stands for every frame of its temporal patch."""
    p, m, t = family.patch, family.merge, family.temporal
    rows, columns = pixels.shape[0] // p, pixels.shape[1] // p
    blocks = pixels.reshape(rows // m, m, p, columns // m, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    patches = np.ascontiguousarray(blocks).reshape(rows * columns, 3, 1, p, p)
    frames = np.empty((rows * columns, 3, t, p, p), table.dtype)
    frames[:] = _through(table, patches, 1)
    return frames.reshape(rows * columns, -1)


def _plain_patches(family: Preprocessing, pixels: Bytes, table: NDArray[Any]) -> NDArray[Any]:
    """``[patches, 3, patch, patch]``, row by row; black fills up to a multiple of merge patches (or nothing, when
    the family takes any whole number of patches)."""
    p = family.patch
    to = p if family.arithmetic is Arithmetic.STEPS else family.factor
    height, width = (math.ceil(side / to) * to for side in pixels.shape[:2])
    canvas = np.zeros((height, width, 3), np.uint8)
    canvas[: pixels.shape[0], : pixels.shape[1]] = pixels
    patches = canvas.reshape(height // p, p, width // p, p, 3).transpose(0, 2, 4, 1, 3)
    return _through(table, np.ascontiguousarray(patches).reshape(-1, 3, p, p), 1)


def _padded_patches(family: Preprocessing, pixels: Bytes, table: NDArray[Any]) -> NDArray[Any]:
    """``[1, 2520, patch * patch * 3]``: patches row by row, red, green and blue side by side, then zeros."""
    p = family.patch
    rows, columns = pixels.shape[0] // p, pixels.shape[1] // p
    patches = pixels.reshape(rows, p, columns, p, 3).transpose(0, 2, 1, 3, 4).reshape(rows * columns, p, p, 3)
    out = np.zeros((1, PADDED_PATCH_COUNT, p * p * 3), table.dtype)
    out[0, : rows * columns] = _through(table, patches, 3).reshape(rows * columns, -1)
    return out


def _extra_column(family: Preprocessing, pixels: Bytes, table: NDArray[Any], dtype: str) -> NDArray[Any]:
    """``[patches, temporal, patch, patch, 3]``: every row of patches has one more than the picture's whole ones; what
    lies outside the picture is the byte -1."""
    p, t = family.patch, family.temporal
    height, width = pixels.shape[:2]
    rows, columns = math.ceil(height / p), width // p + 1
    outside = rounded(normalised(family, np.array([-1], np.float32)), dtype)[:, 0]
    canvas = np.empty((rows * p, columns * p, 3), table.dtype)
    canvas[:] = outside
    canvas[:height, :width] = _through(table, pixels, 2)
    patches = canvas.reshape(rows, p, columns, p, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 1, p, p, 3)
    return np.repeat(patches, t, axis=1)


def _one_tile(pixels: Bytes, table: NDArray[Any]) -> NDArray[Any]:
    """``[1, 3, 336, 336]``: the picture at the top left, black elsewhere."""
    canvas = np.zeros((TILE, TILE, 3), np.uint8)
    canvas[: pixels.shape[0], : pixels.shape[1]] = pixels
    return _through(table, canvas, 2).transpose(2, 0, 1)[None]


def _crop(pixels: Bytes, table: NDArray[Any]) -> NDArray[Any]:
    """``[1, 3, 336, 336]``: the middle of a picture whose shorter side is 336."""
    top, left = ((side - TILE) // 2 for side in pixels.shape[:2])
    return _through(table, pixels[top : top + TILE, left : left + TILE], 2).transpose(2, 0, 1)[None]


def _crops(pixels: Bytes, table: NDArray[Any]) -> NDArray[Any]:
    """``[1, 3, 3, 336, 336]``: a picture of 336 x 336 as it is, then the two halves of a canvas twice as high that has
    it in the middle."""
    canvas = np.zeros((2 * TILE, TILE, 3), np.uint8)
    canvas[TILE // 2 : TILE // 2 + TILE] = pixels
    parts = np.stack([pixels, canvas[:TILE], canvas[TILE:]])
    return _through(table, parts, 3).transpose(0, 3, 1, 2)[None]
