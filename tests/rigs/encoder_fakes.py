"""Encoders whose behaviour a test decides; the code under test sees a torch module with a config like any other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from mmcopy.prewarm.inputs import Config, Family, Input, Noise, Shape


class PlainFamily(Family):
    """Pictures of any size, as they are: (items, 3, height, width) of the largest."""

    model_types: ClassVar[tuple[str, ...]] = ("plain",)
    modalities: ClassVar[tuple[str, ...]] = ("image", "video")

    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        sizes = [(8, 8), (8, 16), (32, 32)]
        return [Shape(modality, ((2, *size) if modality == "video" else size,)) for size in sizes]

    def fit(self, config: Config, shape: Shape) -> Shape:
        return shape

    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        return {"pixel_values": Noise((len(shape.items), *shape.items[0]))}


PLAIN = PlainFamily()


class Tower(nn.Module):
    """Notes every call, and does to it what ``behave`` does. ``inference``: in that mode, by ordinary tensors."""

    def __init__(self, behave: Callable[[torch.Tensor], object] = lambda pixels: None) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(1, 1, dtype=torch.float16)
        self.behave = behave
        self.calls: list[torch.Tensor] = []
        self.inference: list[bool] = []
        self.threads: list[str] = []

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        self.calls.append(pixels.clone())
        self.inference.append(torch.is_inference_mode_enabled() and not pixels.is_inference())
        self.threads.append(threading.current_thread().name)
        self.behave(pixels)
        return pixels.sum()


class Model(nn.Module):
    """A model with one vision tower, and a config of the family above."""

    def __init__(self, behave: Callable[[torch.Tensor], object] = lambda pixels: None, *, video: bool = False) -> None:
        super().__init__()
        self.visual = Tower(behave)
        self.config: Mapping[str, Any] = {"model_type": "plain"}
        if video:
            self.get_video_features = self.get_image_features

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Shapes of the pixels of every call."""
        return [tuple(call.shape) for call in self.visual.calls]

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.visual(pixel_values)
        return result
