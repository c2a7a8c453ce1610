"""The dtype of the encoder's input on the wire. tests/gateway compares with the real gateway."""

from __future__ import annotations

import logging

import pytest

from mmcopy import WorkerSpec
from mmcopy.config import ResolvedDtype, environment, wire_dtype
from mmcopy.errors import ConfigError

GENERAL, IMAGE = "SMG_TOKENSPEED_ENCODER_INPUT_DTYPE", "SMG_TOKENSPEED_IMAGE_ENCODER_INPUT_DTYPE"
VLLM = "SMG_VLLM_ENCODER_INPUT_DTYPE"
LABEL = "worker label multimodal_encoder_dtype"


def worker(engine: str | None = "tokenspeed", **labels: str) -> WorkerSpec:
    return WorkerSpec("grpc://w", engine=engine, labels=labels)


@pytest.mark.parametrize(
    ("spec", "environ", "dtype", "source"),
    [
        (None, {}, "bfloat16", "default"),
        (worker(), {}, "bfloat16", "default"),
        (worker(None), {}, "bfloat16", "default"),
        (worker(multimodal_encoder_dtype=""), {}, "bfloat16", "default"),
        (worker(multimodal_encoder_dtype="float16"), {}, "float16", LABEL),
        (worker(multimodal_encoder_dtype="float16"), {GENERAL: "float32"}, "float32", GENERAL),
        (worker(multimodal_encoder_dtype="float16"), {GENERAL: "float32", IMAGE: "BF16"}, "bfloat16", IMAGE),
        (worker(multimodal_encoder_dtype="float16"), {GENERAL: "float32", IMAGE: ""}, "float32", GENERAL),
        (worker(), {"SMG_TOKENSPEED_VIDEO_ENCODER_INPUT_DTYPE": "float32"}, "bfloat16", "default"),
        (worker(), {VLLM: "float16"}, "bfloat16", "default"),
        (worker(), {GENERAL: " half "}, "float16", GENERAL),
        (worker("vllm"), {}, "float32", "default"),
        (worker("vllm", multimodal_encoder_dtype="bfloat16"), {GENERAL: "float16"}, "bfloat16", LABEL),
        (worker("vllm", multimodal_encoder_dtype="bfloat16"), {VLLM: " FP16 "}, "float16", VLLM),
        (worker("vllm", multimodal_encoder_dtype="uint8"), {}, "uint8", LABEL),
        (worker("vllm", mm_device_do_normalize="true"), {VLLM: "fp16"}, "uint8", "worker label mm_device_do_normalize"),
        (worker("vllm", mm_device_do_normalize="false"), {}, "float32", "default"),
        (worker(mm_device_do_normalize="true"), {}, "bfloat16", "default"),
    ],
)
def test_each_layer(spec: WorkerSpec | None, environ: dict[str, str], dtype: str, source: str) -> None:
    assert wire_dtype("image", worker=spec, environ=environ) == ResolvedDtype(dtype, source)


def test_each_modality_has_a_variable_of_its_own() -> None:
    environ = {f"SMG_TOKENSPEED_{name}_ENCODER_INPUT_DTYPE": "f16" for name in ("VIDEO", "AUDIO")}
    assert [wire_dtype(name, environ=environ).dtype for name in ("image", "video", "audio")] == [
        "bfloat16",
        "float16",
        "float16",
    ]


@pytest.mark.parametrize(
    ("spec", "environ", "source"),
    [
        (worker(), {GENERAL: "bogus"}, GENERAL),
        (worker(), {GENERAL: "float16", IMAGE: "bogus"}, IMAGE),  # not the general one's turn
        (worker(), {GENERAL: " "}, GENERAL),  # not what is done with the transport's variables
        (worker(), {GENERAL: "uint8"}, GENERAL),  # TokenSpeed takes floats
        (worker(multimodal_encoder_dtype="float64"), {}, LABEL),
        (worker("vllm", multimodal_encoder_dtype="int64"), {}, LABEL),
        (worker("vllm"), {VLLM: "torch.float16"}, VLLM),
    ],
)
def test_what_smg_does_not_know_is_float32_with_one_warning(
    spec: WorkerSpec,
    environ: dict[str, str],
    source: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "_warned", set())
    with caplog.at_level(logging.WARNING, logger="mmcopy.config"):
        found = [wire_dtype("image", worker=spec, environ=environ) for _ in range(2)]
    assert [(each.dtype, each.source) for each in found] == [("float32", source)] * 2
    assert len(caplog.messages) == 1
    assert caplog.messages == list(found[0].warnings)
    assert source in caplog.messages[0]


def test_another_modality_is_an_error() -> None:
    with pytest.raises(ConfigError, match="modality is 'images', want one of image, video, audio; did"):
        wire_dtype("images")
