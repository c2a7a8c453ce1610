"""The oracle of all families, against slower and plainer computations; a real gateway is held against it elsewhere."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mmcopy.tools.demo import expected
from mmcopy.tools.demo.expected import ENCODER_DTYPES, rounded
from mmcopy.tools.demo.families import FAMILIES, RECOMPUTED
from tests.rigs.oracle import channel_tables, encoder_input, expected_tensors, kept_size, normalised, side_tensors
from tests.rigs.oracle_families import PREPROCESSING, Arithmetic, Layout

NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "uint8": np.uint8}
KEPT = sorted(name for name, family in PREPROCESSING.items() if family.layout is not Layout.NOT_RECOMPUTED)


def noise(width: int, height: int) -> Any:
    return np.random.default_rng(width * 10007 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def shrunk(name: str, **changes: Any) -> Any:
    """The family with limits that let tiny pictures through."""
    return dataclasses.replace(PREPROCESSING[name], min_pixels=0, min_side=1, **changes)


@pytest.mark.parametrize("name", sorted(PREPROCESSING))
def test_bytes_become_what_the_formula_says(name: str) -> None:
    family = PREPROCESSING[name]
    got = normalised(family, np.arange(256, dtype=np.float32))
    for channel in range(3):
        exact = (np.arange(256) / 255 - family.mean[channel]) / family.std[channel]
        np.testing.assert_allclose(got[channel], exact, rtol=0, atol=1e-6)
    assert got.dtype == np.float32


def test_the_orders_of_steps_differ_in_float32() -> None:
    family = PREPROCESSING["qwen2_vl"]
    tables = {
        kind: channel_tables(dataclasses.replace(family, arithmetic=kind), "float32").tobytes() for kind in Arithmetic
    }
    assert len(set(tables.values())) == len(Arithmetic)


@pytest.mark.parametrize("dtype", ENCODER_DTYPES)
def test_a_table_has_the_dtypes_own_elements(dtype: str) -> None:
    table = channel_tables(PREPROCESSING["qwen3_vl"], dtype)
    assert table.dtype == NUMPY_DTYPES[dtype]
    assert table.shape == (3, 256)


def test_bfloat16_is_rounded_like_ml_dtypes_does() -> None:
    random = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    halves = (np.arange(2048, dtype=np.uint32) << 15).view(
        np.float32
    )  # exactly between two bfloat16 values, and on them
    values = np.concatenate([random, halves[np.isfinite(halves)], np.array([0.0, -0.0, 1e-45], np.float32)])
    assert rounded(values, "bfloat16").tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="'int4', want one of float32, bfloat16"):
        rounded(np.zeros(1, np.float32), "int4")


def test_merged_patches_element_by_element() -> None:
    family = shrunk("qwen2_vl")
    pixels, p, m = noise(112, 56), 14, 2
    got = encoder_input(family, pixels, "float32")
    assert got is not None
    table = channel_tables(family, "float32")
    want = np.empty((4 * 8, 3, 2, p, p), np.float32)
    at = 0
    for block_row in range(2):
        for block_column in range(4):
            for row in range(m):
                for column in range(m):
                    top, left = (block_row * m + row) * p, (block_column * m + column) * p
                    for channel in range(3):
                        patch = table[channel][pixels[top : top + p, left : left + p, channel]]
                        want[at, channel, 0] = want[at, channel, 1] = patch
                    at += 1
    assert got.elements.tobytes() == want.tobytes()
    assert got.shape == (32, 1176)


@pytest.mark.parametrize("size", [(28, 28), (29, 28), (28, 29), (1, 1), (57, 85)])
def test_plain_patches_are_padded_with_black(size: tuple[int, int]) -> None:
    family = PREPROCESSING["kimi_k25"]
    pixels = noise(*size)
    got = encoder_input(family, pixels, "float32")
    assert got is not None
    rows, columns = 2 * math.ceil(size[1] / 28), 2 * math.ceil(size[0] / 28)
    assert got.shape == (rows * columns, 3, 14, 14)
    table = channel_tables(family, "float32")
    for row in range(rows * 14):
        for column in range(columns * 14):
            inside = row < size[1] and column < size[0]
            values = pixels[row, column] if inside else (0, 0, 0)
            patch = got.elements[row // 14 * columns + column // 14, :, row % 14, column % 14]
            assert patch.tolist() == [table[channel][values[channel]] for channel in range(3)]


def test_patches_of_a_fixed_number_end_in_zeros() -> None:
    pixels = noise(768, 768)
    got = encoder_input(PREPROCESSING["gemma4"], pixels, "float32")
    assert got is not None
    assert got.shape == (1, 2520, 768)
    assert not got.elements[0, 48 * 48 :].any()
    third = got.elements[0, 48 + 2].reshape(16, 16, 3)  # second row of patches, third column
    assert third.tobytes() == (pixels[16:32, 32:48] * np.float32(1 / 255)).astype(np.float32).tobytes()


def test_the_extra_column_is_outside_the_picture() -> None:
    family = PREPROCESSING["inkling"]
    pixels = noise(80, 40)
    got = encoder_input(family, pixels, "float32")
    assert got is not None
    assert got.shape == (3, 2, 40, 40, 3)
    outside = normalised(family, np.array([-1], np.float32))[:, 0]
    assert (got.elements[2] == outside).all()
    assert (got.elements[1, 0] == got.elements[1, 1]).all()
    table = channel_tables(family, "float32")
    assert got.elements[1, 0, 5, 6].tolist() == [table[channel][pixels[5, 46, channel]] for channel in range(3)]


def test_crops_and_tiles() -> None:
    wide = noise(400, 336)
    cropped = encoder_input(PREPROCESSING["llava"], wide, "uint8")
    assert cropped is None  # bytes are for the families that send them
    cropped = encoder_input(PREPROCESSING["llava"], wide, "float16")
    table = channel_tables(PREPROCESSING["llava"], "float16")
    assert cropped is not None
    assert cropped.elements[0, 1].tobytes() == table[1][wide[:, 32:368, 1]].tobytes()
    low = noise(336, 100)
    tile = encoder_input(PREPROCESSING["llama4"], low, "float32")
    assert tile is not None
    assert (tile.elements[0, :, 100:] == -1.0).all()
    square = noise(336, 336)
    three = encoder_input(PREPROCESSING["llava_next"], square, "float32")
    assert three is not None
    assert three.elements[0, 1, :, 168:].tobytes() == three.elements[0, 0, :, :168].tobytes()
    assert three.elements[0, 2, :, :168].tobytes() == three.elements[0, 0, :, 168:].tobytes()


@pytest.mark.parametrize(
    ("name", "kept", "resized"),
    [
        ("qwen3_vl", [(64, 64), (4032, 3008)], [(32, 32), (640, 481), (16384, 1056)]),
        ("qwen2_vl", [(56, 56), (4032, 3024)], [(28, 28), (640, 480)]),
        ("kimi_k25", [(1, 1), (1791, 1793), (7168, 28)], [(1820, 1806), (7169, 28)]),
        ("llava", [(336, 336), (1000, 336)], [(335, 336), (337, 337)]),
        ("llava_next", [(336, 336)], [(336, 672)]),
        ("llama4", [(336, 1), (336, 336)], [(335, 335), (336, 337)]),
        ("phi3_v", [], [(336, 336), (1344, 1344)]),
        ("gemma4", [(768, 768), (960, 672), (816, 768)], [(48, 48), (1440, 448)]),
        ("glm53_flash", [(168, 168), (28, 1120)], [(140, 140), (169, 168)]),
        ("minimax_m3_vl", [(112, 112), (672, 672)], [(84, 112), (700, 672)]),
        ("inkling", [(1, 1), (4032, 3024)], []),
        ("deepseek_v41", [(546, 546), (1302, 1302), (2800, 630)], [(532, 532), (1400, 1400), (547, 546)]),
    ],
)
def test_sizes_that_are_kept(name: str, kept: list[tuple[int, int]], resized: list[tuple[int, int]]) -> None:
    family = PREPROCESSING[name]
    assert [kept_size(family, *size) for size in kept] == [True] * len(kept)
    assert [kept_size(family, *size) for size in resized] == [False] * len(resized)


@pytest.mark.parametrize("name", KEPT)
def test_the_generated_small_pictures_are_recomputed_and_sides_fit(name: str) -> None:
    family = PREPROCESSING[name]
    for width, height in family.sizes:
        tensor = encoder_input(family, noise(width, height), "bfloat16")
        assert tensor is not None
        sides = side_tensors(family, width, height)
        assert all(side.dtype == np.int64 for side in sides.values())
        if "patches_per_image" in sides:
            assert sides["patches_per_image"].tolist() == [tensor.shape[0]]
        for key in ("image_grid_thw", "grid_thws", "vit_grid"):
            if key in sides:
                assert int(sides[key].prod()) == tensor.shape[0]


def test_vllm_joins_what_tokenspeed_keeps_apart() -> None:
    family = FAMILIES["qwen3_vl"]
    pictures = [(noise(64, 64), 64, 64), (noise(128, 64), 128, 64)]
    apart = expected_tensors(family, pictures, engine="tokenspeed", dtype="bfloat16")
    joined = expected_tensors(family, pictures, engine="vllm", dtype="bfloat16")
    assert set(apart) == {
        (item, name) for item in (0, 1) for name in ("encoder_input", "image_grid_thw", "patches_per_image")
    }
    for key, name in (("pixel_values", "encoder_input"), ("image_grid_thw", "image_grid_thw")):
        whole, parts = joined[0, key], [apart[0, name], apart[1, name]]
        assert whole is not None
        assert whole.elements.tobytes() == b"".join(part.elements.tobytes() for part in parts if part is not None)
    assert joined[0, "patches_per_image"].elements.tolist() == [16, 32]  # type: ignore[union-attr]


def test_one_unknown_picture_makes_the_joined_tensor_unknown() -> None:
    pictures = [(noise(64, 64), 64, 64), (None, 64, 64)]
    joined = expected_tensors(FAMILIES["qwen3_vl"], pictures, engine="vllm", dtype="bfloat16")
    assert joined[0, "pixel_values"] is None
    assert joined[0, "patches_per_image"] is not None  # the size alone says it
    resized = [(noise(64, 64), 64, 64), (noise(65, 64), 65, 64)]
    joined = expected_tensors(FAMILIES["qwen3_vl"], resized, engine="vllm", dtype="bfloat16")
    assert set(joined.values()) == {None}
    mixed = [(noise(336, 336), 336, 336), (noise(640, 480), 640, 480)]
    assert expected_tensors(FAMILIES["llava_next"], mixed, engine="tokenspeed", dtype="bfloat16") == {}


@pytest.mark.parametrize("engine", ["tokenspeed", "vllm"])
@pytest.mark.parametrize("dtype", ENCODER_DTYPES)
def test_what_the_demo_recomputes_of_its_one_family_is_the_same(engine: str, dtype: str) -> None:
    family = FAMILIES[RECOMPUTED]
    sizes = [*PREPROCESSING[RECOMPUTED].sizes, (64, 64), (65, 64)]
    for pictures in ([(noise(*size), *size) for size in sizes], [(noise(*sizes[0]), *sizes[0])], [(None, 96, 64)]):
        demos = expected.expected_tensors(family, pictures, engine=engine, dtype=dtype)
        oracles = expected_tensors(family, pictures, engine=engine, dtype=dtype)
        assert demos.keys() == oracles.keys()
        for key, tensor in demos.items():
            other = oracles[key]
            assert (tensor is None) == (other is None)
            if tensor is not None and other is not None:
                assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
                assert tensor.elements.tobytes() == other.elements.tobytes()
    assert [expected.kept_size(*size) for size in [(64, 64), (4032, 3008)]] == [True, True]
    assert [expected.kept_size(*size) for size in [(32, 32), (640, 481), (16384, 1056)]] == [False] * 3


def test_the_oracle_knows_every_family_of_the_demo() -> None:
    assert PREPROCESSING.keys() == FAMILIES.keys()
    for name, family in FAMILIES.items():
        given = family.processor.get("media_proc_cfg", family.processor)
        assert given.get("image_mean", [0.0] * 3) == list(PREPROCESSING[name].mean)
        assert given.get("patch_size", PREPROCESSING[name].patch) == PREPROCESSING[name].patch


def test_the_demo_recomputes_no_other_family() -> None:
    for name, family in FAMILIES.items():
        made = expected.expected_tensors(family, [(noise(640, 480), 640, 480)], engine="vllm", dtype="float32")
        assert bool(made) == (name == RECOMPUTED)
