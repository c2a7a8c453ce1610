"""The families that come with mmcopy, one file per kind of input."""

from __future__ import annotations

from .family import Family
from .gemma4 import Gemma4
from .grids import Glm4v, Qwen25Omni, Qwen25Vl, QwenOmni, QwenVl
from .llava import Llava, LlavaNext, LlavaOnevision
from .moonvit import KimiK25, KimiVl
from .phi import Phi3V, Phi4Multimodal
from .pixtral import Mistral3, PixtralFamily
from .tiles import InternVl, Llama4, SquareFamily

__all__ = ["ALL"]

ALL: tuple[Family, ...] = (
    QwenVl(),
    Qwen25Vl(),
    QwenOmni(),
    Qwen25Omni(),
    Glm4v(),
    KimiK25(),
    KimiVl(),
    Llava(),
    LlavaNext(),
    LlavaOnevision(),
    InternVl(),
    SquareFamily(),
    Gemma4(),
    PixtralFamily(),
    Mistral3(),
    Llama4(),
    Phi3V(),
    Phi4Multimodal(),
)
