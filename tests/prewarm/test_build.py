"""Encoders built from a config alone are those that the class itself makes, but for the random weights."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mmcopy import encoder_dtypes
from mmcopy.encoders import Tower, find_towers
from mmcopy.errors import ConfigError
from mmcopy.prewarm import PrewarmStatus
from mmcopy.prewarm.build import build_encoders, has_weights, load_encoders, read_config
from tests.rigs.encoder_models import BUILDERS, build
from tests.rigs.warming import warm_with

CPU = torch.device("cpu")


def written(name: str, directory: pathlib.Path) -> Any:
    """The tiny model of a family, its config in the directory."""
    model = build(name, torch.bfloat16)
    (directory / "config.json").write_text(model.config.to_json_string(use_diff=False))
    return model


@pytest.mark.parametrize("name", BUILDERS)
def test_encoders_of_a_config_work_and_the_language_model_takes_no_memory(name: str, tmp_path: pathlib.Path) -> None:
    real = written(name, tmp_path)
    model = build_encoders(read_config(tmp_path), device=CPU, dtype="bfloat16")
    assert type(model) is type(real)
    buffers = dict(real.named_buffers())
    towers = [tower for tower in find_towers(model).values() if isinstance(tower, Tower)]
    assert towers
    for tower in towers:
        for path, parameter in tower.module.named_parameters():
            assert parameter.dtype == torch.bfloat16, path
            assert parameter.isfinite().all(), path
        for (
            path,
            buffer,
        ) in tower.module.named_buffers():  # frequencies and the like are no weights: they have to be right
            assert torch.equal(buffer, buffers[f"{tower.path}.{path}"]), path
    assert any(parameter.is_meta for parameter in model.parameters())
    assert encoder_dtypes(model) == encoder_dtypes(real)
    report = warm_with(model, role="encode", device="cpu", max_pixels=32 * 32, required=True, progress=False)
    assert report.status is PrewarmStatus.WARM


def test_weights_of_a_directory_are_loaded(tmp_path: pathlib.Path) -> None:
    real = build("qwen3_vl", torch.bfloat16)
    assert not has_weights(tmp_path)
    real.save_pretrained(tmp_path)
    assert has_weights(tmp_path)
    model = load_encoders(tmp_path, device=CPU, dtype="bfloat16")
    for (path, one), (_, other) in zip(
        real.model.visual.named_parameters(), model.model.visual.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is no model's config: FileNotFoundError"),
        ("{", "is no model's config: JSONDecodeError"),
        ("[]", "is no model's config"),
        ("{}", "is no model's config: KeyError"),
        ('{"model_type": "never-heard-of"}', "cannot read"),
        ('{"model_type": "qwen3_vl", "vision_config": 3}', "cannot read"),
    ],
)
def test_what_is_no_config(tmp_path: pathlib.Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_config(tmp_path)


def test_what_cannot_be_built(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32}')
    with pytest.raises(ConfigError, match="a llama model has no encoder"):
        build_encoders(read_config(tmp_path), device=CPU, dtype="bfloat16")
    written("qwen3_vl", tmp_path)
    with pytest.raises(ConfigError, match="cannot build qwen3_vl"):
        build_encoders(read_config(tmp_path), device=CPU, dtype="bfloat16", attention="no_such_attention")


def test_weights_that_cannot_be_loaded(tmp_path: pathlib.Path) -> None:
    written("qwen3_vl", tmp_path).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot load {tmp_path}: ValueError: .*no_such_attention"):
        load_encoders(tmp_path, device=CPU, dtype="bfloat16", attention="no_such_attention")
    next(tmp_path.glob("*.safetensors")).write_bytes(b"torn")
    with pytest.raises(ConfigError, match=f"cannot load {tmp_path}: SafetensorError"):
        load_encoders(tmp_path, device=CPU, dtype="bfloat16")
