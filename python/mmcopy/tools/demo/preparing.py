"""What mmcopy's own gateway makes of pictures: the tensors that a family's encoder takes, by numpy, before any cast.

It is :mod:`mmcopy.tools.demo.expected` in float32. So it takes only pictures that the family does not resize.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmcopy.errors import ConfigError

from .expected import expected_tensors, kept_size
from .families import Arithmetic, Family, Layout

__all__ = ["check_picture", "prepared"]


def check_picture(family: Family, width: int, height: int, *, dtype: str) -> None:
    """Raises :class:`ConfigError` for a picture that :func:`prepared` cannot prepare."""
    if family.layout is Layout.NOT_RECOMPUTED:
        raise ConfigError(
            f"gateway mmcopy does not resize pictures, and the family {family.name} always has them resized: "
            "use --gateway smg or another --family"
        )
    if dtype == "uint8" and family.arithmetic is not Arithmetic.SCALED:
        raise ConfigError(f"gateway mmcopy has no raw bytes for the family {family.name}: use another --encoder-dtype")
    if not kept_size(family, width, height):
        sizes = ", ".join(f"{w}x{h}" for w, h in family.small_sizes)
        raise ConfigError(
            f"gateway mmcopy does not resize pictures, and {family.name} takes none of {width}x{height} as it is "
            f"(but for example {sizes}): use --gateway smg or other pictures"
        )


def prepared(
    family: Family, pictures: Sequence[NDArray[np.uint8]], *, engine: str, dtype: str
) -> dict[tuple[int, str], NDArray[Any]]:
    """(item, name) -> the tensors of one request for RGB ``pictures`` ``[height, width, 3]``.

    Pixels are float32, for the sender to cast, or uint8 when ``dtype`` is. Raises :class:`ConfigError`.
    """
    for pixels in pictures:
        check_picture(family, pixels.shape[1], pixels.shape[0], dtype=dtype)
    made = expected_tensors(
        family,
        [(pixels, pixels.shape[1], pixels.shape[0]) for pixels in pictures],
        engine=engine,
        dtype="uint8" if dtype == "uint8" else "float32",
    )
    return {key: tensor.elements for key, tensor in made.items() if tensor is not None}
