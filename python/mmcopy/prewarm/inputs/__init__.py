"""What a warm-up feeds a model's encoders: one family per kind of model, one file per kind of input.

A model that mmcopy does not know gets warm-up inputs by one function, :func:`register_family`:

    class Mine(Family):
        model_types = ("mine",)

        def shapes(self, config, modality, max_pixels): ...
        def fit(self, config, shape): ...
        def inputs(self, config, shape):
            height, width = shape.items[0]
            return {"pixel_values": Noise((1, 3, height, width))}

    register_family(Mine())

Importing this package needs neither torch nor transformers.
"""

from __future__ import annotations

from .family import Config, Family, Input, Noise, Shape, Values, as_config
from .registry import families, family_for, register_family

__all__ = [
    "Config",
    "Family",
    "Input",
    "Noise",
    "Shape",
    "Values",
    "as_config",
    "families",
    "family_for",
    "register_family",
]
