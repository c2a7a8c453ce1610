"""What a warm-up feeds an encoder: pure descriptions, made from a model's config alone.

A :class:`Family` turns a :class:`Shape` (the sizes of pictures, videos or sounds) into :class:`Noise` and
:class:`Values`, one per keyword of the model's own method. Nothing here imports torch, so that every rank, and every
test without a GPU, computes the same.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from mmcopy.errors import ConfigError

__all__ = ["Config", "Family", "Input", "Noise", "Shape", "Values", "as_config", "vision_of"]

Config: TypeAlias = Mapping[str, Any]
"""A model's config as nested dicts, the way config.json has it."""

_SIDES = {"image": ("height", "width"), "video": ("frames", "height", "width"), "audio": ("frames",)}


@dataclass(frozen=True, slots=True)
class Shape:
    """What one encode takes: for each image (height, width), for each video (frames, height, width), both in pixels,
    for each sound (frames,) of its spectrogram.

    Raises :class:`ConfigError` for a modality, a number of sides or a side that cannot be.
    """

    modality: str
    items: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        sides = _SIDES.get(self.modality)
        if sides is None:
            raise ConfigError(f"modality {self.modality!r}: want one of {', '.join(_SIDES)}")
        if not isinstance(self.items, tuple):
            raise ConfigError(f"{self.modality} sizes {self.items!r}: want a tuple of ({', '.join(sides)})")
        if not self.items:
            raise ConfigError(f"a {self.modality} shape without an item")
        for item in self.items:
            if (
                not isinstance(item, tuple)
                or len(item) != len(sides)
                or not all(isinstance(side, int) and side > 0 for side in item)
            ):
                raise ConfigError(f"{self.modality} size {item}: want ({', '.join(sides)}), each 1 or more")

    def __str__(self) -> str:
        return f"{self.modality} " + " + ".join("x".join(map(str, item)) for item in self.items)

    @property
    def volume(self) -> int:
        """Pixels, or frames of sound, of all items together: what memory and time grow with."""
        return sum(math.prod(item) for item in self.items)


@dataclass(frozen=True, slots=True)
class Noise:
    """A floating-point input in the encoder's dtype: normally distributed, or between 0 and 1 where ``unit``.

    Never zeros: some models drop those as padding.
    """

    shape: tuple[int, ...]
    unit: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """A side tensor with just these values, such as grids."""

    array: np.ndarray[Any, np.dtype[Any]]


Input: TypeAlias = Noise | Values


class Family(ABC):
    """One family of models. Subclass it, give ``model_types``, and pass it to :func:`register_family`.

    A family holds no state. ``config`` is always the model's config as nested dicts; a tower's own config does too.
    """

    model_types: ClassVar[tuple[str, ...]]
    """``model_type`` of the configs that it is for, those of a tower by itself included."""

    modalities: ClassVar[tuple[str, ...]] = ("image",)
    """What it has inputs for."""

    @abstractmethod
    def shapes(self, config: Config, modality: str, max_pixels: int | None) -> Sequence[Shape]:
        """The default warm-up of a modality, the largest last. ``max_pixels``: as the preprocessor's setting."""

    @abstractmethod
    def fit(self, config: Config, shape: Shape) -> Shape:
        """``shape`` as the family's preprocessor would make it: rounded to whole patches, or to whole tiles.

        Raises :class:`ConfigError` for what the encoder cannot take.
        """

    @abstractmethod
    def inputs(self, config: Config, shape: Shape) -> dict[str, Input]:
        """The encoder's inputs for a fitted shape, by the keywords of the model's method, pixels or sound first."""

    def shrink(self, config: Config, shape: Shape) -> Shape | None:
        """About half of ``shape``, for another try when memory did not suffice; None when it is the smallest."""
        smaller = _halved(shape)
        if smaller is None:
            return None
        try:
            fitted = self.fit(config, smaller)
        except ConfigError:  # too small for the encoder
            return None
        return fitted if fitted.volume < shape.volume else None

    def segments(self, config: Config, shape: Shape) -> frozenset[int]:
        """In how many pieces attention runs for a fitted shape, where pieces attend to themselves alone: one number
        per kind of layer. Empty where the number is always the same."""
        return frozenset()

    def layout(self, config: Config, shape: Shape) -> tuple[object, ...]:
        """What else of a fitted shape a compiled encoder is compiled for; two equal ones have to be warmed."""
        return ()

    def unit(self, config: Config) -> int:
        """The side in pixels of one token, where sizes vary: a picture that is one token high or wide is compiled for
        by itself. 0 where they do not vary."""
        return 0

    def encode(self, model: Any, modality: str, tensors: Mapping[str, Any]) -> Any:
        """Run the encoder the way the model itself does: by its ``get_image_features`` and the like, found at any
        level; a tower by itself, or a model without those methods, gets the tensors as positional arguments."""
        from mmcopy.encoders.towers import find_towers, spine

        for module in spine(model):
            method = getattr(module, f"get_{modality}_features", None)
            if method is not None:
                first, *rest = tensors  # the pixels' keyword is not the same in every version of transformers
                return method(tensors[first], **{name: tensors[name] for name in rest})
        tower = find_towers(model)[modality]
        if isinstance(tower, str):
            raise ConfigError(f"no {modality} encoder: {tower}")
        return self.encode_tower(tower.module, modality, tensors)

    def encode_tower(self, tower: Any, modality: str, tensors: Mapping[str, Any]) -> Any:
        """Run a tower that no model is around."""
        return tower(*tensors.values())


def as_config(config: Any) -> Config:
    """A transformers config, a dict, a dataclass or an object with attributes of its own as nested dicts.

    Raises :class:`ConfigError` for anything else.
    """
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return {str(key): as_config(value) if _nested(value) else value for key, value in config.items()}
    attributes = _attributes(config)
    if attributes is not None:
        return {key: as_config(value) if _nested(value) else value for key, value in attributes.items()}
    raise ConfigError(f"a config is a {type(config).__name__}, want a transformers config, a dict or an object")


def vision_of(config: Config) -> Config:
    """The vision tower's part of a model's config; the config itself when it is a tower's."""
    config = config.get("thinker_config") or config
    return config.get("vision_config") or config


def audio_of(config: Config) -> Config:
    """The audio tower's part of a model's config; the config itself when it is a tower's."""
    config = config.get("thinker_config") or config
    return config.get("audio_config") or config


def number(config: Config, name: str, default: int) -> int:
    """A whole number of a config; the first one where it has one for each side, ``default`` where it has none.

    Raises :class:`ConfigError` for a value that is not a number.
    """
    value = config.get(name, default)
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        value = value[0]
    try:
        return default if value is None else int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"the config's {name} is {config.get(name)!r}, want a whole number") from None


def _nested(value: object) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "to_dict") or _attributes(value) is not None


def _attributes(value: object) -> Mapping[str, Any] | None:
    """The attributes of an object of a user's own class; None for plain values, classes and functions."""
    if isinstance(value, (type, enum.Enum, str, int, float)) or callable(value):
        return None
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    found: Mapping[str, Any] | None = getattr(value, "__dict__", None)
    return found


def _halved(shape: Shape) -> Shape | None:
    """Half of it: half of the items, of a single video's frames, or of a single picture's area."""
    if len(shape.items) > 1:
        return Shape(shape.modality, shape.items[: len(shape.items) // 2])
    item = shape.items[0]
    if shape.modality != "image" and item[0] > 1:
        return Shape(shape.modality, ((item[0] // 2, *item[1:]),))
    if shape.modality == "audio":
        return None
    sides = tuple(max(1, round(side * math.sqrt(0.5))) for side in item[-2:])
    return None if sides == item[-2:] else Shape(shape.modality, ((*item[:-2], *sides),))
