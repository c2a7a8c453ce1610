"""Which sizes a compiled encoder would compile for again, and which ones attention would plan for.

The rules are those that counting compilations of real towers showed (torch 2.11, transformers 5.24, backend "eager"): a
size that was seen is compiled; a first size is compiled for as it is, a second one that shares no side makes the sides
dynamic; a size of one token, or a row of them, is compiled for by itself. Where attention runs piece by piece (every
implementation but flash attention), the number of pieces is compiled in, and each number needs two sizes, neither of
them with one token or a row of them. All of it is for ordinary tensors in inference mode. A forecast of "compiles" is
cautious: it can be wrong. One of "does not" was right for every size that was tried.

A plan is cuDNN's attention's (attention.py): one for each size and thread. Sizes of as many tokens share one, so that a
forecast of "plans" is cautious, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .inputs import Config, Family, Shape

__all__ = ["Forecast", "foresee", "outlook", "plan_outlook"]

_VARLEN = "attn_implementation='flash_attention_2' or another variable-length attention"
_MORE = "give prewarm two sizes of that kind"
_PLAN_S = "45 to 75 ms on an H200"
_NO_PLAN = (
    "torch.backends.cuda.enable_cudnn_sdp(False) before the prewarm, or encode on the thread that called prewarm, in "
    "sizes that it was given"
)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Whether encoding ``shape`` will compile, why, and what would avoid it ("" when it does not).

    ``plans``: whether attention makes a plan for it first, on the thread that called prewarm (every other thread makes
    its own); None where that is not known. ``plan_why`` says why, and what would avoid it.
    """

    shape: Shape
    compiles: bool
    why: str
    remedy: str = ""
    plans: bool | None = False
    plan_why: str = ""

    def __str__(self) -> str:
        answer = f"{self.shape}: {'compiles again' if self.compiles else 'compiles nothing'}, {self.why}"
        answer += f"; to avoid it: {self.remedy}" if self.remedy else ""
        return f"{answer}; {self.plan_why}" if self.plan_why else answer


def foresee(
    family: Family,
    config: Config,
    shape: Shape,
    warmed: Sequence[Shape],
    *,
    compiled: bool,
    varlen: bool,
    settled: Sequence[Shape] = (),
    cudnn: bool | None = False,
) -> Forecast:
    """What a fitted ``shape`` meets after ``warmed`` were encoded, ``settled`` of them on the thread in question, where
    attention is cuDNN's or not. A pure function."""
    plans, plan_why = _foresee_plan(shape, settled, cudnn)

    def no(why: str) -> Forecast:
        return Forecast(shape, False, why, "", plans, plan_why)

    def yes(why: str, remedy: str) -> Forecast:
        return Forecast(shape, True, why, remedy, plans, plan_why)

    if not compiled:
        return no("the encoder is not compiled")
    if shape in warmed:
        return no("this size was warmed")
    sound = shape.modality == "audio"
    seen = [each for each in dict.fromkeys(warmed) if (each.modality == "audio") == sound]
    if len(seen) < 2:
        return yes(f"{len(seen)} sizes were warmed, and a single one is compiled for as it is", "warm two")
    if _has_a_row(family, config, shape):
        return yes("one token high or wide is compiled for by itself", "warm that very size")
    pieces = family.segments(config, shape)
    if not pieces:
        if len(shape.items) == 1 and shape.volume < min(each.volume for each in seen):
            return yes("it is smaller than every size that was warmed, maybe a batch of one", "warm that very size")
        return no("the encoder's size is fixed, and the number of pictures is dynamic")
    layout = family.layout(config, shape)
    if layout and sum(family.layout(config, each) == layout for each in seen) < 2:
        return yes("how the pictures of a batch differ is compiled in, and two such batches were not warmed", _MORE)
    if varlen:
        if len(shape.items) > 1 and not any(len(each.items) > 1 for each in seen):
            return yes("no two items at once were warmed", "warm such a batch")
        return no("attention takes any number of pieces")
    counts = _pieces(family, config, seen)
    unknown = sorted(number for number in pieces if counts.count(number) < 2)
    if unknown:
        return yes(
            f"attention runs in {' and '.join(map(str, sorted(pieces)))} pieces, and {unknown[0]} was seen in "
            f"{counts.count(unknown[0])} sizes: two are needed",
            f"{_VARLEN}, or {_MORE}",
        )
    return no(f"{' and '.join(map(str, sorted(pieces)))} pieces of attention were seen, and sides are dynamic")


def outlook(
    family: Family, config: Config, modality: str, warmed: Sequence[Shape], *, compiled: bool, varlen: bool
) -> str:
    """One line about a modality's later sizes; "" where nothing compiles again."""
    if not compiled:
        return ""
    seen = [each for each in dict.fromkeys(warmed) if (each.modality == "audio") == (modality == "audio")]
    if len(seen) < 2:
        return f"{modality}: every other size compiles again, because {len(seen)} sizes were warmed; warm two"
    kinds = [family.segments(config, each) for each in seen]
    if varlen or not any(kinds):
        return ""
    counts = _pieces(family, config, seen)
    good = sorted({number for number in counts if counts.count(number) >= 2})
    numbers = ", ".join(map(str, good)) or "none"
    if any(len(kind) > 1 for kind in kinds):
        return (
            f"{modality}: nearly every other size compiles again: attention runs in as many pieces as a size has "
            f"windows, and only {numbers} are covered; to avoid it: {_VARLEN}, or no torch.compile"
        )
    return (
        f"{modality}: sizes whose attention runs in another number of pieces (pictures x frames) than {numbers} "
        f"compile again; to avoid it: {_VARLEN}, or {_MORE}"
    )


def _has_a_row(family: Family, config: Config, shape: Shape) -> bool:
    """Whether a picture of ``shape`` is one token high or wide."""
    unit = family.unit(config)
    return bool(unit) and shape.modality != "audio" and any(unit in item[-2:] for item in shape.items)


def _pieces(family: Family, config: Config, seen: Sequence[Shape]) -> list[int]:
    """Numbers of pieces of attention in ``seen``, each as often as it occurs; without sizes that are compiled for by
    themselves."""
    return [number for each in seen if not _has_a_row(family, config, each) for number in family.segments(config, each)]


def plan_outlook(modalities: Sequence[str]) -> str:
    """One line about later sizes of ``modalities``, whose attention is cuDNN's; "" for none."""
    if not modalities:
        return ""
    return (
        f"{', '.join(modalities)}: attention (cuDNN's) makes a plan for every size that is new to a thread, {_PLAN_S}; "
        f"to avoid it: {_NO_PLAN}"
    )


def _foresee_plan(shape: Shape, settled: Sequence[Shape], cudnn: bool | None) -> tuple[bool | None, str]:
    if cudnn is None:
        return None, "whether attention makes a plan for it is not known"
    if not cudnn:
        return False, ""
    if shape in settled:
        return False, "attention has its plan on the thread that called prewarm, and makes one on every other"
    return True, f"attention makes a plan for it first, {_PLAN_S}; to avoid it: {_NO_PLAN}"
