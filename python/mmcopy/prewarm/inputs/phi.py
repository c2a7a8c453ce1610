"""Phi-3.5 vision and Phi-4 multimodal: crops of a picture, with the whole of it first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mmcopy.errors import ConfigError

from .family import Config, Input, Noise, Shape, Values, audio_of, number, vision_of
from .tiles import TileFamily

__all__ = ["Phi3V", "Phi4Multimodal"]


class Phi3V(TileFamily):
    """Phi-3 and 3.5 vision by the published shapes: transformers has no class, so the module is the user's own.

    ``pixel_values`` is (pictures, 1 + crops of the largest, 3, 336, 336), ``image_sizes`` the size in whole crops.
    """

    model_types: ClassVar[tuple[str, ...]] = ("phi3_v",)
    max_tiles: ClassVar[int] = 16
    pixels_name: ClassVar[str] = "pixel_values"

    def squares(self, config: Config, shape: Shape) -> int:
        return len(shape.items) * (1 + self.most_crops(config, shape))

    def most_crops(self, config: Config, shape: Shape) -> int:
        """Crops of the picture that has most: the others are padded to it."""
        return max(item[0] * item[1] for item in shape.items) // self.side(config) ** 2

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        side = self.side(config)
        return {
            self.pixels_name: Noise((len(shape.items), 1 + self.most_crops(config, shape), 3, side, side)),
            "image_sizes": Values(np.array(shape.items, np.int64)),
        }


class Phi4Multimodal(Phi3V):
    """Phi-4 multimodal: its image embedding writes into the text's, and so takes both; sound by the audio encoder."""

    model_types: ClassVar[tuple[str, ...]] = ("phi4_multimodal",)
    modalities: ClassVar[tuple[str, ...]] = ("image", "audio")
    default_side: ClassVar[int] = 448
    max_tiles: ClassVar[int] = 36
    pixels_name: ClassVar[str] = "image_pixel_values"

    def side(self, config: Config) -> int:
        return number(vision_of(config), "crop_size", self.default_side)

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        if modality == "image":
            return super().shapes(config, modality, max_pixels)
        return [Shape(modality, items) for items in (((1000,),), ((300,),), ((1000,), (1000,)), ((3000,),))]

    def fit(self, config: Config, shape: Shape) -> Shape:
        if shape.modality == "image":
            return super().fit(config, shape)
        if any(item[0] < 8 for item in shape.items):
            raise ConfigError(f"{shape}: a sound has 8 frames or more")
        return shape

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        if shape.modality == "audio":
            bins, longest = number(audio_of(config), "input_size", 80), max(item[0] for item in shape.items)
            return {"audio_input_features": Noise((len(shape.items), longest, bins))}
        vision = vision_of(config)
        across = self.side(config) // number(vision, "patch_size", 14)
        base = -(-across // 2)
        crops = [(item[0] // self.side(config), item[1] // self.side(config)) for item in shape.items]
        tokens = sum(rows * base * (columns * base + 1) + 1 + base * (base + 1) for rows, columns in crops)
        mask = np.ones((len(shape.items), 1 + self.most_crops(config, shape), across, across), np.int64)
        return {
            **super().inputs(config, shape),
            "image_attention_mask": Values(mask),
            "input_ids": Values(np.full((1, tokens), number(vision, "image_token_id", 200010), np.int64)),
            "inputs_embeds": Noise((1, tokens, number(config, "hidden_size", 3072))),
        }

    def encode(self, model: Any, modality: str, tensors: Mapping[str, Any]) -> Any:
        from mmcopy.encoders.towers import spine

        for module in spine(model):
            embed = getattr(module, "embed_tokens_extend", None)
            if embed is not None and modality == "image":
                return embed.image_embed(**tensors)
            if embed is not None:
                return embed.audio_embed.encoder(tensors["audio_input_features"], None)
        raise ConfigError("the model has no embed_tokens_extend, where Phi-4 keeps its encoders")
