"""How each model family makes the encoder's input from pixels: the numbers that the oracle computes with.

They are the public defaults of each family, and agree with the ``preprocessor_config.json`` that the demo writes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PREPROCESSING", "Arithmetic", "Layout", "Preprocessing"]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


class Arithmetic(enum.Enum):
    """How a byte becomes a float; the steps differ in their roundings, which float32 shows."""

    FOLDED = "byte x scale + bias, with scale = 1 / (255 std) and bias = -mean / std in float32"
    FOLDED_WIDE = "the same, with scale and bias computed in float64 and rounded once"
    SCALED = "(byte - 255 mean) / (255 std)"
    RESCALED = "(byte x (1 / 255) - mean) x (1 / std)"
    STEPS = "(byte / 255 - mean) / std"


class Layout(enum.Enum):
    """How a family arranges pixels for its encoder; :mod:`tests.rigs.oracle` has the shapes."""

    MERGED_PATCHES = "patches in blocks of merge x merge, each holding every frame of its temporal patch"
    PLAIN_PATCHES = "patches row by row, the picture padded with black"
    PADDED_PATCHES = "patches row by row, interleaved, zero-padded to a fixed number"
    EXTRA_COLUMN = "patches row by row, interleaved, with one more column of them than the picture fills"
    CROP = "the middle square, channels first"
    TILES = "square tiles, with an overview when there is more than one"
    CROPS = "an overview, then square crops of the picture on a black canvas"
    NOT_RECOMPUTED = "always resized, so nothing to recompute"


@dataclass(frozen=True)
class Preprocessing:
    """One family. ``sizes``: (width, height) of pictures that it does not resize, where there are such."""

    name: str
    layout: Layout
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    arithmetic: Arithmetic = Arithmetic.FOLDED
    patch: int = 14
    merge: int = 2
    temporal: int = 2
    min_pixels: int = 0
    max_pixels: int = 2**31
    min_side: int = 1
    max_side: int = 2**16
    max_tokens: int = 2**31
    sizes: tuple[tuple[int, int], ...] = ((640, 480), (512, 384), (320, 256))

    @property
    def factor(self) -> int:
        """Sides that are multiples of this many pixels need no resize (patch families)."""
        return self.patch * self.merge


def _qwen(name: str, *, patch: int) -> Preprocessing:
    """The Qwen-VL line: one layout; patch size and normalisation differ."""
    side = patch * 2
    return Preprocessing(
        name,
        Layout.MERGED_PATCHES,
        *((HALF, HALF) if patch == 16 else (CLIP_MEAN, CLIP_STD)),
        arithmetic=Arithmetic.SCALED,
        patch=patch,
        min_pixels=4 * side * side,
        max_pixels=16384 * side * side,
        sizes=tuple((w * side, h * side) for w, h in ((20, 15), (16, 12), (10, 8))),
    )


def _kimi(name: str) -> Preprocessing:
    return Preprocessing(name, Layout.PLAIN_PATCHES, HALF, HALF, max_pixels=16384 * 14 * 14, max_side=512 * 14)


_ALL = (
    *(_qwen(name, patch=16) for name in ("qwen3_vl", "qwen3_5", "qwen4_exp", "qwen3_omni_moe")),
    *(_qwen(name, patch=14) for name in ("qwen2_vl", "qwen2_5_vl")),
    _kimi("kimi_k25"),
    _kimi("kimi_k3"),
    Preprocessing(
        "llava",
        Layout.CROP,
        CLIP_MEAN,
        CLIP_STD,
        arithmetic=Arithmetic.RESCALED,
        sizes=((336, 336), (448, 336), (336, 400)),
    ),
    Preprocessing("llava_next", Layout.CROPS, CLIP_MEAN, CLIP_STD, arithmetic=Arithmetic.RESCALED, sizes=((336, 336),)),
    Preprocessing("llama4", Layout.TILES, HALF, HALF, sizes=((336, 336), (336, 200), (180, 336))),
    Preprocessing("phi3_v", Layout.NOT_RECOMPUTED, CLIP_MEAN, CLIP_STD),
    Preprocessing(
        "glm53_flash",
        Layout.MERGED_PATCHES,
        CLIP_MEAN,
        CLIP_STD,
        arithmetic=Arithmetic.FOLDED_WIDE,
        min_pixels=16 * 2 * 28 * 28,
        max_pixels=8000 * 2 * 28 * 28,
        sizes=((560, 420), (448, 336), (280, 224)),
    ),
    Preprocessing(
        "minimax_m3_vl",
        Layout.MERGED_PATCHES,
        CLIP_MEAN,
        CLIP_STD,
        arithmetic=Arithmetic.SCALED,
        min_side=112,
        min_pixels=4 * 28 * 28,
        max_pixels=576 * 28 * 28,
        sizes=((560, 420), (448, 336), (280, 224)),
    ),
    Preprocessing(
        "gemma4",
        Layout.PADDED_PATCHES,
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
        arithmetic=Arithmetic.RESCALED,
        patch=16,
        merge=3,
        sizes=((768, 768), (960, 672), (672, 960)),
    ),
    Preprocessing("inkling", Layout.EXTRA_COLUMN, CLIP_MEAN, CLIP_STD, patch=40, merge=1),
    Preprocessing(
        "deepseek_v41",
        Layout.PLAIN_PATCHES,
        HALF,
        HALF,
        arithmetic=Arithmetic.STEPS,
        merge=3,
        min_pixels=295936,
        max_tokens=1024,
        sizes=((672, 504), (588, 630), (924, 336)),
    ),
)

PREPROCESSING: Mapping[str, Preprocessing] = {family.name: family for family in _ALL}
