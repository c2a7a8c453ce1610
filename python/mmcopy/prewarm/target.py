"""What is to be warmed: the encoders of a model, their family, dtypes and device, checked before anything runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmcopy.encoders import MODALITIES, Tower, explain_encoder_dtypes, find_towers
from mmcopy.encoders.towers import spine
from mmcopy.errors import ConfigError, DeviceError, UnknownFamilyError

from .inputs import Config, Family, as_config, family_for

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["NothingToWarm", "Target", "choose_target", "parse_device"]


class NothingToWarm(Exception):
    """There is no encoder to run; the text says why."""


@dataclass(frozen=True)
class Target:
    """``modalities`` are those that are warmed, each with a tower and a dtype."""

    family: Family
    config: Config
    modalities: tuple[str, ...]
    towers: dict[str, Tower]
    dtypes: dict[str, str]
    warnings: list[str]


def parse_device(device: Any) -> torch.device:
    """``"cpu"``, ``"cuda:N"`` or a ``torch.device`` of those. Raises :class:`DeviceError`."""
    import torch

    name = str(device)
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda:(\d+)", name)
    if match is None:
        hint = "; give the index, for example 'cuda:0'" if name == "cuda" else ""
        raise DeviceError(f"device is {name!r}, want 'cpu' or 'cuda:N'{hint}")
    count = torch.cuda.device_count()
    if int(match[1]) >= count:
        raise DeviceError(f"device is {name!r}, this machine has {count} CUDA devices")
    return torch.device(name)


def choose_target(
    model: nn.Module,
    *,
    device: torch.device,
    modalities: Sequence[str] | None,
    config: Any,
    family: Family | None,
) -> Target:
    """Raises :class:`NothingToWarm`, :class:`ConfigError` and :class:`UnknownFamilyError`."""
    if isinstance(modalities, str) or not isinstance(modalities, (Sequence, type(None))):
        raise ConfigError(f"modalities is {modalities!r}, want some of {', '.join(MODALITIES)}, such as ('image',)")
    if family is not None and not isinstance(family, Family):
        raise ConfigError(f"family is {family!r}, want an object of a subclass of mmcopy.prewarm.inputs.Family")
    unknown = [name for name in modalities or () if name not in MODALITIES]
    if unknown:
        raise ConfigError(f"modality {unknown[0]!r}: want some of {', '.join(MODALITIES)}")
    if modalities is not None and not modalities:
        raise NothingToWarm("language only: no modality is wanted")
    found = find_towers(model)
    towers = {name: tower for name, tower in found.items() if isinstance(tower, Tower)}
    if not towers:
        raise NothingToWarm(f"the model has no encoder: {found['image']}")
    for name in modalities or ():
        if name not in towers:
            raise ConfigError(f"the model encodes no {name}, only {', '.join(towers)}: {found[name]}")
    settings = as_config(config if config is not None else _config_of(model))
    family = family or family_for(settings)
    warnings = []
    wanted = [name for name in MODALITIES if name in (towers if modalities is None else modalities)]
    missing = [name for name in wanted if name not in family.modalities]
    if missing and modalities is not None:
        raise UnknownFamilyError(
            f"{type(family).__name__} has no warm-up inputs for {missing[0]}, only for {', '.join(family.modalities)}; "
            "mmcopy.prewarm.inputs.register_family() takes one that has"
        )
    if missing:
        warnings.append(f"{', '.join(missing)} is not warmed: {type(family).__name__} has no inputs for it")
        wanted = [name for name in wanted if name not in missing]
    for name in wanted:
        _check_device(towers[name], name, device)
    dtypes = {}
    answers = explain_encoder_dtypes(model)
    for name in wanted:
        dtypes[name] = answers[name].dtype or "float32"
        if answers[name].dtype is None:
            warnings.append(f"{name} is warmed in float32, its encoder has no dtype: {answers[name].reason}")
    return Target(family, settings, tuple(wanted), {name: towers[name] for name in wanted}, dtypes, warnings)


def _config_of(model: nn.Module) -> Any:
    for module in spine(model):
        config = getattr(module, "config", None)
        if config is not None and (getattr(config, "model_type", None) or isinstance(config, dict)):
            return config
    raise UnknownFamilyError(
        f"{type(model).__name__} has no config with a model_type: give config=, for example what config.json has, and "
        "for a model that mmcopy does not know a family by mmcopy.prewarm.inputs.register_family()"
    )


def _check_device(tower: Tower, modality: str, device: torch.device) -> None:
    tensor = next(itertools.chain(tower.module.parameters(), tower.module.buffers()), None)
    if tensor is None or tensor.device == device:
        return
    where = "has no weights yet" if tensor.is_meta else f"is on {tensor.device}"
    raise ConfigError(f"the {modality} encoder {tower.path or type(tower.module).__name__} {where}, device is {device}")
