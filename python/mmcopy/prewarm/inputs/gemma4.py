"""Gemma 4: patches padded to a fixed number, with each one's place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from .family import Config, Family, Input, Noise, Shape, Values, number, vision_of

__all__ = ["Gemma4"]


class Gemma4(Family):
    """``pixel_values`` is (pictures, patches, 3 x side x side) between 0 and 1, ``image_position_ids`` the column and
    row of each patch, -1 where there is none. The number of patches is always the same: only that of pictures varies.
    """

    model_types: ClassVar[tuple[str, ...]] = ("gemma4", "gemma4_vision")
    modalities: ClassVar[tuple[str, ...]] = ("image", "video")

    def pooled(self, config: Config) -> int:
        """Rows and columns of patches that become one token."""
        return number(vision_of(config), "pooling_kernel_size", 3)

    def unit(self, config: Config) -> int:
        return number(vision_of(config), "patch_size", 16) * self.pooled(config)

    def most_patches(self, config: Config, modality: str) -> int:
        """To how many patches a picture, or a frame, is padded: 280 and 70 tokens in the published preprocessors."""
        tokens = number(config, "vision_soft_tokens_per_image", 280) if modality == "image" else 70
        return tokens * self.pooled(config) ** 2

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        if modality == "video":
            most = 32 if max_pixels is None else 2
            frames = [Shape(modality, ((count, 448, 448),)) for count in sorted({min(8, most), most})]
            return [self.fit(config, each) for each in frames]
        pictures: list[tuple[tuple[int, int], ...]] = [((1024, 1024),), ((768, 1280),), ((1024, 1024), (512, 768))]
        pictures.append(((1, 1),))  # one token: a bucket of its own
        if max_pixels is None:
            pictures.append(((1024, 1024),) * 8)
        return [self.fit(config, Shape(modality, items)) for items in pictures]

    def fit(self, config: Config, shape: Shape) -> Shape:
        patch, pooled = number(vision_of(config), "patch_size", 16), self.pooled(config)
        most, unit = self.most_patches(config, shape.modality), patch * pooled
        items = []
        for item in shape.items:
            height, width = item[-2:]
            scale = min(1.0, math.sqrt(most * patch * patch / (height * width)))
            sides = [max(1, math.floor(side * scale / unit)) for side in (height, width)]
            if sides[0] * sides[1] > most // pooled**2:  # a strip: one side was rounded up to one
                sides = [min(side, most // pooled**2) for side in sides]
            items.append((*item[:-2], sides[0] * unit, sides[1] * unit))
        return Shape(shape.modality, tuple(items))

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        patch = number(vision_of(config), "patch_size", 16)
        most = self.most_patches(config, shape.modality)
        places = []
        for item in shape.items:
            rows, columns = item[-2] // patch, item[-1] // patch
            place = np.full((most, 2), -1, np.int64)
            place[: rows * columns] = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
            places += [place] * (item[0] if shape.modality == "video" else 1)
        pixels, positions = Noise((len(places), most, 3 * patch * patch), unit=True), Values(np.stack(places))
        if shape.modality == "image":
            return {"pixel_values": pixels, "image_position_ids": positions}
        return {
            "pixel_values_videos": pixels,
            "video_position_ids": positions,
            "num_frames_per_video": Values(np.array([item[0] for item in shape.items], np.int64)),
        }
