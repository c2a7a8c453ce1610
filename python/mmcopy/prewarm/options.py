"""What a prewarm is asked to do, in one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmcopy.config import parse_count, parse_seconds

from .inputs import Family
from .plan import Sizes

if TYPE_CHECKING:
    import torch

__all__ = ["PrewarmOptions"]


@dataclass(frozen=True, kw_only=True)
class PrewarmOptions:
    """How :func:`mmcopy.prewarm` warms a model.

    Attributes:
        modalities: Some of image, video, audio; None: all that the model has; (): none.
        sizes: By modality, instead of the family's shapes: ``{"image": [(1024, 1024), [(512, 512), (768, 512)]],
            "video": [(8, 448, 448)]}``, one encode per entry.
        max_pixels: The preprocessor's limit for one picture.
        deadline_s: Seconds for all of it. None: no limit, and everything runs on the caller's own thread, for what
            belongs to a thread altogether, such as the CUDA graphs of ``mode="reduce-overhead"`` (with ``repeats=3``).
        required: Raise, and let ``readiness`` fail, when not every shape could be encoded. Otherwise the worker becomes
            ready with a warning.
        repeats: Encodes of each shape.
        stream: Where the encodes run; None: the caller's current stream. The device is idle afterwards, so that any
            stream may follow.
        config: For a model without ``config``.
        family: For a model that mmcopy does not know.
        encode: Called with the modality and the tensors by name, instead of the model's ``get_image_features`` and
            the like.
        progress: A bar, when stderr is a terminal and rich is installed.
    """

    modalities: Sequence[str] | None = None
    sizes: Sizes | None = None
    max_pixels: int | None = None
    deadline_s: float | None = 300.0
    required: bool = False
    repeats: int = 1
    stream: torch.cuda.Stream | None = None
    config: Any = None
    family: Family | None = None
    encode: Callable[[str, Mapping[str, torch.Tensor]], Any] | None = None
    progress: bool = True

    def checked(self) -> PrewarmOptions:
        """The same, with numbers that were given as text parsed. Raises :class:`ConfigError` that names a bad value.

        A prewarm calls it, so that its readiness fails with the error.
        """
        pixels, limit = self.max_pixels, self.deadline_s
        return replace(
            self,
            max_pixels=None if pixels is None else parse_count(pixels, setting="prewarm max_pixels"),
            deadline_s=None if limit is None else parse_seconds(limit, setting="prewarm deadline_s"),
            repeats=parse_count(self.repeats, setting="prewarm repeats"),
        )
