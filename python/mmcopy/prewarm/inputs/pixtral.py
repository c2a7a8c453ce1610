"""Pixtral's tower, in Mistral 3 and Pixtral: whole pictures of any size, padded to the largest of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from mmcopy.errors import ConfigError

from .family import Config, Family, Input, Noise, Shape, Values, number, vision_of
from .grids import default_shapes, fit_to_patches

__all__ = ["Mistral3", "PixtralFamily"]


class PixtralFamily(Family):
    """``pixel_values`` is (pictures, 3, height, width) of the largest, ``image_sizes`` each one's own size."""

    model_types: ClassVar[tuple[str, ...]] = ("pixtral",)
    merge_default: ClassVar[int] = 1
    fewest_tokens: ClassVar[int] = 1

    def side(self, config: Config) -> int:
        merge = number(config, "spatial_merge_size", self.merge_default)
        return number(vision_of(config), "patch_size", 16) * merge

    def unit(self, config: Config) -> int:
        return self.side(config)

    def longest(self, config: Config) -> int:
        """The tower has positions for pictures up to this height and width."""
        return number(vision_of(config), "image_size", 1024)

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        side, longest = self.side(config), self.longest(config)
        limit = longest * longest if max_pixels is None else max_pixels
        smallest = (side, side * self.fewest_tokens)
        return default_shapes(modality, max(limit, smallest[0] * smallest[1]), smallest, longest=longest)

    def fit(self, config: Config, shape: Shape) -> Shape:
        side = self.side(config)
        items = []
        for item in shape.items:
            height, width = fit_to_patches(side, item)
            if max(height, width) > self.longest(config):
                raise ConfigError(f"{shape}: {height}x{width}, the tower's longest side is {self.longest(config)}")
            if height * width < side * side * self.fewest_tokens:
                width = side * self.fewest_tokens
            items.append((height, width))
        return Shape(shape.modality, tuple(items))

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        height, width = (max(item[axis] for item in shape.items) for axis in (0, 1))
        return {
            "pixel_values": Noise((len(shape.items), 3, height, width)),
            "image_sizes": Values(np.array(shape.items, np.int64)),
        }

    def segments(self, config: Config, shape: Shape) -> frozenset[int]:
        return frozenset({len(shape.items)})

    def layout(self, config: Config, shape: Shape) -> tuple[object, ...]:
        """Which pictures of the batch are as high, or as wide, as the largest."""
        height, width = (max(item[axis] for item in shape.items) for axis in (0, 1))
        return tuple((item[0] == height, item[1] == width) for item in shape.items)


class Mistral3(PixtralFamily):
    """Mistral 3: tokens are merged, and a picture of a single merged token fails in the model's projector."""

    model_types: ClassVar[tuple[str, ...]] = ("mistral3",)
    merge_default: ClassVar[int] = 2
    fewest_tokens: ClassVar[int] = 2
