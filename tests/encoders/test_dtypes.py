"""Which dtype real encoders want: transformers' own classes, wrapped, quantised and mixed, and modules of any kind."""

from __future__ import annotations

import contextlib
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mmcopy import encoder_dtype, encoder_dtypes
from mmcopy.encoders import explain_encoder_dtypes
from mmcopy.encoders.dtypes import common_dtype
from mmcopy.errors import ConfigError
from tests.rigs.encoder_models import BUILDERS, build

nn = torch.nn

VIDEO = {
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni", "qwen3_omni_moe", "glm4v", "kimi_k25",
    "llava_onevision", "internvl", "gemma4",
}  # fmt: skip
AUDIO = {"qwen2_5_omni", "qwen3_omni_moe", "phi4_multimodal"}


def modalities(name: str) -> set[str]:
    return {"image"} | ({"video"} if name in VIDEO else set()) | ({"audio"} if name in AUDIO else set())


def tower_of(model: Any, modality: str = "image") -> Any:
    return model.get_submodule(explain_encoder_dtypes(model)[modality].path)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Other packages' warnings about themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- families of transformers ----------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", BUILDERS)
def test_every_family_in_every_dtype(name: str, dtype: str) -> None:
    model = build(name, getattr(torch, dtype))
    assert encoder_dtypes(model) == dict.fromkeys(modalities(name), dtype)
    assert encoder_dtype(model) == dtype


@pytest.mark.parametrize("name", BUILDERS)
def test_norms_and_class_tokens_in_float32_change_nothing(name: str) -> None:
    model = build(name, torch.bfloat16)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.to(torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if "class_embedding" in parameter_name or "position" in parameter_name:
            parameter.data = parameter.data.float()
    assert encoder_dtypes(model) == dict.fromkeys(modalities(name), "bfloat16")


@pytest.mark.parametrize("name", ["qwen3_vl", "llava", "gemma4"])
def test_a_tower_that_differs_from_its_language_model(name: str) -> None:
    model = build(name, torch.bfloat16)
    tower_of(model).to(torch.float16)
    assert set(encoder_dtypes(model).values()) == {"float16"}


def test_encoders_that_differ_are_told_apart_and_share_the_wider_name() -> None:
    model = build("qwen2_5_omni", torch.bfloat16)
    tower_of(model, "audio").to(torch.float16)
    assert encoder_dtypes(model) == {"image": "bfloat16", "video": "bfloat16", "audio": "float16"}
    assert encoder_dtype(model) == "float32"
    assert common_dtype({}) is None
    with pytest.raises(ConfigError, match="'float64': a gateway sends float32, float16, bfloat16"):
        common_dtype({"image": "float64"})


@pytest.mark.parametrize("name", ["qwen2_5_vl", "siglip"])
def test_a_model_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = build("qwen2_5_vl" if name == "qwen2_5_vl" else "gemma3", torch.float16)
    assert next(model.parameters()).is_meta
    assert encoder_dtypes(model)["image"] == "float16"


@pytest.mark.parametrize("name", ["qwen2_5_vl", "kimi_k25", "llama4", "mistral3"])
def test_a_tower_by_itself(name: str) -> None:
    model = build(name, torch.float16)
    tower = tower_of(model)
    assert encoder_dtypes(tower)["image"] == "float16"
    assert explain_encoder_dtypes(tower)["image"].path == ""
    assert ("video" in encoder_dtypes(tower)) == (name in ("qwen2_5_vl", "kimi_k25"))


def test_a_sound_tower_by_itself() -> None:
    tower = tower_of(build("qwen2_5_omni", torch.float16), "audio")
    assert encoder_dtypes(tower) == {"audio": "float16"}


def test_a_text_model_has_none_and_says_why() -> None:
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=32,
        )
    )  # fmt: skip
    assert encoder_dtypes(model) == {}
    assert encoder_dtype(model) is None
    for answer in explain_encoder_dtypes(model).values():
        assert (answer.dtype, answer.path) == (None, "")
        assert "in LlamaForCausalLM" in answer.reason


# ---- wrappers --------------------------------------------------------------


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: Any) -> Any:
    tower_of(model).compile(backend="eager")
    return model


def compiled_tower(model: Any) -> Any:
    model.model.visual = torch.compile(model.model.visual, backend="eager")
    return model


def data_parallel(model: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    return FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"), use_orig_params=True
    )


def fsdp_flat(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    return FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"), use_orig_params=False
    )


def fsdp2(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.model.visual)
    return fully_shard(model)


def adapted(model: Any) -> Any:
    """PEFT keeps adapters in float32, and puts each adapted Linear inside a module of its own."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv", "proj", "q_proj"], r=2))
    lora = {parameter.dtype for name, parameter in adapted.named_parameters() if "visual" in name and "lora" in name}
    assert lora == {torch.float32}
    return adapted


@contextlib.contextmanager
def one_rank(path: pathlib.Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "wrap", [compiled, compiled_in_place, compiled_tower, data_parallel, fsdp, fsdp_flat, fsdp2, adapted]
)
def test_wrapped_models(tmp_path: pathlib.Path, wrap: Callable[[Any], Any]) -> None:
    with one_rank(tmp_path / "store"):
        model = wrap(build("qwen3_vl", torch.bfloat16))
        assert encoder_dtypes(model) == {"image": "bfloat16", "video": "bfloat16"}
        assert explain_encoder_dtypes(model)["image"].path.endswith("visual")


# ---- quantised -------------------------------------------------------------


class IntegerLinear(nn.Module):  # type: ignore[misc, name-defined]
    """Integer weights with a floating scale, as quantisers leave them; what it computes does not matter here."""

    def __init__(self, linear: Any, scale: Any, *, packed: bool) -> None:
        super().__init__()
        weight = torch.zeros(linear.weight.shape, dtype=torch.int8)
        self.register_buffer("qweight" if packed else "weight", weight)
        self.register_buffer("scales", torch.ones(linear.weight.shape[0], 1, dtype=scale))


def quantise(module: Any, scale: Any, *, packed: bool, patches: bool) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) or (patches and isinstance(child, (nn.Conv2d, nn.Conv3d))):
            setattr(module, name, IntegerLinear(child, scale, packed=packed))
        else:
            quantise(child, scale, packed=packed, patches=patches)


@pytest.mark.parametrize("packed", [False, True], ids=["int8-weight", "packed"])
@pytest.mark.parametrize("scale", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_omni", "llava", "gemma3"])
def test_integer_weights_beside_a_floating_patch_convolution(name: str, scale: str, packed: bool) -> None:
    model = build(name, torch.bfloat16)
    quantise(tower_of(model), getattr(torch, scale), packed=packed, patches=False)
    answer = explain_encoder_dtypes(model)["image"]
    assert (answer.dtype, answer.reason.split()[:2]) == ("bfloat16", ["weight", "of"])


@pytest.mark.parametrize(
    ("scale", "wanted"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_integer_weights_throughout_never_give_an_integer(scale: str, wanted: str) -> None:
    """With float32 scales what is left, biases and norms, decides; the reason names the quantised patch weight."""
    model = build("qwen3_vl", torch.bfloat16)
    quantise(tower_of(model), getattr(torch, scale), packed=False, patches=True)
    for parameter in tower_of(model).parameters():
        if scale != "float32":
            parameter.data = parameter.data.float()
    answer = explain_encoder_dtypes(model)["image"]
    assert answer.dtype == wanted
    assert "the weight of patch_embed.proj is int8, quantised" in answer.reason


def test_float8_weights_are_not_the_answer() -> None:
    model = build("qwen3_vl", torch.bfloat16)
    for module in tower_of(model).modules():
        if isinstance(module, (nn.Linear, nn.Conv3d)):
            module.weight = nn.Parameter(module.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    answer = explain_encoder_dtypes(model)["image"]
    assert answer.dtype == "bfloat16"
    assert "float8_e4m3fn" in answer.reason


def test_nothing_floating_is_a_visible_none() -> None:
    class Model(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.visual = IntegerLinear(nn.Linear(4, 4), torch.float32, packed=False)
            del self.visual.scales

    answer = explain_encoder_dtypes(Model())["image"]
    assert (answer.dtype, answer.path) == (None, "visual")
    assert answer.reason.startswith("visual has no floating-point tensor")


def test_double_precision_is_a_visible_none() -> None:
    answer = explain_encoder_dtypes(build("qwen3_vl", torch.float64))["image"]
    assert answer.dtype is None
    assert answer.reason == "patch_embed.proj is float64, which no gateway sends"


# ---- modules of any kind ---------------------------------------------------


@pytest.mark.parametrize("place", ["visual", "vision_tower", "model.visual", "thinker.model.vision_model"])
def test_duck_typed_towers_at_any_level(place: str) -> None:
    *parents, name = place.split(".")
    tower = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, dtype=torch.float16))
    module: Any = nn.Module()
    module.add_module(name, tower)
    for parent in reversed(parents):
        outer = nn.Module()
        outer.add_module(parent, module)
        module = outer
    answer = explain_encoder_dtypes(module)
    assert (answer["image"].dtype, answer["image"].path) == ("float16", place)
    assert answer["video"].reason.endswith("takes no video")


def test_only_sound() -> None:
    """A model with nothing but an audio tower has a dtype (it was told as None in an engine once)."""
    model: Any = nn.Module()
    model.audio_tower = nn.Conv1d(4, 4, 3, dtype=torch.bfloat16)
    assert encoder_dtypes(model) == {"audio": "bfloat16"}
    assert encoder_dtype(model) == "bfloat16"


def test_towers_for_video_alone() -> None:
    model: Any = nn.Module()
    model.image_tower = nn.Linear(4, 4, dtype=torch.bfloat16)
    model.video_tower = nn.Linear(4, 4, dtype=torch.float16)
    assert encoder_dtypes(model) == {"image": "bfloat16", "video": "float16"}


def test_what_is_no_module_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"the model is a NoneType, want a torch\.nn\.Module"):
        encoder_dtypes(None)  # type: ignore[arg-type]


def test_an_absent_tower_is_none() -> None:
    """Some classes keep the attribute and set it to None."""
    model: Any = nn.Module()
    model.vision_tower = None
    model.audio_tower = nn.Linear(4, 4)
    assert encoder_dtypes(model) == {"audio": "float32"}


def test_the_answer_is_what_the_forward_takes() -> None:
    """Kimi's tower and Llama 4's cast nothing: another dtype than the answer raises."""
    for name in ("kimi_k25", "llama4"):
        model = build(name, torch.bfloat16)
        tower = tower_of(model)
        convolution = next(m for m in tower.modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
        shape = (1, 3, 4, 4) if isinstance(convolution, nn.Conv2d) else (1, convolution.in_features)
        convolution(torch.randn(shape, dtype=getattr(torch, encoder_dtypes(model)["image"])))
        with pytest.raises(RuntimeError, match=r"type"):
            convolution(torch.randn(shape, dtype=torch.float32))
