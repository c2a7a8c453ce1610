"""What a prewarm did."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmcopy.errors import ConfigError

from .forecast import Forecast, foresee, outlook, plan_outlook
from .inputs import Config, Family, Shape
from .plan import Role

__all__ = ["Outcome", "PrewarmReport", "PrewarmStatus", "ShapeReport"]


class PrewarmStatus(enum.StrEnum):
    """How a prewarm ended."""

    WARM = "warm"
    """Every shape was encoded."""
    SKIPPED = "skipped"
    """There was nothing to do; ``reason`` says why."""
    INCOMPLETE = "incomplete"
    """The deadline passed, or a shape failed; ``reason`` says which, and ``error`` is the encoder's own exception."""


class Outcome(enum.StrEnum):
    """How one shape ended."""

    WARM = "warm"
    FAILED = "failed"
    """The encoder raised, or the smallest shape did not fit into memory."""
    HUNG = "hung"
    """It was still running at the deadline. It cannot be interrupted, and may run on."""
    NOT_RUN = "not run"
    """The deadline had passed, or an earlier shape of the modality failed."""


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """One encode. ``shape`` is what ran; ``planned`` what was wanted, larger where memory did not suffice.

    ``seconds`` from the call until the device was done; ``graphs`` compiled meanwhile; ``peak_bytes`` of the device
    over what was allocated before (None on the CPU). ``note`` says what was tried before, or why it failed.
    """

    planned: Shape
    shape: Shape
    outcome: Outcome
    seconds: float = 0.0
    graphs: int = 0
    peak_bytes: int | None = None
    note: str = ""
    again_seconds: float = 0.0
    """Of one more encode, on the caller's thread."""
    on_callers_thread: bool = False
    """Whether it was encoded on the thread that called prewarm: alone (``deadline_s=None``), or once more (a GPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmReport:
    """What a prewarm did, what it cost, and what it does not cover.

    ``seconds`` is the whole of it, ``transport_seconds`` the receiver's and the collectives' part. ``graphs`` is how
    many graphs were compiled; ``compiled`` says whether the encoder is compiled at all, ``attention`` its
    implementation. ``cudnn_attention`` says for each modality whether torch took cuDNN's attention, which makes a plan
    for every size that is new to a thread (None: not known; False on the CPU). ``peak_bytes`` is the most that an
    encode took from the device beyond what was allocated before, ``retained_bytes`` what stays allocated,
    ``reserved_bytes`` what torch's allocator keeps for the next encode (None on the CPU): a KV cache is sized after the
    prewarm, out of what is free then. ``error`` is an encoder's exception.
    """

    status: PrewarmStatus
    reason: str
    role: Role
    device: str
    dtypes: Mapping[str, str] = field(default_factory=dict)
    shapes: Sequence[ShapeReport] = ()
    seconds: float = 0.0
    transport_seconds: float = 0.0
    compiled: bool = False
    attention: str = ""
    cudnn_attention: Mapping[str, bool | None] = field(default_factory=dict)
    graphs: int = 0
    peak_bytes: int | None = None
    retained_bytes: int | None = None
    reserved_bytes: int | None = None
    warnings: Sequence[str] = ()
    error: BaseException | None = None
    family: Family | None = None
    config: Config = field(default_factory=dict, repr=False)

    @property
    def warmed(self) -> tuple[Shape, ...]:
        """The shapes that were encoded."""
        return tuple(each.shape for each in self.shapes if each.outcome is Outcome.WARM)

    @property
    def settled(self) -> tuple[Shape, ...]:
        """The shapes that were encoded on the thread that called prewarm."""
        return tuple(each.shape for each in self.shapes if each.outcome is Outcome.WARM and each.on_callers_thread)

    @property
    def varlen(self) -> bool:
        """Whether attention takes pieces of any number and length at once."""
        return "flash" in self.attention

    def forecast(self, modality: str, *items: tuple[int, ...]) -> Forecast:
        """Whether encoding ``items`` at once, such as (1024, 1024), would compile again, why, and what avoids it; and
        whether attention would make a plan first, on the thread that called prewarm.

        Raises :class:`ConfigError` for a size or a modality that cannot be, or when there was nothing to warm.
        """
        if self.family is None:
            raise ConfigError(f"the prewarm was {self.status}: {self.reason}")
        shape = Shape(modality, items)
        if modality not in self.family.modalities:
            known = ", ".join(self.family.modalities)
            raise ConfigError(f"{type(self.family).__name__} has no inputs for {modality}, only for {known}")
        shape = self.family.fit(self.config, shape)
        return foresee(
            self.family,
            self.config,
            shape,
            self.warmed,
            compiled=self.compiled,
            varlen=self.varlen,
            settled=self.settled,
            cudnn=self.cudnn_attention.get(modality),
        )

    @property
    def outlooks(self) -> list[str]:
        """Which later sizes would compile again, one line per modality, and whether new ones make attention plan; empty
        when none would."""
        if self.family is None:
            return []
        modalities = dict.fromkeys(each.shape.modality for each in self.shapes)
        lines = [
            outlook(self.family, self.config, name, self.warmed, compiled=self.compiled, varlen=self.varlen)
            for name in modalities
        ]
        lines.append(plan_outlook([name for name in modalities if self.cudnn_attention.get(name)]))
        return [line for line in lines if line]

    def as_dict(self) -> dict[str, Any]:
        """The report in JSON's types."""
        return {
            "status": str(self.status),
            "reason": self.reason,
            "role": str(self.role),
            "device": self.device,
            "dtypes": dict(self.dtypes),
            "seconds": self.seconds,
            "transport_seconds": self.transport_seconds,
            "compiled": self.compiled,
            "attention": self.attention,
            "cudnn_attention": dict(self.cudnn_attention),
            "graphs": self.graphs,
            "peak_bytes": self.peak_bytes,
            "retained_bytes": self.retained_bytes,
            "reserved_bytes": self.reserved_bytes,
            "warnings": list(self.warnings),
            "outlooks": self.outlooks,
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "shapes": [
                {
                    "planned": str(each.planned),
                    "shape": str(each.shape),
                    "outcome": str(each.outcome),
                    "seconds": each.seconds,
                    "again_seconds": each.again_seconds,
                    "on_callers_thread": each.on_callers_thread,
                    "graphs": each.graphs,
                    "peak_bytes": each.peak_bytes,
                    "note": each.note,
                }
                for each in self.shapes
            ],
        }

    def __str__(self) -> str:
        text = f"prewarm of {self.role} on {self.device}: {self.status}"
        if self.reason:
            text += f", {self.reason}"
        if self.shapes:
            text += f"; {len(self.warmed)} of {len(self.shapes)} shapes in {self.seconds:.1f} s"
        if self.compiled:
            text += f", {self.graphs} graphs compiled"
        if any(self.cudnn_attention.values()):
            text += ", attention plans (cuDNN) for each size that is new to a thread"
        if self.peak_bytes is not None:
            text += f", peak {self.peak_bytes / 2**20:.0f} MiB"
        return text
