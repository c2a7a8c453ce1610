"""Pictures as a flat list of patches, with the grid (frames, rows, columns) of each: Qwen-VL, GLM-4V and their kin.

``pixel_values`` is (patches, channels x frames of a patch x side x side), ``image_grid_thw`` counts patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mmcopy.errors import ConfigError

from .family import Config, Family, Input, Noise, Shape, Values, audio_of, number, vision_of

__all__ = [
    "Glm4v",
    "GridFamily",
    "Qwen25Omni",
    "Qwen25Vl",
    "QwenOmni",
    "QwenVl",
    "default_shapes",
    "fit_to_patches",
    "grid_of",
]

MOST_FRAMES = 32
"""Of the largest video that is warmed by default."""


def fit_to_patches(side: int, item: tuple[int, ...]) -> tuple[int, int]:
    """Height and width rounded to whole multiples of ``side``, one at least, as the preprocessors do."""
    height, width = item[-2:]
    return max(side, round(height / side) * side), max(side, round(width / side) * side)


def default_shapes(
    modality: str, max_pixels: int, smallest: tuple[int, int], *, frames: int = MOST_FRAMES, longest: int = 1 << 20
) -> list[Shape]:
    """What covers the compile buckets of an encoder that takes any size: pictures of 1024 x 1024 and the like, or less.

    Two sizes that share no side, for one picture, for two at once and for a short video: a compiler makes dynamic what
    it has seen change. The smallest, since a side of one is a bucket of its own; the largest last, when all is warm.
    """
    side = min(longest, math.isqrt(max_pixels))
    typical = min(1024, side)
    square, wide = (typical, typical), (max(1, typical * 3 // 4), max(1, typical // 2))
    small, strip = (max(1, typical // 2), max(1, typical * 3 // 4)), (max(1, typical // 4), max(1, typical * 5 // 8))
    if modality == "video":
        edge, short = min(448, side), min(8, frames)
        sizes = [(short, edge, edge), (short, max(1, edge * 3 // 4), max(1, edge // 2)), (frames, edge, edge)]
        return list(dict.fromkeys(Shape(modality, (each,)) for each in sizes))
    pictures = [(square,), (wide,), (square, small), (wide, strip), (smallest,), ((side, side),)]
    return list(dict.fromkeys(Shape(modality, items) for items in pictures))


def grid_of(config: Config, shape: Shape) -> list[tuple[int, int, int]]:
    """(frames, rows, columns) of each item, in patches."""
    vision = vision_of(config)
    patch, temporal = number(vision, "patch_size", 14), number(vision, "temporal_patch_size", 2)
    return [
        (-(-item[0] // temporal) if shape.modality == "video" else 1, item[-2] // patch, item[-1] // patch)
        for item in shape.items
    ]


class GridFamily(Family):
    """What the families of flat patches have in common; attention is within one frame."""

    modalities: ClassVar[tuple[str, ...]] = ("image", "video")
    max_pixels: ClassVar[int] = 12845056
    """What the published preprocessors allow."""

    def side(self, config: Config) -> int:
        """Height and width are multiples of this: a patch times the patches that become one token."""
        vision = vision_of(config)
        return number(vision, "patch_size", 14) * number(vision, "spatial_merge_size", 2)

    def unit(self, config: Config) -> int:
        return self.side(config)

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        side = self.side(config)
        limit = max(self.max_pixels if max_pixels is None else max_pixels, side * side)
        return default_shapes(modality, limit, (side, side))

    def fit(self, config: Config, shape: Shape) -> Shape:
        side = self.side(config)
        return Shape(shape.modality, tuple((*item[:-2], *fit_to_patches(side, item)) for item in shape.items))

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        vision = vision_of(config)
        grid = grid_of(config, shape)
        pixels = Noise((sum(math.prod(each) for each in grid), self.patch_numbers(vision)))
        pixel_name, grid_name = {
            "image": ("pixel_values", "image_grid_thw"),
            "video": ("pixel_values_videos", "video_grid_thw"),
        }[shape.modality]
        return {pixel_name: pixels, grid_name: Values(np.array(grid, np.int64))}

    def patch_numbers(self, vision: Config) -> int:
        """How many numbers a patch is."""
        channels = number(vision, "in_channels", number(vision, "in_chans", 3))
        return channels * number(vision, "temporal_patch_size", 2) * number(vision, "patch_size", 14) ** 2

    def segments(self, config: Config, shape: Shape) -> frozenset[int]:
        return frozenset({sum(frames for frames, _, _ in grid_of(config, shape))})


class QwenVl(GridFamily):
    """Qwen2-VL, Qwen3-VL, Qwen3.5, and their forms with experts."""

    model_types: ClassVar[tuple[str, ...]] = (
        "qwen2_vl", "qwen2_vl_vision", "qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision", "qwen3_5",
        "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision",
    )  # fmt: skip


class Qwen25Vl(GridFamily):
    """Qwen2.5-VL: most layers attend within windows, so the number of pieces follows from the size."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl", "qwen2_5_vl_vision")

    def segments(self, config: Config, shape: Shape) -> frozenset[int]:
        return frozenset({*super().segments(config, shape), windows(config, shape)})


def windows(config: Config, shape: Shape) -> int:
    """How many attention windows a shape has."""
    vision = vision_of(config)
    merge = number(vision, "spatial_merge_size", 2)
    tokens = max(1, number(vision, "window_size", 112) // merge // number(vision, "patch_size", 14))
    return sum(
        frames * math.ceil(rows // merge / tokens) * math.ceil(columns // merge / tokens)
        for frames, rows, columns in grid_of(config, shape)
    )


class QwenOmni(GridFamily):
    """The thinkers of Qwen2.5-Omni and Qwen3-Omni: Qwen-VL's patches, and sound as a spectrogram."""

    model_types: ClassVar[tuple[str, ...]] = (
        "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_vision_encoder", "qwen3_omni_moe_audio_encoder",
    )  # fmt: skip
    modalities: ClassVar[tuple[str, ...]] = ("image", "video", "audio")
    max_audio_frames: ClassVar[int] = 30000
    """Five minutes at 100 frames a second."""

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        if modality != "audio":
            return super().shapes(config, modality, max_pixels)
        sounds: list[tuple[tuple[int, ...], ...]] = [((3000,),), ((1100,),), ((3000,), (700,)), ((100,),)]
        return [Shape(modality, items) for items in (*sounds, ((self.max_audio_frames,),))]

    def fit(self, config: Config, shape: Shape) -> Shape:
        if shape.modality != "audio":
            return super().fit(config, shape)
        if any(item[0] < 4 for item in shape.items):
            raise ConfigError(f"{shape}: a sound of fewer than 4 frames becomes no token")
        return shape

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        if shape.modality != "audio":
            return super().inputs(config, shape)
        lengths = [item[0] for item in shape.items]
        mask = np.arange(max(lengths))[None, :] < np.array(lengths)[:, None]
        bins = number(audio_of(config), "num_mel_bins", 128)
        return {
            "input_features": Noise((len(lengths), bins, max(lengths))),
            "feature_attention_mask": Values(mask.astype(np.int64)),
        }

    def segments(self, config: Config, shape: Shape) -> frozenset[int]:
        if shape.modality != "audio":
            return super().segments(config, shape)
        window = 2 * number(audio_of(config), "n_window", 50)
        return frozenset({sum(math.ceil(item[0] / window) for item in shape.items)})

    def encode_tower(self, tower: Any, modality: str, tensors: Mapping[str, Any]) -> Any:
        if modality != "audio":
            return super().encode_tower(tower, modality, tensors)
        features, mask = tensors["input_features"], tensors["feature_attention_mask"].bool()
        lengths = mask.sum(1)
        packed = features.permute(0, 2, 1)[mask].permute(1, 0)
        if not hasattr(tower, "_get_feat_extract_output_lengths"):
            return tower(packed, feature_lens=lengths)
        after, _ = tower._get_feat_extract_output_lengths(lengths)
        return tower(packed, feature_lens=lengths, aftercnn_lens=after)


class Qwen25Omni(QwenOmni):
    """Qwen2.5-Omni: with the windows of Qwen2.5-VL."""

    model_types: ClassVar[tuple[str, ...]] = (
        "qwen2_5_omni", "qwen2_5_omni_thinker", "qwen2_5_omni_vision_encoder", "qwen2_5_omni_audio_encoder",
    )  # fmt: skip

    def segments(self, config: Config, shape: Shape) -> frozenset[int]:
        found = super().segments(config, shape)
        return found if shape.modality == "audio" else found | {windows(config, shape)}


class Glm4v(GridFamily):
    """GLM-4V, 4.1V, 4.5V and 4.6V."""

    model_types: ClassVar[tuple[str, ...]] = (
        "glm4v", "glm4v_vision", "glm4v_moe", "glm4v_moe_vision", "glm46v", "glm_ocr", "glm_ocr_vision",
    )  # fmt: skip
    max_pixels: ClassVar[int] = 11760000
