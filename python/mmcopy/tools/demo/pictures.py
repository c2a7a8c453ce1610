"""The pictures that the demo sends: a generated set, or the user's own files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mmcopy.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "Attachments",
    "Picture",
    "attachments_of_files",
    "decode",
    "decoded",
    "generated_attachments",
    "picture_from_file",
]

PIXELS_KEPT_MAX = 64 << 20
SMALL_SIZES = ((640, 480), (512, 384), (320, 256))
PHOTO_SIZE = (4032, 3008)
ORIENTATION = 0x0112


@dataclass(frozen=True, eq=False)
class Picture:
    """An encoded file and its size; ``pixels`` ``[height, width, 3]`` where every decoder must agree on them."""

    name: str
    file: bytes
    width: int
    height: int
    pixels: NDArray[np.uint8] | None


@dataclass(frozen=True, eq=False)
class Attachments:
    """The pictures and videos of one request."""

    pictures: tuple[Picture, ...] = ()
    videos: tuple[bytes, ...] = ()


def generated_attachments() -> list[Attachments]:
    """One small picture; several small ones of different sizes; one as large as a photo. Takes about a second.

    No size makes Qwen3-VL resize, so that each tensor of that family can be recomputed.
    """
    several = [gradient(*SMALL_SIZES[0])] + [noise(*size, seed=seed) for seed, size in enumerate(SMALL_SIZES[1:], 1)]
    return [Attachments((noise(*SMALL_SIZES[0]),)), Attachments(tuple(several)), Attachments((photo(*PHOTO_SIZE),))]


def attachments_of_files(files: Sequence[Path], videos: Sequence[Path], *, images_max: int) -> list[Attachments]:
    """The user's files, at most ``images_max`` pictures a request; each video goes with a request of its own.

    Raises :class:`ConfigError` for a file that can't be read or is neither PNG nor JPEG.
    """
    pictures = [picture_from_file(file) for file in files]
    starts = range(0, len(pictures), images_max)
    attachments = [Attachments(tuple(pictures[start : start + images_max])) for start in starts]
    return attachments + [Attachments(videos=(_read(video),)) for video in videos]


def picture_from_file(path: Path) -> Picture:
    """A PNG or JPEG file as it is. Raises :class:`ConfigError`."""
    images = _pillow()
    file = _read(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", images.DecompressionBombWarning)  # only the header is read here
        try:
            image = images.open(io.BytesIO(file), formats=["PNG", "JPEG"])
        except images.UnidentifiedImageError:
            raise ConfigError(f"{path} is neither a PNG nor a JPEG file") from None
        except images.DecompressionBombError as error:
            raise ConfigError(f"{path}: {error}") from error
        except OSError as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
    width, height = image.size
    return Picture(f"{path.name} {width}x{height}", file, width, height, _pixels(path, image))


def decode(file: bytes) -> NDArray[np.uint8]:
    """The pixels ``[height, width, 3]`` of a PNG or JPEG file, as Pillow decodes them, not turned. OSError for a bad
    one."""
    with _pillow().open(io.BytesIO(file), formats=["PNG", "JPEG"]) as image:
        pixels: NDArray[np.uint8] = np.asarray(image.convert("RGB"))
        return pixels


def decoded(attached: Attachments) -> Attachments:
    """``attached`` with the pixels of every picture, as Pillow decodes them. Raises :class:`ConfigError`."""
    pictures = []
    for picture in attached.pictures:
        try:
            pixels = decode(picture.file) if picture.pixels is None else picture.pixels
        except (OSError, SyntaxError) as error:
            raise ConfigError(f"{picture.name} is damaged: {error}") from error
        pictures.append(replace(picture, pixels=pixels))
    return replace(attached, pictures=tuple(pictures))


def _pixels(path: Path, image: Image.Image) -> NDArray[np.uint8] | None:
    """The pixels of a lossless 8-bit RGB or grey file; decoders may differ on the others, and on turned ones."""
    plain = image.format == "PNG" and image.mode in ("RGB", "L") and "transparency" not in image.info
    if not plain or image.width * image.height > PIXELS_KEPT_MAX:
        return None
    try:
        pixels = np.asarray(image.convert("RGB"))
        return pixels if image.getexif().get(ORIENTATION, 1) == 1 else None
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def noise(width: int, height: int, *, seed: int = 0) -> Picture:
    """Independent random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return _picture("noise", pixels)


def gradient(width: int, height: int) -> Picture:
    """Red grows to the right, green downwards, blue to the left."""
    across = np.linspace(0, 255, width).astype(np.uint8)[None, :]
    down = np.linspace(0, 255, height).astype(np.uint8)[:, None]
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1], pixels[..., 2] = across, down, 255 - across
    return _picture("gradient", pixels)


def photo(width: int, height: int, *, seed: int = 0) -> Picture:
    """Of a photo's size: a gradient under coarse noise, quick to encode and to decode."""
    pixels = np.asarray(gradient(width, height).pixels).copy()
    cells = np.random.default_rng(seed).integers(0, 64, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    pixels ^= cells.repeat(16, axis=0).repeat(16, axis=1)[:height, :width]
    return _picture("photo", pixels)


def _picture(kind: str, pixels: NDArray[np.uint8]) -> Picture:
    file = io.BytesIO()
    _pillow().fromarray(pixels).save(file, "PNG", compress_level=1)
    height, width = pixels.shape[:2]
    return Picture(f"{kind} {width}x{height}", file.getvalue(), width, height, pixels)


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError("pillow is not installed: pip install 'mmcopy[demo]'") from error
    return Image
