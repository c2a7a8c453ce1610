"""Which dtype an encoder wants its pixels or sound in.

The answer is that of the first weight the input meets. Rules by the first parameter, by ``.dtype``, by the config or by
a majority are each wrong for some family, dtype mix or quantisation (class tokens, norms and position tables in
float32, integer weights, adapters, a config that says None); this one was right in all of those tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmcopy.errors import ConfigError

from .towers import MODALITIES, PATCH_NAMES, Tower, find_towers, unwrap

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["SENT", "EncoderDtype", "common_dtype", "encoder_dtype", "encoder_dtypes", "explain_encoder_dtypes"]

SENT = ("float32", "float16", "bfloat16")
"""What a gateway casts encoder inputs to."""


@dataclass(frozen=True, slots=True)
class EncoderDtype:
    """What one modality's encoder wants: ``dtype`` is None where there is none, and ``reason`` says why, or where the
    dtype comes from.

    ``path`` is the encoder's place in the model ("" when the model is the encoder, or there is none).
    """

    modality: str
    dtype: str | None
    reason: str
    path: str = ""


def encoder_dtypes(model: nn.Module) -> dict[str, str]:
    """The dtype that each encoder of ``model`` wants its input in: ``{"image": "bfloat16", "audio": "float32"}``.

    ``model``: any ``torch.nn.Module``, on any device, meta included: a transformers model, a tower by itself, a module
    of your own with ``visual``, ``vision_tower``, ``audio_tower`` or the like in it, wrapped by ``torch.compile``, DDP,
    FSDP or PEFT or not. A modality without an encoder, or without an answer, is absent;
    :func:`explain_encoder_dtypes` says why. Names are torch's without the prefix, as they go on the wire. Reads
    metadata only: does not wait for a GPU.
    """
    found = explain_encoder_dtypes(model)
    return {modality: each.dtype for modality, each in found.items() if each.dtype is not None}


def encoder_dtype(model: nn.Module) -> str | None:
    """The one dtype that a worker advertises for ``model``; None where no encoder has one.

    Encoders that differ get the dtype that holds the values of all of them (bfloat16 and float16: float32), since a
    gateway keeps one name per worker: the worker casts for those that want less. See :func:`encoder_dtypes`.
    """
    return common_dtype(encoder_dtypes(model))


def common_dtype(dtypes: Mapping[str, str]) -> str | None:
    """The one name for a worker whose encoders want ``dtypes``; None for none. Raises :class:`ConfigError`."""
    names = set(dtypes.values())
    unknown = sorted(names - set(SENT))
    if unknown:
        raise ConfigError(f"encoder dtype {unknown[0]!r}: a gateway sends {', '.join(SENT)}")
    if len(names) > 1:
        return "float32"
    return next(iter(names), None)


def explain_encoder_dtypes(model: nn.Module) -> dict[str, EncoderDtype]:
    """For image, video and audio, in this order: the dtype or None, and the reason."""
    towers = find_towers(model)
    answers = {}
    for modality in MODALITIES:
        tower = towers[modality]
        if isinstance(tower, str):
            answers[modality] = EncoderDtype(modality, None, tower)
        else:
            dtype, reason = _dtype_of(tower, model)
            answers[modality] = EncoderDtype(modality, dtype, reason, tower.path)
    return answers


def _dtype_of(tower: Tower, model: nn.Module) -> tuple[str | None, str]:
    import torch

    skipped: str | None = None
    for path, weight in _matmul_weights(tower.module):
        name = str(weight.dtype).removeprefix("torch.")
        if weight.dtype.is_floating_point and weight.dtype.itemsize >= 2:
            if name not in SENT:
                return None, f"{path} is {name}, which no gateway sends"
            return name, f"weight of {path}" + (f" ({skipped})" if skipped else "")
        # Some towers cast pixels to the dtype of this weight: an integer one there loses them, without an error.
        skipped = skipped or f"the weight of {path} is {name}, quantised"
    why = skipped or "no matmul has a weight"
    tensors = Counter(tensor.dtype for name, tensor in _tensors(tower.module) if _counts(name))
    for wanted, source in (
        ({torch.bfloat16, torch.float16}, "most of its bfloat16 and float16 tensors"),
        (None, "config.dtype"),
        ({torch.float32}, "its float32 tensors"),
    ):
        if wanted is None:
            configured = _configured(tower.module) or _configured(model)
            if configured is not None:
                return configured, f"{source}; {why}"
            continue
        most = max((d for d in tensors if d in wanted), key=lambda d: tensors[d], default=None)
        if most is not None:
            return str(most).removeprefix("torch."), f"{source}; {why}"
    return None, f"{tower.path or type(tower.module).__name__} has no floating-point tensor; {why}"


def _matmul_weights(tower: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights that activations are multiplied with, with their modules' paths: the patch embedding's first."""
    from torch import Tensor, nn

    first: list[tuple[str, torch.Tensor]] = []
    later: list[tuple[str, torch.Tensor]] = []
    for path, module in tower.named_modules():
        segments = path.split(".")
        if isinstance(module, nn.Embedding) or any("lora_" in segment for segment in segments):
            continue
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim >= 2:
            (first if PATCH_NAMES.intersection(segments) else later).append((path, weight))
    yield from first
    yield from later


def _tensors(tower: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tower.named_parameters()
    yield from tower.named_buffers()


def _counts(name: str) -> bool:
    return "inv_freq" not in name and "lora_" not in name


def _configured(module: nn.Module) -> str | None:
    config: Any = getattr(unwrap(module), "config", None)
    dtype = getattr(config, "dtype", None)
    name = str(dtype).removeprefix("torch.")
    return name if name in SENT else None
