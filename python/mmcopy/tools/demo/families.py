"""The model families that the gateway preprocesses, as little of each as it needs.

A family is what the gateway reads (a few control tokens, what the chat template writes for a picture, ``config.json``
and ``preprocessor_config.json``) and what a check needs to know: how pixels become the encoder's input.
Nothing comes from a checkpoint; the numbers are the public defaults of each family.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "Arithmetic", "Family", "Layout", "TokenId"]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


class TokenId(str):
    """A value of ``config.json`` that stands for the id this token gets in the tokenizer."""

    __slots__ = ()


class Arithmetic(enum.Enum):
    """How a byte becomes a float; the steps differ in their roundings, which float32 shows."""

    FOLDED = "byte x scale + bias, with scale = 1 / (255 std) and bias = -mean / std in float32"
    FOLDED_WIDE = "the same, with scale and bias computed in float64 and rounded once"
    SCALED = "(byte - 255 mean) / (255 std)"
    RESCALED = "(byte x (1 / 255) - mean) x (1 / std)"
    STEPS = "(byte / 255 - mean) / std"


class Layout(enum.Enum):
    """How a family arranges pixels for its encoder; docs are in :mod:`mmcopy.tools.demo.expected`."""

    MERGED_PATCHES = "patches in blocks of merge x merge, each holding every frame of its temporal patch"
    PLAIN_PATCHES = "patches row by row, the picture padded with black"
    PADDED_PATCHES = "patches row by row, interleaved, zero-padded to a fixed number"
    EXTRA_COLUMN = "patches row by row, interleaved, with one more column of them than the picture fills"
    CROP = "the middle square, channels first"
    TILES = "square tiles, with an overview when there is more than one"
    CROPS = "an overview, then square crops of the picture on a black canvas"
    NOT_RECOMPUTED = "always resized, so nothing to recompute"


@dataclass(frozen=True)
class Family:
    """One family. Sizes are (width, height) in pixels.

    ``served_name`` matters: for some families the gateway looks for the family in the name of the model that is asked
    for, not only in ``model_type``.
    """

    name: str
    tokens: tuple[str, ...]
    image_text: str
    layout: Layout
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    arithmetic: Arithmetic = Arithmetic.FOLDED
    patch: int = 14
    merge: int = 2
    temporal: int = 2
    min_pixels: int = 0
    max_pixels: int = 2**31
    min_side: int = 1
    max_side: int = 2**16
    max_tokens: int = 2**31
    small_sizes: tuple[tuple[int, int], ...] = ((640, 480), (512, 384), (320, 256))
    photo_size: tuple[int, int] = (4032, 3024)
    max_images: int = 10
    video_text: str | None = None
    served_name: str = ""

    def __post_init__(self) -> None:
        if not self.served_name:
            object.__setattr__(self, "served_name", f"{self.name}-demo")

    @property
    def factor(self) -> int:
        """Sides that are multiples of this many pixels need no resize (patch families)."""
        return self.patch * self.merge


def _norm(mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, list[float]]:
    return {"image_mean": list(mean), "image_std": list(std)}


def _qwen(name: str, *, patch: int, clip: bool, image_token: str = "<|image_pad|>", **config: Any) -> Family:
    """The Qwen-VL line: one layout; patch size, normalisation and the prompt's placeholder differ. The gateway takes
    videos from the third generation on."""
    mean, std = (CLIP_MEAN, CLIP_STD) if clip else (HALF, HALF)
    side = patch * 2
    smallest, largest = 4 * side * side, 16384 * side * side
    if patch == 16:
        limits: dict[str, Any] = {"size": {"shortest_edge": smallest, "longest_edge": largest}}
    else:
        limits = {"min_pixels": smallest, "max_pixels": largest}
    vision = {"patch_size": patch, "spatial_patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return Family(
        name=name,
        tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<image>"),
        image_text=f"<|vision_start|>{image_token}<|vision_end|>",
        video_text="<|vision_start|><|video_pad|><|vision_end|>" if patch == 16 else None,
        layout=Layout.MERGED_PATCHES,
        config={
            "image_token_id": TokenId("<|image_pad|>"),
            "video_token_id": TokenId("<|video_pad|>"),
            "vision_start_token_id": TokenId("<|vision_start|>"),
            "vision_end_token_id": TokenId("<|vision_end|>"),
            "vision_config": {**vision, "in_channels": 3, "in_chans": 3},
            **config,
        },
        processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": patch,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **limits,
            **_norm(mean, std),
        },
        mean=mean,
        std=std,
        arithmetic=Arithmetic.SCALED,
        patch=patch,
        min_pixels=smallest,
        max_pixels=largest,
        small_sizes=tuple((w * side, h * side) for w, h in ((20, 15), (16, 12), (10, 8))),
        photo_size=(4032, 3008) if patch == 16 else (4032, 3024),
    )


def _kimi(name: str, image_text: str) -> Family:
    limits = {"in_patch_limit": 16384, "patch_limit_on_one_side": 512}
    return Family(
        name=name,
        tokens=("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
        image_text=image_text,
        layout=Layout.PLAIN_PATCHES,
        config={
            "media_placeholder_token_id": TokenId("<|media_pad|>"),
            "vision_config": {"patch_size": 14, "merge_kernel_size": [2, 2]},
        },
        processor={
            "image_processor_type": "KimiVisionProcessor",
            "media_proc_cfg": {"patch_size": 14, "merge_kernel_size": 2, **limits, **_norm(HALF, HALF)},
            "patch_size": 14,
            "merge_size": 2,
            **limits,
            **_norm(HALF, HALF),
        },
        mean=HALF,
        std=HALF,
        max_pixels=16384 * 14 * 14,
        max_side=512 * 14,
    )


_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]

_ALL = (
    _qwen("qwen3_vl", patch=16, clip=False),
    _qwen("qwen3_5", patch=16, clip=False),
    _qwen("qwen4_exp", patch=16, clip=False),
    _qwen("qwen3_omni_moe", patch=16, clip=False, audio_token_id=TokenId("<|audio_pad|>")),
    _qwen("qwen2_vl", patch=14, clip=True, image_token="<image>", vision_token_id=TokenId("<|image_pad|>")),
    _qwen("qwen2_5_vl", patch=14, clip=True, image_token="<image>", vision_token_id=TokenId("<|image_pad|>")),
    _kimi("kimi_k25", "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"),
    _kimi("kimi_k3", "<|media_pad|>"),
    Family(
        name="llava",
        tokens=("<image>",),
        image_text="<image>",
        layout=Layout.CROP,
        config={"image_token_index": TokenId("<image>"), "vision_config": {"patch_size": 14, "image_size": 336}},
        processor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            **_norm(CLIP_MEAN, CLIP_STD),
        },
        mean=CLIP_MEAN,
        std=CLIP_STD,
        arithmetic=Arithmetic.RESCALED,
        small_sizes=((336, 336), (448, 336), (336, 400)),
        served_name="llava-1.5-demo",
    ),
    Family(
        name="llava_next",
        tokens=("<image>",),
        image_text="<image>",
        layout=Layout.CROPS,
        config={
            "image_token_index": TokenId("<image>"),
            "image_grid_pinpoints": _PINPOINTS,
            "vision_config": {"patch_size": 14, "image_size": 336},
        },
        processor={
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            "image_grid_pinpoints": _PINPOINTS,
            **_norm(CLIP_MEAN, CLIP_STD),
        },
        mean=CLIP_MEAN,
        std=CLIP_STD,
        arithmetic=Arithmetic.RESCALED,
        small_sizes=((336, 336),),
    ),
    Family(
        name="llama4",
        tokens=(
            "<|image_start|>",
            "<|image_end|>",
            "<|image|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        image_text="<|image|>",
        layout=Layout.TILES,
        config={
            "image_token_index": TokenId("<|patch|>"),
            "vision_config": {"patch_size": 14, "image_size": 336, "pixel_shuffle_ratio": 0.5},
        },
        processor={
            "image_processor_type": "Llama4ImageProcessorFast",
            "size": {"height": 336, "width": 336},
            "max_patches": 16,
            **_norm(HALF, HALF),
        },
        mean=HALF,
        std=HALF,
        small_sizes=((336, 336), (336, 200), (180, 336)),
    ),
    Family(
        name="phi3_v",
        tokens=("<|image|>",),
        image_text="<|image|>",
        layout=Layout.NOT_RECOMPUTED,
        config={"img_processor": {"num_img_tokens": 144}},
        processor={
            "image_processor_type": "Phi3VImageProcessor",
            "num_crops": 4,
            **_norm(CLIP_MEAN, CLIP_STD),
        },
        mean=CLIP_MEAN,
        std=CLIP_STD,
        max_images=4,
    ),
    Family(
        name="glm53_flash",
        tokens=("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
        image_text="<|begin_of_image|><|image|><|end_of_image|>",
        video_text="<|video|>",
        layout=Layout.MERGED_PATCHES,
        config={"image_token_id": TokenId("<|image|>"), "vision_config": {"patch_size": 14}},
        processor={
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "patch_expand_factor": 1,
            **_norm(CLIP_MEAN, CLIP_STD),
        },
        mean=CLIP_MEAN,
        std=CLIP_STD,
        arithmetic=Arithmetic.FOLDED_WIDE,
        min_pixels=16 * 2 * 28 * 28,
        max_pixels=8000 * 2 * 28 * 28,
        small_sizes=((560, 420), (448, 336), (280, 224)),
    ),
    Family(
        name="minimax_m3_vl",
        tokens=("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
        image_text="]<]image[>[",
        video_text="]<]video[>[",
        layout=Layout.MERGED_PATCHES,
        config={
            "image_token_index": TokenId("]<]image[>["),
            "video_token_index": TokenId("]<]video[>["),
            "vision_config": {"patch_size": 14},
        },
        processor={
            "patch_size": 14,
            "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
            **_norm(CLIP_MEAN, CLIP_STD),
        },
        mean=CLIP_MEAN,
        std=CLIP_STD,
        arithmetic=Arithmetic.SCALED,
        min_side=112,
        min_pixels=4 * 28 * 28,
        max_pixels=576 * 28 * 28,
        small_sizes=((560, 420), (448, 336), (280, 224)),
    ),
    Family(
        name="gemma4",
        tokens=("<|image>", "<|image|>", "<image|>", "<|video|>"),
        image_text="<|image|>",
        video_text="<|video|>",
        layout=Layout.PADDED_PATCHES,
        config={
            "image_token_id": TokenId("<|image|>"),
            "boi_token_id": TokenId("<|image>"),
            "eoi_token_id": TokenId("<image|>"),
            "video_token_id": TokenId("<|video|>"),
            "vision_config": {"patch_size": 16, "pooling_kernel_size": 3},
        },
        processor={"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280, "do_normalize": False},
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        arithmetic=Arithmetic.RESCALED,
        patch=16,
        merge=3,
        small_sizes=((768, 768), (960, 672), (672, 960)),
    ),
    Family(
        name="inkling",
        tokens=("<|content_image|>", "<|content_audio_input|>", "<|audio|>", "<|unused_200054|>"),
        image_text="<|unused_200054|>",
        layout=Layout.EXTRA_COLUMN,
        config={"vision_config": {"decoder_dmodel": 64}},
        processor={"patch_size": 40, "temporal_patch_size": 2, **_norm(CLIP_MEAN, CLIP_STD)},
        mean=CLIP_MEAN,
        std=CLIP_STD,
        patch=40,
        merge=1,
    ),
    Family(
        name="deepseek_v41",
        tokens=("<\uff5cdeepseek_image\uff5c>",),
        image_text="<\uff5cdeepseek_image\uff5c>",
        layout=Layout.PLAIN_PATCHES,
        config={"image_token_id": TokenId("<\uff5cdeepseek_image\uff5c>"), "vision_config": {"patch_size": 14}},
        processor={"patch_size": 14, **_norm(HALF, HALF)},
        mean=HALF,
        std=HALF,
        arithmetic=Arithmetic.STEPS,
        merge=3,
        min_pixels=295936,
        max_tokens=1024,
        small_sizes=((672, 504), (588, 630), (924, 336)),
    ),
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
