"""The encoders of a model: where they are, which dtype they want, and what a warm-up feeds them.

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

from .dtypes import EncoderDtype, common_dtype, encoder_dtype, encoder_dtypes, explain_encoder_dtypes
from .family import Config, Family, Input, Noise, Shape, Values, as_config
from .registry import families, family_for, register_family
from .towers import MODALITIES, Tower, find_towers, unwrap

__all__ = [
    "MODALITIES",
    "Config",
    "EncoderDtype",
    "Family",
    "Input",
    "Noise",
    "Shape",
    "Tower",
    "Values",
    "as_config",
    "common_dtype",
    "encoder_dtype",
    "encoder_dtypes",
    "explain_encoder_dtypes",
    "families",
    "family_for",
    "find_towers",
    "register_family",
    "unwrap",
]
