"""LLaVA and its descendants that choose a grid of squares by the picture's size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from mmcopy.errors import ConfigError

from .family import Config, Input, Noise, Shape, Values, number, vision_of
from .pixtral import PixtralFamily
from .tiles import SquareFamily

__all__ = ["Llava", "LlavaNext", "LlavaOnevision"]

_PIXTRAL = PixtralFamily()


class Llava(SquareFamily):
    """LLaVA 1.5: one square per picture; with Pixtral's tower, pictures of any size."""

    model_types: ClassVar[tuple[str, ...]] = ("llava", "vipllava")

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        return (
            _PIXTRAL.shapes(config, modality, max_pixels)
            if _has_pixtral(config)
            else super().shapes(config, modality, max_pixels)
        )

    def fit(self, config: Config, shape: Shape) -> Shape:
        return _PIXTRAL.fit(config, shape) if _has_pixtral(config) else super().fit(config, shape)

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        return _PIXTRAL.inputs(config, shape) if _has_pixtral(config) else super().inputs(config, shape)

    def unit(self, config: Config) -> int:
        return _PIXTRAL.unit(config) if _has_pixtral(config) else 0

    def segments(self, config: Config, shape: Shape) -> frozenset[int]:
        return _PIXTRAL.segments(config, shape) if _has_pixtral(config) else super().segments(config, shape)

    def layout(self, config: Config, shape: Shape) -> tuple[object, ...]:
        return _PIXTRAL.layout(config, shape) if _has_pixtral(config) else super().layout(config, shape)


class LlavaNext(SquareFamily):
    """LLaVA-NeXT: the picture as a whole, then the squares of the resolution that suits it best.

    ``pixel_values`` is (pictures, squares of the largest, 3, side, side), ``image_sizes`` the original sizes.
    """

    model_types: ClassVar[tuple[str, ...]] = ("llava_next",)

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        by_squares: dict[int, tuple[int, int]] = {}
        for resolution in sorted(self.pinpoints(config), key=lambda each: (each[0] * each[1], abs(each[0] - each[1]))):
            if max_pixels is None or resolution[0] * resolution[1] <= max_pixels:
                by_squares.setdefault(self.tiles(config, resolution), resolution)
        if not by_squares:
            raise ConfigError(f"max_pixels is {max_pixels}, less than every image_grid_pinpoints")
        each = list(by_squares.values())
        shapes = [Shape(modality, (item,)) for item in each[:3]]
        shapes.append(Shape(modality, (each[0], each[min(1, len(each) - 1)])))
        shapes.append(Shape(modality, (each[-1],)))
        return list(dict.fromkeys(shapes))

    def fit(self, config: Config, shape: Shape) -> Shape:
        self.pinpoints(config)
        return shape

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        side = self.side(config)
        most = max(self.tiles(config, item) for item in shape.items)
        return {
            "pixel_values": Noise((len(shape.items), most, 3, side, side)),
            "image_sizes": Values(np.array(shape.items, np.int64)),
        }

    def squares(self, config: Config, shape: Shape) -> int:
        return sum(self.tiles(config, item) for item in shape.items)

    def pinpoints(self, config: Config) -> list[tuple[int, int]]:
        """The resolutions that the model knows. Raises :class:`ConfigError` when the config has none."""
        found = config.get("image_grid_pinpoints")
        if not found:
            raise ConfigError("the config has no image_grid_pinpoints, which say how many squares a picture becomes")
        return [(int(height), int(width)) for height, width in found]

    def tiles(self, config: Config, item: tuple[int, ...]) -> int:
        """Squares of a picture: the whole one, and those of the resolution that keeps most of it and wastes least."""
        height, width = item[-2:]

        def kept(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            effective = min(int(width * scale) * int(height * scale), width * height)
            return effective, effective - resolution[0] * resolution[1]

        best, side = max(self.pinpoints(config), key=kept), self.side(config)
        return -(-best[0] // side) * -(-best[1] // side) + 1


class LlavaOnevision(LlavaNext):
    """LLaVA-OneVision: pictures as LLaVA-NeXT, videos as (videos, frames, 3, side, side)."""

    model_types: ClassVar[tuple[str, ...]] = ("llava_onevision",)
    modalities: ClassVar[tuple[str, ...]] = ("image", "video")
    default_side: ClassVar[int] = 384

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        if modality == "image":
            return super().shapes(config, modality, max_pixels)
        square = (self.side(config), self.side(config))
        most = 32 if max_pixels is None else max(1, min(32, max_pixels // square[0] ** 2))
        return [Shape(modality, ((frames, *square),)) for frames in sorted({min(8, most), most})]

    def fit(self, config: Config, shape: Shape) -> Shape:
        if shape.modality == "image":
            return super().fit(config, shape)
        if len({item[0] for item in shape.items}) > 1:
            raise ConfigError(f"{shape}: videos in one encode have the same number of frames")
        return SquareFamily.fit(self, config, shape)

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        if shape.modality == "image":
            return super().inputs(config, shape)
        side = self.side(config)
        return {"pixel_values_videos": Noise((len(shape.items), shape.items[0][0], 3, side, side))}


def _has_pixtral(config: Config) -> bool:
    return vision_of(config).get("model_type") == "pixtral" and number(vision_of(config), "patch_size", 0) > 0
