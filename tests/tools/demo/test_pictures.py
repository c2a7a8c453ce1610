"""What the demo sends: generated pictures and the user's own files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcopy.errors import ConfigError
from mmcopy.tools.demo.chat import data_url, media_type_of
from mmcopy.tools.demo.expected import kept_size
from mmcopy.tools.demo.families import FAMILIES
from mmcopy.tools.demo.pictures import attachments_of_files, generated_attachments, noise, photo, picture_from_file


def save(path: Path, mode: str = "RGB", size: tuple[int, int] = (20, 10), **options: Any) -> Path:
    Image.new(mode, size, 77).save(path, **options)
    return path


def test_the_generated_set_has_small_kept_sizes_and_a_photo() -> None:
    attachments = generated_attachments()
    *small, large = [picture for attached in attachments for picture in attached.pictures]
    assert all(kept_size(picture.width, picture.height) for picture in (*small, large))
    assert large.width * large.height >= 12_000_000
    assert all(len(attached.pictures) <= family.max_images for attached in attachments for family in FAMILIES.values())
    assert len({picture.file for picture in small}) == len(small)


@pytest.mark.parametrize("picture", [noise(33, 17), photo(50, 40)], ids=["noise", "photo"])
def test_the_file_holds_the_pixels(picture: Any) -> None:
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture.file))), picture.pixels)
    assert picture.pixels.shape == (picture.height, picture.width, 3)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pixels_of_a_plain_png_are_known(tmp_path: Path, mode: str) -> None:
    picture = picture_from_file(save(tmp_path / "a.png", mode))
    assert picture.pixels is not None
    assert picture.pixels.shape == (10, 20, 3)
    assert picture.name == "a.png 20x10"


def test_pixels_that_decoders_may_see_differently_are_not(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    files = [
        save(tmp_path / "a.jpg"),
        save(tmp_path / "b.png", "RGBA"),
        save(tmp_path / "c.png", "P"),
        save(tmp_path / "d.png", "I;16"),
        save(tmp_path / "e.png", exif=turned),
        save(tmp_path / "f.png", transparency=(77, 0, 0)),
    ]
    pictures = [picture_from_file(file) for file in files]
    assert [picture.pixels for picture in pictures] == [None] * len(files)
    assert {(picture.width, picture.height) for picture in pictures} == {(20, 10)}


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("hello")
    reasons = {text: "neither a PNG nor a JPEG", tmp_path / "none.png": "No such file", tmp_path: "directory"}
    for path, why in reasons.items():
        with pytest.raises(ConfigError, match=f"{path}.*{why}"):
            picture_from_file(path)
    gif = save(tmp_path / "a.gif", "L")
    with pytest.raises(ConfigError, match="neither"):
        picture_from_file(gif)
    jpeg, png = save(tmp_path / "a.jpg"), tmp_path / "a.png"
    jpeg.write_bytes(jpeg.read_bytes()[:300])
    png.write_bytes(noise(64, 64).file[:2000])
    for path in (jpeg, png):
        with pytest.raises(ConfigError, match=f"{path} is damaged"):
            picture_from_file(path)


def test_own_files_are_dealt_in_hands_and_videos_alone(tmp_path: Path) -> None:
    files = [save(tmp_path / f"{i}.png") for i in range(5)]
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"\0\0\0\x18ftypmp42")
    attachments = attachments_of_files(files, [clip], images_max=2)
    assert [(len(attached.pictures), len(attached.videos)) for attached in attachments] == [
        (2, 0),
        (2, 0),
        (1, 0),
        (0, 1),
    ]
    assert attachments[-1].videos == (clip.read_bytes(),)


def test_media_types_come_from_the_bytes(tmp_path: Path) -> None:
    png, jpeg = save(tmp_path / "a.png").read_bytes(), save(tmp_path / "a.jpg").read_bytes()
    kinds = [media_type_of(file) for file in (png, jpeg, b"\0\0\0\x18ftypmp42", b"RIFF....WEBP", b"")]
    assert kinds == ["image/png", "image/jpeg", "video/mp4", "image/webp", "application/octet-stream"]
    assert data_url(b"\x89PNG").startswith("data:image/png;base64,iVBORw==")
