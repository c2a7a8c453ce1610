"""What a prewarm says of cuDNN's attention: on a CPU torch never takes it; the GPU's tests see it taken."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from mmcopy import PrewarmReport
from mmcopy.encoders import Tower, explain_encoder_dtypes, find_towers
from mmcopy.prewarm import foresee
from mmcopy.prewarm.attention import ask_torch, head_size, takes_cudnn
from mmcopy.prewarm.inputs import Shape
from tests.rigs.encoder_fakes import PLAIN, Model
from tests.rigs.warming import warm_with

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")
"""A name alone: nothing is put there."""

FAMILIES = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni_moe", "glm4v", "kimi_k25", "llava", "llava_pixtral",
    "llava_onevision", "internvl", "gemma3", "gemma4", "mistral3", "llama4", "phi4_multimodal",
)  # fmt: skip


class HeadSizes(TorchFunctionMode):
    """Notes the head size of every call of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.seen.add((arguments or list((options or {}).values()))[0].shape[-1])
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_size_is_that_of_the_real_towers_attention(name: str) -> None:
    pytest.importorskip("transformers")
    from tests.rigs.encoder_models import build

    model = build(name)
    answers = explain_encoder_dtypes(model)
    modalities = [each for each in ("image", "audio") if answers[each].dtype]
    for modality in modalities:
        with HeadSizes() as heads:  # a mode belongs to a thread, so all of it is on this one
            report = warm_with(
                model, role="encode", device="cpu", modalities=[modality], max_pixels=32 * 32, deadline_s=None,
                required=True,
            )  # fmt: skip
        tower = find_towers(model)[modality]
        assert isinstance(tower, Tower)
        assert report.attention == "sdpa"
        assert heads.seen == {head_size(tower.module.config)}, modality


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"embed_dim": 1280, "hidden_size": 3584, "num_heads": 16}, 80),  # Qwen2-VL, as published
        ({"hidden_size": 1152, "num_heads": 16}, 72),  # Qwen3-VL
        ({"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 96}, 96),
        ({"head_dim": None, "d_model": 1280, "encoder_attention_heads": 20}, 64),
        ({"hidden_size": 1024}, None),
        ({"num_heads": 16}, None),
        ({"hidden_size": [96, 192], "num_heads": [3, 6]}, None),  # a size for each stage
        ({}, None),
    ],
)
def test_head_sizes_of_configs(config: dict[str, Any], wanted: int | None) -> None:
    assert head_size(types.SimpleNamespace(**config)) == wanted


def test_a_module_without_a_config_has_no_head_size() -> None:
    assert head_size(None) is None


# ---- asking torch ----------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_cpu_never_takes_it(dtype: str) -> None:
    assert ask_torch(64, dtype=dtype, device=CPU) is False


def test_torchs_answer_is_compared_with_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *tensors, chosen=backend: int(chosen.value))
        assert ask_torch(64, dtype="bfloat16", device=CPU) is (backend is SDPBackend.CUDNN_ATTENTION)


def refuses(*tensors: Any) -> int:
    raise RuntimeError("no viable backend")


def wants_more(query: Any) -> int:
    return 0


@pytest.mark.parametrize("choose", [refuses, wants_more])
def test_a_torch_that_does_not_answer_is_unknown(monkeypatch: pytest.MonkeyPatch, choose: Callable[..., int]) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    assert ask_torch(64, dtype="bfloat16", device=CPU) is None


def test_a_torch_without_the_function_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert ask_torch(64, dtype="bfloat16", device=CPU) is None


def tower(attention: str | None, **config: Any) -> Tower:
    module = torch.nn.Module()
    if attention is not None:
        module.config = types.SimpleNamespace(_attn_implementation=attention, **config)
    return Tower(module, "visual")


@pytest.mark.parametrize(
    ("attention", "on_gpu"),
    [("eager", False), ("flash_attention_2", False), ("flex_attention", False), ("my_own", None), (None, None)],
)
def test_another_attention_than_torchs_is_not_asked_about(attention: str | None, on_gpu: bool | None) -> None:
    assert takes_cudnn(tower(attention, head_dim=64), dtype="bfloat16", device=GPU) is on_gpu
    assert takes_cudnn(tower(attention, head_dim=64), dtype="bfloat16", device=CPU) is False


def test_an_unknown_head_size_is_unknown() -> None:
    assert takes_cudnn(tower("sdpa"), dtype="bfloat16", device=GPU) is None
    assert takes_cudnn(tower("sdpa"), dtype="bfloat16", device=CPU) is False


# ---- what the report says of it --------------------------------------------


def warm(**options: Any) -> PrewarmReport:
    sizes = {"image": [(8, 8), (8, 16)]}
    return warm_with(Model(), role="encode", device="cpu", family=PLAIN, sizes=sizes, **options)


def test_a_cpus_report_says_nothing_of_plans() -> None:
    report = warm()
    assert report.cudnn_attention == {"image": False}
    assert report.as_dict()["cudnn_attention"] == {"image": False}
    assert report.outlooks == []
    assert "plan" not in f"{report} {report.forecast('image', (99, 99))}"
    assert report.forecast("image", (99, 99)).plans is False


def test_where_cudnn_is_taken_sizes_that_the_callers_thread_has_not_seen_plan() -> None:
    report = replace(warm(deadline_s=None), cudnn_attention={"image": True})
    assert report.settled == report.warmed == (Shape("image", ((8, 8),)), Shape("image", ((8, 16),)))
    known, new = report.forecast("image", (8, 16)), report.forecast("image", (16, 8))
    assert (known.plans, new.plans) == (False, True)
    assert str(known).endswith("attention has its plan on the thread that called prewarm, and makes one on every other")
    assert "makes a plan for it first, 45 to 75 ms on an H200" in str(new)
    assert "torch.backends.cuda.enable_cudnn_sdp(False) before the prewarm" in new.plan_why
    assert "on the thread that called prewarm" in new.plan_why
    assert (known.compiles, new.compiles) == (False, False)
    assert len(report.outlooks) == 1
    assert report.outlooks[0].startswith(
        "image: attention (cuDNN's) makes a plan for every size that is new to a thread"
    )
    assert "attention plans (cuDNN) for each size that is new to a thread" in str(report)
    record = json.loads(json.dumps(report.as_dict()))
    assert record["cudnn_attention"] == {"image": True}
    assert record["outlooks"] == report.outlooks
    assert [each["on_callers_thread"] for each in record["shapes"]] == [True, True]


def test_what_another_thread_alone_has_encoded_plans_too() -> None:
    report = replace(warm(), cudnn_attention={"image": True})
    assert len(report.warmed) == 2
    assert report.settled == ()
    assert report.forecast("image", (8, 16)).plans is True


def test_not_known_is_neither() -> None:
    report = replace(warm(), cudnn_attention={"image": None})
    assert report.forecast("image", (8, 16)).plans is None
    assert str(report.forecast("image", (8, 16))).endswith("whether attention makes a plan for it is not known")
    assert report.outlooks == []


def test_plans_and_compilations_are_two_things() -> None:
    shape, other = Shape("image", ((8, 8),)), Shape("image", ((8, 16),))

    def plans(*settled: Shape, compiled: bool, cudnn: bool | None) -> tuple[bool, bool | None]:
        options: dict[str, Any] = {"settled": settled, "compiled": compiled, "varlen": False, "cudnn": cudnn}
        forecast = foresee(PLAIN, {}, shape, [], **options)
        return forecast.compiles, forecast.plans

    assert plans(shape, compiled=True, cudnn=True) == (True, False)
    assert plans(other, compiled=True, cudnn=True) == (True, True)
    assert plans(other, compiled=False, cudnn=True) == (False, True)
    assert plans(other, compiled=True, cudnn=False) == (True, False)
    assert plans(other, compiled=False, cudnn=None) == (False, None)
