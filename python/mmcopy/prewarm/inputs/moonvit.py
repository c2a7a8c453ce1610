"""MoonViT of Kimi-VL and Kimi K2.5: ``pixel_values`` is (patches, 3, side, side), beside a grid of each picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from mmcopy.errors import ConfigError

from .family import Config, Family, Input, Noise, Shape, Values, number, vision_of
from .grids import default_shapes, fit_to_patches

__all__ = ["KimiK25", "KimiVl"]


class KimiVl(Family):
    """Kimi-VL, by the published shapes: transformers has no class for it, so the module is the user's own."""

    model_types: ClassVar[tuple[str, ...]] = ("kimi_vl", "moonvit")
    max_pixels: ClassVar[int] = 4096 * 14 * 14
    """The published preprocessor's 4096 patches."""

    def side(self, config: Config) -> int:
        vision = vision_of(config)
        return number(vision, "patch_size", 14) * number(vision, "merge_kernel_size", 2)

    def unit(self, config: Config) -> int:
        return self.side(config)

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        side = self.side(config)
        limit = max(self.max_pixels if max_pixels is None else max_pixels, side * side)
        return default_shapes(modality, limit, (side, side), frames=self.frames(config))

    def frames(self, config: Config) -> int:
        """How many frames the tower has positions for."""
        return number(vision_of(config), "pos_emb_time", 4)

    def fit(self, config: Config, shape: Shape) -> Shape:
        side = self.side(config)
        for item in shape.items if shape.modality == "video" else ():
            if item[0] > self.frames(config):
                raise ConfigError(f"{shape}: {item[0]} frames, the tower has positions for {self.frames(config)}")
        return Shape(shape.modality, tuple((*item[:-2], *fit_to_patches(side, item)) for item in shape.items))

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        grid = self.grid(config, shape)
        return {
            "pixel_values": self.pixels(config, grid),
            "image_grid_hws": Values(np.array([each[1:] for each in grid], np.int64)),
        }

    def grid(self, config: Config, shape: Shape) -> list[tuple[int, int, int]]:
        """(frames, rows, columns) of each item, in patches."""
        patch = number(vision_of(config), "patch_size", 14)
        return [
            (item[0] if shape.modality == "video" else 1, item[-2] // patch, item[-1] // patch) for item in shape.items
        ]

    def pixels(self, config: Config, grid: list[tuple[int, int, int]]) -> Noise:
        patch = number(vision_of(config), "patch_size", 14)
        return Noise((sum(math.prod(each) for each in grid), 3, patch, patch))

    def segments(self, config: Config, shape: Shape) -> frozenset[int]:
        return frozenset({len(shape.items)})


class KimiK25(KimiVl):
    """Kimi K2.5: grids with a time axis, and videos of at most ``pos_emb_time`` frames a piece."""

    model_types: ClassVar[tuple[str, ...]] = ("kimi_k25", "kimi_k25_vision")
    modalities: ClassVar[tuple[str, ...]] = ("image", "video")

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        grid = self.grid(config, shape)
        pixel_name, grid_name = {
            "image": ("pixel_values", "image_grid_thw"),
            "video": ("pixel_values_videos", "video_grid_thw"),
        }[shape.modality]
        return {pixel_name: self.pixels(config, grid), grid_name: Values(np.array(grid, np.int64))}
