"""The encoders of a model: where they are, and which dtype they want.

Importing this package needs neither torch nor transformers.
"""

from __future__ import annotations

from .dtypes import EncoderDtype, common_dtype, encoder_dtype, encoder_dtypes, explain_encoder_dtypes
from .towers import MODALITIES, Tower, find_towers, unwrap

__all__ = [
    "MODALITIES",
    "EncoderDtype",
    "Tower",
    "common_dtype",
    "encoder_dtype",
    "encoder_dtypes",
    "explain_encoder_dtypes",
    "find_towers",
    "unwrap",
]
