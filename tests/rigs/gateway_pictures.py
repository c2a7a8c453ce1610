"""Pictures for the gateway to preprocess, and what a Qwen3-VL worker ought to get for them: numpy and ml_dtypes alone.

Sides are multiples of 32 pixels and areas from 65536 pixels on, so that the gateway resizes nothing and every byte of
its answer is known.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from PIL import Image

PATCH, MERGE, FRAMES = 16, 2, 2
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

Tensor = dict[str, Any]
"""As worker_process.py writes it down: dtype, shape, nbytes, sha256 (and there the path it came by)."""


def picture(seed: int, width: int = 256, height: int = 256) -> np.ndarray:
    """RGB noise ``[height, width, 3]`` of uint8; no two seeds share a picture."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def expected(
    pictures: Sequence[np.ndarray], *, engine: str = "tokenspeed", dtype: str = "bfloat16"
) -> dict[str, Tensor]:
    """All tensors of a request for ``pictures``: one item per picture, for vLLM one item for all of them."""
    pixels = [encoder_input(each, dtype) for each in pictures]
    grids = [np.array([[1, each.shape[0] // PATCH, each.shape[1] // PATCH]]) for each in pictures]
    counts = [np.array([grid.prod()]) for grid in grids]
    name = "pixel_values" if engine == "vllm" else "encoder_input"
    arrays: dict[str, np.ndarray] = {}
    if engine == "vllm":
        pixels, grids, counts = ([np.concatenate(each)] for each in (pixels, grids, counts))
    for i, (pixel, grid, count) in enumerate(zip(pixels, grids, counts, strict=True)):
        arrays |= {f"item{i}.{name}": pixel, f"item{i}.image_grid_thw": grid, f"item{i}.patches_per_image": count}
    return {label: described(array) for label, array in arrays.items()}


def described(array: np.ndarray) -> Tensor:
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "nbytes": array.nbytes,
        "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
    }


def encoder_input(pixels: np.ndarray, dtype: str) -> np.ndarray:
    """``[patches, 1536]``: patches in blocks of 2 x 2, each as channel, frame, row, column, both frames the same."""
    values = (pixels.astype(np.float32) - np.float32(127.5)) / np.float32(127.5)
    blocks = MERGE * PATCH
    patches = [
        np.repeat(values[y : y + PATCH, x : x + PATCH].transpose(2, 0, 1)[:, None], FRAMES, axis=1).reshape(-1)
        for top in range(0, pixels.shape[0], blocks)
        for left in range(0, pixels.shape[1], blocks)
        for y in range(top, top + blocks, PATCH)
        for x in range(left, left + blocks, PATCH)
    ]
    return np.stack(patches).astype(DTYPES[dtype])
