"""The model families that the gateway preprocesses: what it reads of each, and nothing from a checkpoint.

That is a few control tokens, what the chat template writes for a picture, ``config.json`` and
``preprocessor_config.json``. The numbers are the public defaults of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "RECOMPUTED", "Family", "TokenId"]

RECOMPUTED = "qwen3_vl"
"""The family whose tensors the demo recomputes; those of the others are checked by their checksums alone."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


class TokenId(str):
    """A value of ``config.json`` that stands for the id this token gets in the tokenizer."""

    __slots__ = ()


@dataclass(frozen=True)
class Family:
    """One family, as the gateway knows it.

    ``served_name``: for some families the gateway looks at the requested model's name, not only at ``model_type``.
    """

    name: str
    tokens: tuple[str, ...]
    image_text: str
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    max_images: int = 10
    video_text: str | None = None
    served_name: str = ""

    def __post_init__(self) -> None:
        if not self.served_name:
            object.__setattr__(self, "served_name", f"{self.name}-demo")


def _norm(mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, list[float]]:
    return {"image_mean": list(mean), "image_std": list(std)}


def _qwen(name: str, *, patch: int, image_token: str = "<|image_pad|>", **config: Any) -> Family:
    """The Qwen-VL line, which differs in patch size, normalisation and the prompt's placeholder. The gateway takes
    videos from the third generation on."""
    mean, std = (HALF, HALF) if patch == 16 else (CLIP_MEAN, CLIP_STD)
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
    )


def _kimi(name: str, image_text: str) -> Family:
    limits = {"in_patch_limit": 16384, "patch_limit_on_one_side": 512}
    return Family(
        name=name,
        tokens=("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
        image_text=image_text,
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
    )


_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]

_ALL = (
    _qwen("qwen3_vl", patch=16),
    _qwen("qwen3_5", patch=16),
    _qwen("qwen4_exp", patch=16),
    _qwen("qwen3_omni_moe", patch=16, audio_token_id=TokenId("<|audio_pad|>")),
    _qwen("qwen2_vl", patch=14, image_token="<image>", vision_token_id=TokenId("<|image_pad|>")),
    _qwen("qwen2_5_vl", patch=14, image_token="<image>", vision_token_id=TokenId("<|image_pad|>")),
    _kimi("kimi_k25", "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"),
    _kimi("kimi_k3", "<|media_pad|>"),
    Family(
        name="llava",
        tokens=("<image>",),
        image_text="<image>",
        config={"image_token_index": TokenId("<image>"), "vision_config": {"patch_size": 14, "image_size": 336}},
        processor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            **_norm(CLIP_MEAN, CLIP_STD),
        },
        served_name="llava-1.5-demo",
    ),
    Family(
        name="llava_next",
        tokens=("<image>",),
        image_text="<image>",
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
    ),
    Family(
        name="phi3_v",
        tokens=("<|image|>",),
        image_text="<|image|>",
        config={"img_processor": {"num_img_tokens": 144}},
        processor={
            "image_processor_type": "Phi3VImageProcessor",
            "num_crops": 4,
            **_norm(CLIP_MEAN, CLIP_STD),
        },
        max_images=4,
    ),
    Family(
        name="glm53_flash",
        tokens=("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
        image_text="<|begin_of_image|><|image|><|end_of_image|>",
        video_text="<|video|>",
        config={"image_token_id": TokenId("<|image|>"), "vision_config": {"patch_size": 14}},
        processor={
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "patch_expand_factor": 1,
            **_norm(CLIP_MEAN, CLIP_STD),
        },
    ),
    Family(
        name="minimax_m3_vl",
        tokens=("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
        image_text="]<]image[>[",
        video_text="]<]video[>[",
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
    ),
    Family(
        name="gemma4",
        tokens=("<|image>", "<|image|>", "<image|>", "<|video|>"),
        image_text="<|image|>",
        video_text="<|video|>",
        config={
            "image_token_id": TokenId("<|image|>"),
            "boi_token_id": TokenId("<|image>"),
            "eoi_token_id": TokenId("<image|>"),
            "video_token_id": TokenId("<|video|>"),
            "vision_config": {"patch_size": 16, "pooling_kernel_size": 3},
        },
        processor={"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280, "do_normalize": False},
    ),
    Family(
        name="inkling",
        tokens=("<|content_image|>", "<|content_audio_input|>", "<|audio|>", "<|unused_200054|>"),
        image_text="<|unused_200054|>",
        config={"vision_config": {"decoder_dmodel": 64}},
        processor={"patch_size": 40, "temporal_patch_size": 2, **_norm(CLIP_MEAN, CLIP_STD)},
    ),
    Family(
        name="deepseek_v41",
        tokens=("<\uff5cdeepseek_image\uff5c>",),
        image_text="<\uff5cdeepseek_image\uff5c>",
        config={"image_token_id": TokenId("<\uff5cdeepseek_image\uff5c>"), "vision_config": {"patch_size": 14}},
        processor={"patch_size": 14, **_norm(HALF, HALF)},
    ),
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
