"""Real transformers models, small enough for a test: random weights, a fraction of a million parameters each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 200,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
PATCHES = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
SQUARE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN3_VISION = {**PATCHES, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32,
                "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}  # fmt: skip
QWEN25_VISION = {**PATCHES, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32, "window_size": 16,
                 "fullatt_block_indexes": [1]}  # fmt: skip
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
       "head_dim": 16}  # fmt: skip
AUDIO = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 16,
         "max_source_positions": 200, "n_window": 8}  # fmt: skip


def qwen2_vl() -> Any:
    vision = {**PATCHES, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision)
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> Any:
    config = transformers.Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=QWEN25_VISION)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> Any:
    text = {**TEXT, "head_dim": 16, "rope_parameters": ROPE}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=QWEN3_VISION)
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen3_vl_moe() -> Any:
    text = {**TEXT, **MOE, "rope_parameters": ROPE}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=QWEN3_VISION)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def qwen2_5_omni() -> Any:
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config=QWEN25_VISION,
        audio_config={**AUDIO, "output_dim": 32},
    )
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


def qwen3_omni_moe() -> Any:
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config={**TEXT, **MOE, "rope_parameters": ROPE},
        vision_config=QWEN3_VISION,
        audio_config={**AUDIO, "output_dim": 32, "downsample_hidden_size": 16, "n_window": 50},
    )
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)


def glm4v() -> Any:
    vision = {**PATCHES, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32, "image_size": 32}
    config = transformers.Glm4vConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision)
    return transformers.Glm4vForConditionalGeneration(config)


def kimi_k25() -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4,
              "projection_hidden_size": 32}  # fmt: skip
    text = {**TEXT, "model_type": "deepseek_v3", "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
            "topk_group": 1, "moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 2}  # fmt: skip
    config = transformers.Kimi_K25Config(text_config=text, vision_config=vision, projection_hidden_size=32)
    return transformers.Kimi_K25ForConditionalGeneration(config)


def llava() -> Any:
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"}, vision_config={**SQUARE, "model_type": "clip_vision_model"}
    )
    return transformers.LlavaForConditionalGeneration(config)


def llava_pixtral() -> Any:
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**SQUARE, "model_type": "pixtral", "image_size": 64, "head_dim": 16},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaForConditionalGeneration(config)


def llava_next() -> Any:
    config = transformers.LlavaNextConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**SQUARE, "model_type": "clip_vision_model"},
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]],
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def llava_onevision() -> Any:
    config = transformers.LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**SQUARE, "model_type": "siglip_vision_model"},
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]],
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def internvl() -> Any:
    config = transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**SQUARE, "image_size": [16, 16], "patch_size": [4, 4], "model_type": "internvl_vision"},
    )
    return transformers.InternVLForConditionalGeneration(config)


def gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 16},
        vision_config={**SQUARE, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma4() -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64,
              "pooling_kernel_size": 3}  # fmt: skip
    text = {**TEXT, "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 200}  # fmt: skip
    config = transformers.Gemma4Config(text_config=text, vision_config=vision)
    return transformers.Gemma4ForConditionalGeneration(config)


def mistral3() -> Any:
    config = transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "head_dim": 16},
        vision_config={**SQUARE, "model_type": "pixtral", "image_size": 64, "head_dim": 16},
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def llama4() -> Any:
    vision = {**SQUARE, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
              "pixel_shuffle_ratio": 0.5}  # fmt: skip
    text = {**TEXT, "head_dim": 16, "intermediate_size_mlp": 32, "num_local_experts": 2}
    config = transformers.Llama4Config(text_config=text, vision_config={**vision, "intermediate_size": 128})
    return transformers.Llama4ForConditionalGeneration(config)


def phi4_multimodal() -> Any:
    vision = {**SQUARE, "crop_size": 16, "image_token_id": 10, "feature_layer": -1}
    audio = {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2,
             "nemo_conv_channels": 16, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
             "downsample_rate": 1, "audio_token_id": 11, "chunk_size": -1}  # fmt: skip
    config = transformers.Phi4MultimodalConfig(**TEXT, vision_config=vision, audio_config=audio)
    return transformers.Phi4MultimodalForCausalLM(config)


# fmt: off
_ALL = (
    qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen2_5_omni, qwen3_omni_moe, glm4v, kimi_k25, llava, llava_pixtral,
    llava_next, llava_onevision, internvl, gemma3, gemma4, mistral3, llama4, phi4_multimodal,
)
# fmt: on
BUILDERS: dict[str, Callable[[], Any]] = {each.__name__: each for each in _ALL}
"""A model by the name of its family."""


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The family's tiny model, in evaluation mode; the same weights each time."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as from_pretrained does it
    try:
        return BUILDERS[name]().eval()
    finally:
        torch.set_default_dtype(default)
