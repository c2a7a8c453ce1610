"""SMG's environment variables, read as SMG 1.13.0 reads them; tests/gateway/test_policy_variables.py compares.

A value is trimmed and its case does not matter. A blank one is not set, so the legacy name is looked at. A bad one
gives the default with a warning; the legacy name is then not looked at. A legacy name that is used is warned about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .mode import TransportMode
from .numbers import MAX_BYTES

__all__ = ["MODALITIES", "SMG_NAMES", "DtypeVariable", "SmgVariables", "float_dtype", "read_smg_variables"]

MODE, LEGACY_MODE = "SMG_MM_TENSOR_TRANSPORT", "SMG_TOKENSPEED_MM_TENSOR_TRANSPORT"
MIN_BYTES, LEGACY_MIN_BYTES = "SMG_MM_SHM_MIN_BYTES", "SMG_TOKENSPEED_MM_SHM_MIN_BYTES"
MODALITIES = ("image", "video", "audio")
DTYPES = {
    "tokenspeed": "SMG_TOKENSPEED_ENCODER_INPUT_DTYPE",
    **{f"tokenspeed {name}": f"SMG_TOKENSPEED_{name.upper()}_ENCODER_INPUT_DTYPE" for name in MODALITIES},
    "vllm": "SMG_VLLM_ENCODER_INPUT_DTYPE",
}
SMG_NAMES = (MODE, LEGACY_MODE, MIN_BYTES, LEGACY_MIN_BYTES, *DTYPES.values())

_DTYPE_NAMES = {
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("float32", "fp32", "f32"), "float32"),
    "uint8": "uint8",
}


@dataclass(frozen=True, slots=True)
class DtypeVariable:
    """A variable about the encoder's input: its name and its text, not blank."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class SmgVariables:
    """What the variables say. None: not set, or bad. ``dtypes`` has the keys of the table above."""

    mode: TransportMode | None = None
    mode_name: str = ""
    shm_min_bytes: int | None = None
    shm_min_bytes_name: str = ""
    dtypes: Mapping[str, DtypeVariable] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def read_smg_variables(environ: Mapping[str, str]) -> SmgVariables:
    """Read all of them. Never raises; what SMG would log is in ``warnings``."""
    warnings: list[str] = []
    mode_name, mode_text = _first_set(environ, MODE, LEGACY_MODE, warnings)
    mode = _mode(mode_name, mode_text, warnings)
    size_name, size_text = _first_set(environ, MIN_BYTES, LEGACY_MIN_BYTES, warnings)
    min_bytes = _min_bytes(size_name, size_text, warnings)
    return SmgVariables(
        mode=mode,
        mode_name=mode_name,
        shm_min_bytes=min_bytes,
        shm_min_bytes_name=size_name,
        # Other than with the two above, SMG takes a dtype of blanks for a name that it does not know.
        dtypes={key: DtypeVariable(name, environ[name]) for key, name in DTYPES.items() if environ.get(name)},
        warnings=tuple(warnings),
    )


def float_dtype(text: str, *, source: str, warn: Callable[[str], object]) -> str:
    """The dtype that SMG takes ``text`` for: names of several spellings; float32, with a warning, for all others."""
    found = _DTYPE_NAMES.get(text.strip().lower())
    if found is None:
        warn(f"{source} is {text!r}, which SMG does not know: pixels go as float32")
        return "float32"
    return found


def _first_set(environ: Mapping[str, str], name: str, legacy: str, warnings: list[str]) -> tuple[str, str]:
    text = environ.get(name, "").strip()
    if text:
        return name, text
    text = environ.get(legacy, "").strip()
    if text:
        warnings.append(f"{legacy} is SMG's old name: use {name}")
        return legacy, text
    return "", ""


def _mode(name: str, text: str, warnings: list[str]) -> TransportMode | None:
    if not name:
        return None
    folded = text.lower()
    if folded == "rdma":
        warnings.append(f"{name} is {text!r}, which mmcopy does not have: inline is used")
        return TransportMode.INLINE
    try:
        return TransportMode(folded)
    except ValueError:
        warnings.append(f"{name} is {text!r}, want one of inline, shm, auto: the default is used, as SMG does")
        return None


def _min_bytes(name: str, text: str, warnings: list[str]) -> int | None:
    if not name:
        return None
    match = re.fullmatch(r"\+?0*([0-9]{1,20})", text, re.ASCII)
    if match is not None and int(match[1]) <= MAX_BYTES:
        return int(match[1])
    warnings.append(
        f"{name} is {text!r}, want a number of bytes without a unit, 0 or more: the default is used, as SMG does"
    )
    return None
