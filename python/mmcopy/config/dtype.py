"""The dtype of the encoder's input on the wire, and who said so. Side tensors keep the dtype that they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmcopy.errors import ConfigError

from .environment import Environment, read_environment, warn_once
from .nearest import wanted
from .smg_variables import MODALITIES, float_dtype
from .worker import WorkerSpec

__all__ = ["ResolvedDtype", "wire_dtype", "wire_dtype_in"]

LABEL = "multimodal_encoder_dtype"
NORMALIZES_LABEL = "mm_device_do_normalize"
_UNTOLD = {"tokenspeed": "bfloat16", "vllm": "float32"}


@dataclass(frozen=True)
class ResolvedDtype:
    """What to pass to :meth:`mmcopy.Sender.send`, and where it came from: a variable's name, ``worker label ...`` or
    ``default``. ``warnings`` are SMG's, about names that it does not know."""

    dtype: str
    source: str
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "warnings", tuple(self.warnings))


def wire_dtype(
    modality: str, *, worker: WorkerSpec | None = None, environ: Mapping[str, str] | None = None
) -> ResolvedDtype:
    """The dtype for the encoder's input of ``modality`` (``image``, ``video``, ``audio``), as SMG chooses it.

    For TokenSpeed, and where the worker's engine is not known: ``SMG_TOKENSPEED_<MODALITY>_ENCODER_INPUT_DTYPE``, else
    ``SMG_TOKENSPEED_ENCODER_INPUT_DTYPE``, else the worker's label ``multimodal_encoder_dtype``, else bfloat16. For
    vLLM: uint8 where the worker's label ``mm_device_do_normalize`` is ``true`` (raw pixels), else
    ``SMG_VLLM_ENCODER_INPUT_DTYPE``, else the label, else float32. A name that SMG does not know is float32, with a
    warning that is logged once. With several encode workers SMG asks the first.

    ``environ``: None means that of the process, as it is now. Raises :class:`ConfigError` for another
    modality, and for a bad or unknown ``MMCOPY_*`` variable.
    """
    found = wire_dtype_in(read_environment(environ), modality, worker=worker)
    warn_once(found.warnings)
    return found


def wire_dtype_in(environment: Environment, modality: str, *, worker: WorkerSpec | None = None) -> ResolvedDtype:
    """As :func:`wire_dtype`, by an environment that was read before. Pure: logs nothing."""
    if modality not in MODALITIES:
        raise ConfigError(f"modality is {modality!r}, {wanted(modality, MODALITIES)}")
    engine = (worker.engine if worker else None) or "tokenspeed"
    labels = worker.labels if worker else {}
    if engine == "vllm" and labels.get(NORMALIZES_LABEL) == "true":
        return ResolvedDtype("uint8", f"worker label {NORMALIZES_LABEL}")
    variables = environment.smg.dtypes
    variable = variables.get(f"{engine} {modality}") or variables.get(engine)
    if variable is not None:
        text, source = variable.text, variable.name
    elif labels.get(LABEL):
        text, source = labels[LABEL], f"worker label {LABEL}"
    else:
        return ResolvedDtype(_UNTOLD[engine], "default")
    warnings: list[str] = []
    dtype = float_dtype(text, source=source, warn=warnings.append)
    if dtype == "uint8" and engine == "tokenspeed":
        warnings.append(f"{source} is {text!r}, but TokenSpeed takes floats: pixels go as float32")
        dtype = "float32"
    return ResolvedDtype(dtype, source, tuple(warnings))
