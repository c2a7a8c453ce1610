"""What a worker tells the gateway about its model."""

from __future__ import annotations

import json
import os
import pathlib
from dataclasses import dataclass
from typing import Any, Self

from mmcopy.config import MODALITIES
from mmcopy.errors import ConfigError

__all__ = ["ModelInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model behind a worker, as ``GetModelInfo`` reports it.

    ``model_path`` is where the gateway finds the tokenizer too. ``modalities`` are those the worker takes, of
    ``"image"``, ``"video"``, ``"audio"``; none for a text model. ``model_dtype`` is the language model's, whatever the
    encoder's: the gateway pairs prefill and decode workers by it. Raises :class:`ConfigError`.
    """

    model_path: str
    served_model_name: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context_length: int = 65536
    modalities: tuple[str, ...] = ("image", "video")
    model_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        unknown = [name for name in self.modalities if name not in MODALITIES]
        if unknown:
            raise ConfigError(f"unknown modality {unknown[0]!r}, want some of {', '.join(MODALITIES)}")

    @classmethod
    def from_dir(
        cls,
        path: str | os.PathLike[str],
        *,
        served_model_name: str,
        max_context_length: int = 65536,
        modalities: tuple[str, ...] = ("image", "video"),
    ) -> Self:
        """Read ``config.json`` of a model directory in Hugging Face's layout.

        The vocabulary, the dtype and the end-of-sequence tokens are taken from ``text_config`` where it has them,
        otherwise from the top level. Raises :class:`ConfigError` when the file is missing, is no JSON object or
        lacks a field.
        """
        directory = pathlib.Path(path).absolute()
        file = directory / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{file} holds a {type(config).__name__}, want an object")
        eos = _field(config, "eos_token_id", file)
        try:
            return cls(
                model_path=str(directory),
                served_model_name=served_model_name,
                model_type=str(_field(config, "model_type", file, nested=False)),
                architectures=tuple(map(str, _field(config, "architectures", file, nested=False))),
                vocab_size=int(_field(config, "vocab_size", file)),
                eos_token_ids=tuple(map(int, eos if isinstance(eos, list) else [eos])),
                max_context_length=max_context_length,
                modalities=modalities,
                model_dtype=_dtype(config),
            )
        except (TypeError, ValueError) as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"bad field in {file}: {error}") from error


def _field(config: dict[str, Any], name: str, file: pathlib.Path, *, nested: bool = True) -> Any:
    text = config.get("text_config")
    if nested and isinstance(text, dict) and text.get(name) is not None:
        return text[name]
    if config.get(name) is None:
        raise ConfigError(f"{file} has no {name!r}")
    return config[name]


def _dtype(config: dict[str, Any]) -> str:
    """By its new name or its old one, of the language model or of the whole; bfloat16 where neither says."""
    text = config.get("text_config")
    for each in (text if isinstance(text, dict) else {}, config):
        for name in ("dtype", "torch_dtype"):
            if isinstance(each.get(name), str):
                return str(each[name]).removeprefix("torch.")
    return "bfloat16"
