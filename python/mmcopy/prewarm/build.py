"""Encoders from a config alone, with random weights: what `mmcopy prewarm` measures where there are no weights.

The whole model is made on the meta device, where it costs nothing; then only the encoders, and what sits beside them
(projectors), get memory and random numbers. The language model never does.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mmcopy.encoders import Tower, find_towers
from mmcopy.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    import torch

__all__ = ["build_encoders", "has_weights", "load_encoders", "read_config"]

_LANGUAGE = frozenset(
    {"language_model", "text_model", "lm_head", "model", "layers", "embed_tokens", "norm", "rotary_emb", "talker"}
)
"""Children beside an encoder that belong to the language model."""


def read_config(path: str | os.PathLike[str]) -> Any:
    """The transformers config of a model directory or of a config.json. Never asks a server.

    Raises :class:`ConfigError` when there is none, or transformers does not know it, and
    :class:`MissingDependencyError` without transformers.
    """
    file = pathlib.Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        model_type = fields.pop("model_type")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no model's config: {type(error).__name__}: {error}") from error
    transformers = _transformers()
    try:
        return transformers.AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # its own checks, and those of every model, raise what they like
        raise ConfigError(f"transformers {transformers.__version__} cannot read {file}: {error}") from error


def has_weights(path: str | os.PathLike[str]) -> bool:
    """Whether a directory has weights beside the config."""
    directory = pathlib.Path(path)
    return directory.is_dir() and any(directory.glob("*.safetensors"))


def build_encoders(config: Any, *, device: torch.device, dtype: str, attention: str | None = None) -> Any:
    """The model of ``config`` with its encoders on ``device``, random weights, and a language model without any.

    Raises :class:`ConfigError` for a config without encoders.
    """
    import torch

    transformers = _transformers()
    options = {} if attention is None else {"attn_implementation": attention}
    automatic = _automatic(transformers, config)
    try:
        with torch.device("meta"):
            model = automatic.from_config(config, dtype=getattr(torch, dtype), **options).eval()
    except (ValueError, ImportError) as error:  # an attention that is not there
        raise ConfigError(f"cannot build {config.model_type}: {error}") from error
    torch.manual_seed(0)
    with torch.no_grad():
        for parent in dict.fromkeys(_parents(model)):
            _fill(model.get_submodule(parent), model, device)
    return model


def load_encoders(
    path: str | os.PathLike[str], *, device: torch.device, dtype: str, attention: str | None = None
) -> Any:
    """The model of a directory with its weights, read whole into host memory; only its encoders go to ``device``.

    Raises :class:`ConfigError` for a model without encoders, and for weights that cannot be read.
    """
    import torch

    options = {} if attention is None else {"attn_implementation": attention}
    automatic = _automatic(_transformers(), read_config(path))
    try:
        model = automatic.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True, **options).eval()
    except MemoryError:
        raise
    except Exception as error:  # its own checks, safetensors' and those of every model raise what they like
        raise ConfigError(f"cannot load {path}: {type(error).__name__}: {error}") from error
    for parent in dict.fromkeys(_parents(model)):
        module = model.get_submodule(parent)
        for name, child in module.named_children():
            if name not in _LANGUAGE:
                child.to(device)
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.to(device), requires_grad=False))
    return model


def _parents(model: Any) -> list[str]:
    """Paths of the modules that hold encoders. Raises :class:`ConfigError` where there are none."""
    towers = [tower for tower in find_towers(model).values() if isinstance(tower, Tower)]
    if not towers:
        raise ConfigError(f"a {model.config.model_type} model has no encoder")
    return [tower.path.rpartition(".")[0] for tower in towers]


def _automatic(transformers: Any, config: Any) -> Any:
    for name in ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForCausalLM", "AutoModel"):
        automatic = getattr(transformers, name, None)
        if automatic is not None and type(config) in automatic._model_mapping:
            return automatic
    raise ConfigError(f"transformers {transformers.__version__} has no model for {config.model_type}")


def _fill(parent: Any, model: Any, device: torch.device) -> None:
    """Memory and random numbers for the encoders below ``parent``, and for what sits beside them."""
    import torch

    for name, child in parent.named_children():
        if name not in _LANGUAGE:
            child.to_empty(device=device)
            owner = child if hasattr(child, "_init_weights") else model
            for module, initializer in _with_initializer(child, owner):
                initializer._init_weights(module)
    for name, parameter in list(parent.named_parameters(recurse=False)):
        fresh = torch.nn.Parameter(torch.randn_like(parameter, device=device), requires_grad=False)
        setattr(parent, name, fresh)


def _with_initializer(module: Any, owner: Any) -> Iterator[tuple[Any, Any]]:
    """Every module below, deepest first, with the model whose rules initialise it."""
    for child in module.children():
        yield from _with_initializer(child, child if hasattr(child, "_init_weights") else owner)
    yield module, owner


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            f"building an encoder from a config needs transformers ({error}): pip install 'mmcopy[prewarm]'"
        ) from error
    return transformers
