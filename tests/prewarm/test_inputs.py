"""Warm-up inputs of each family, taken by the real class's own forward."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mmcopy import encoder_dtypes
from mmcopy.encoders import explain_encoder_dtypes
from mmcopy.errors import ConfigError, UnknownFamilyError
from mmcopy.prewarm.inputs import Family, Noise, Shape, Values, as_config, families, family_for, register_family
from mmcopy.prewarm.inputs.registry import _by_type
from mmcopy.prewarm.inputs.tiles import best_grid
from tests.rigs.encoder_models import BUILDERS, build

LIMIT = 64 * 64
"""max_pixels of the tiny models."""

OFFERED = [
    Shape("image", ((33, 47),)),
    Shape("image", ((1, 1),)),
    Shape("image", ((16, 48), (48, 16), (20, 20))),
    Shape("video", ((2, 33, 20),)),
    Shape("video", ((4, 16, 16), (4, 24, 40))),
    Shape("audio", ((64,),)),
    Shape("audio", ((150,), (90,))),
]
"""Sizes that nobody chose for the family."""


def tensors(inputs: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return {
        name: torch.from_numpy(value.array)
        if isinstance(value, Values)
        else (torch.rand if value.unit else torch.randn)(value.shape).to(dtype)
        for name, value in inputs.items()
    }


def numbers_of(output: Any) -> int:
    """How many numbers the encoder gave."""
    if isinstance(output, torch.Tensor):
        return int(output.numel())
    if isinstance(output, (list, tuple)):
        return sum(map(numbers_of, output))
    return numbers_of(output.last_hidden_state)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_real_forward_takes_the_default_shapes_and_others(name: str) -> None:
    model = build(name, torch.bfloat16)
    config = as_config(model.config)
    family = family_for(config)
    dtypes = encoder_dtypes(model)
    assert set(family.modalities) >= set(dtypes)
    for modality, dtype in dtypes.items():
        shapes = [*family.shapes(config, modality, LIMIT), *(s for s in OFFERED if s.modality == modality)]
        for shape in (family.fit(config, each) for each in shapes):
            assert family.fit(config, shape) == shape, "fitting is final"
            inputs = family.inputs(config, shape)
            with torch.inference_mode():
                output = family.encode(model, modality, tensors(inputs, getattr(torch, dtype)))
            assert numbers_of(output) > 0, shape


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_omni_moe", "glm4v", "kimi_k25", "llama4", "pixtral", "gemma4"])
def test_a_tower_by_itself_takes_them_too(name: str) -> None:
    model = build("mistral3" if name == "pixtral" else name, torch.bfloat16)
    tower = model.get_submodule(explain_encoder_dtypes(model)["image"].path)
    config = as_config(tower.config)
    family = family_for(config)
    shape = family.fit(config, Shape("image", ((32, 24),)))
    output = family.encode(tower, "image", tensors(family.inputs(config, shape), torch.bfloat16))
    assert numbers_of(output) > 0


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_sound_tower_by_itself(name: str) -> None:
    model = build(name, torch.bfloat16)
    tower = model.get_submodule(explain_encoder_dtypes(model)["audio"].path)
    config = as_config(tower.config)
    family = family_for(config)
    shape = Shape("audio", ((120,), (80,)))
    output = family.encode(tower, "audio", tensors(family.inputs(config, shape), torch.bfloat16))
    assert numbers_of(output) > 0


@pytest.mark.parametrize("name", BUILDERS)
def test_every_default_shape_can_be_made_smaller_until_it_is_the_smallest(name: str) -> None:
    config = as_config(build(name).config)
    family = family_for(config)
    for modality in family.modalities:
        shape: Shape | None = family.fit(config, family.shapes(config, modality, LIMIT)[-1])
        for _ in range(64):
            assert shape is not None
            smaller = family.shrink(config, shape)
            if smaller is None:
                break
            assert smaller.volume < shape.volume
            shape = smaller
        else:
            pytest.fail(f"{shape} shrinks for ever")


# ---- the published shapes of models that transformers has no class for -----


@pytest.mark.parametrize("name", ["internvl", "llama4", "phi3_v", "phi4_multimodal"])
def test_the_largest_grid_of_squares_goes_down_to_one_square_by_halves(name: str) -> None:
    family = families()[name]
    largest = family.fit({}, family.shapes({}, "image", None)[-1])
    counts, shape = [], largest
    while True:
        side = min(shape.items[0])
        counts.append(shape.volume // side**2)
        smaller = family.shrink({}, shape)
        if smaller is None:
            break
        assert family.fit({}, smaller) == smaller
        shape = smaller
    assert counts[0] == family.max_tiles  # type: ignore[attr-defined]
    assert counts[-1] == 1
    assert all(after == before // 2 for before, after in itertools.pairwise(counts))


def test_kimi_vl_takes_the_users_own_module() -> None:
    class Tower(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Takes what Kimi-VL's published tower takes, and nothing else."""

        def __init__(self) -> None:
            super().__init__()
            self.patch_embed = torch.nn.Conv2d(3, 8, 14, 14)

        def forward(self, pixels: Any, grid_hws: Any) -> Any:
            assert pixels.shape[1:] == (3, 14, 14)
            assert pixels.shape[0] == int(grid_hws.prod(-1).sum())
            assert (grid_hws % 2 == 0).all()
            return self.patch_embed(pixels)

    model: Any = torch.nn.Module()
    model.vision_tower = Tower()
    config = {"model_type": "kimi_vl", "vision_config": {"patch_size": 14, "merge_kernel_size": [2, 2]}}
    family = family_for(config)
    for shape in family.shapes(config, "image", 200_000):
        inputs = family.inputs(config, family.fit(config, shape))
        assert list(inputs) == ["pixel_values", "image_grid_hws"]
        assert numbers_of(family.encode(model, "image", tensors(inputs, torch.float32))) > 0


def test_phi3_vision_by_its_published_shapes() -> None:
    config = {"model_type": "phi3_v"}
    family = family_for(config)
    shape = family.fit(config, Shape("image", ((336, 672), (300, 300))))
    inputs = family.inputs(config, shape)
    assert isinstance(inputs["pixel_values"], Noise)
    assert inputs["pixel_values"].shape[2:] == (3, 336, 336)
    crops = [height // 336 * (width // 336) for height, width in shape.items]
    assert inputs["pixel_values"].shape[:2] == (2, 1 + max(crops))


# ---- what a gateway sends --------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vision", "picture", "pixels", "sides"),
    [
        ("qwen3_vl", {"patch_size": 16, "spatial_merge_size": 2}, (480, 640), (1200, 1536), {"image_grid_thw": (1, 3)}),
        ("qwen2_vl", {"patch_size": 14}, (476, 644), (1564, 1176), {"image_grid_thw": (1, 3)}),
        ("kimi_k25", {"patch_size": 14}, (504, 644), (1656, 3, 14, 14), {"image_grid_thw": (1, 3)}),
        ("llava", {"image_size": 336}, (480, 640), (1, 3, 336, 336), {}),
        ("llava_next", {"image_size": 336}, (480, 640), (1, 5, 3, 336, 336), {"image_sizes": (1, 2)}),
    ],
)
def test_inputs_are_those_that_a_gateway_sends(
    name: str, vision: dict[str, int], picture: tuple[int, int], pixels: tuple[int, ...], sides: dict[str, Any]
) -> None:
    """The shapes that SMG's gateway sent for a picture of 640 x 480, in wire.md."""
    pinpoints = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    config = {"model_type": name, "vision_config": vision, "image_grid_pinpoints": pinpoints}
    family = family_for(config)
    inputs = family.inputs(config, family.fit(config, Shape("image", (picture,))))
    found = {key: value.shape if isinstance(value, Noise) else value.array.shape for key, value in inputs.items()}
    assert found == {"pixel_values": pixels, **sides}


@pytest.mark.parametrize(
    ("picture", "grid"),
    [((448, 448), (1, 1)), ((448, 896), (1, 2)), ((896, 448), (2, 1)), ((2000, 2000), (3, 3)), ((100, 1200), (1, 12))],
)
def test_the_grid_of_squares_follows_the_proportions(picture: tuple[int, int], grid: tuple[int, int]) -> None:
    assert best_grid(*picture, 448, 12) == grid


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_5_omni"])
def test_the_number_of_windows_is_the_towers_own(name: str) -> None:
    """``segments`` counts what the real tower computes."""
    from transformers.vision_utils import get_vision_window_index

    model = build(name)
    config = as_config(model.config)
    family = family_for(config)
    tower = model.get_submodule(explain_encoder_dtypes(model)["image"].path)
    for shape in (Shape("image", ((64, 40),)), Shape("image", ((8, 8), (56, 72))), Shape("video", ((4, 24, 40),))):
        fitted = family.fit(config, shape)
        grid = next(v.array for k, v in family.inputs(config, fitted).items() if k.endswith("grid_thw"))
        _, boundaries = get_vision_window_index(
            torch.from_numpy(grid), tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
        counted = len(torch.unique_consecutive(torch.as_tensor(boundaries))) - 1
        assert family.segments(config, fitted) == {int(grid[:, 0].sum()), counted}


# ---- bad input -------------------------------------------------------------


@pytest.mark.parametrize(
    ("modality", "items", "says"),
    [
        ("smell", ((1, 1),), "modality 'smell'"),
        ("image", (), "without an item"),
        ("image", ((8, 8, 8),), r"want \(height, width\)"),
        ("image", ((0, 8),), "each 1 or more"),
        ("video", ((8, 8),), r"want \(frames, height, width\)"),
        ("audio", ((1.5,),), "each 1 or more"),
        ("image", (8, 8), r"image size 8: want \(height, width\)"),
        ("image", ([8, 8],), r"image size \[8, 8\]: want \(height, width\)"),
        ("image", [(8, 8)], r"image sizes \[\(8, 8\)\]: want a tuple"),
    ],
)
def test_a_shape_that_cannot_be(modality: str, items: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Shape(modality, items)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("kimi_k25", Shape("video", ((5, 16, 16),)), "5 frames, the tower has positions for 4"),
        ("mistral3", Shape("image", ((16, 400),)), "the tower's longest side is 64"),
        ("llava_onevision", Shape("video", ((2, 16, 16), (3, 16, 16))), "the same number of frames"),
        ("qwen2_5_omni", Shape("audio", ((3,),)), "fewer than 4 frames"),
        ("phi4_multimodal", Shape("audio", ((7,),)), "8 frames or more"),
    ],
)
def test_sizes_that_a_family_cannot_take(name: str, shape: Shape, says: str) -> None:
    config = as_config(build(name).config)
    with pytest.raises(ConfigError, match=says):
        family_for(config).fit(config, shape)


def test_a_config_with_another_thing_than_a_number() -> None:
    for value in ("x", {"height": 14}):
        config = {"model_type": "qwen3_vl", "vision_config": {"patch_size": value}}
        with pytest.raises(ConfigError, match=r"the config's patch_size is .*, want a whole number"):
            family_for(config).fit(config, Shape("image", ((100, 100),)))


def test_configs_of_a_users_own_classes() -> None:
    @dataclasses.dataclass(slots=True)
    class Vision:
        patch_size: int = 14

    class Config:
        def __init__(self) -> None:
            self.model_type = "qwen3_vl"
            self.vision_config = Vision()

    assert as_config(Config()) == {"model_type": "qwen3_vl", "vision_config": {"patch_size": 14}}
    assert as_config(Vision(16)) == {"patch_size": 16}
    for wrong in (Config, as_config, "qwen3_vl", None):
        with pytest.raises(ConfigError, match="want a transformers config, a dict or an object"):
            as_config(wrong)


def test_an_unknown_model_is_told_how_to_register() -> None:
    with pytest.raises(UnknownFamilyError, match=r"model_type 'novel'.*register_family\(\)"):
        family_for({"model_type": "novel"})
    with pytest.raises(ConfigError, match="want a transformers config, a dict or an object"):
        as_config(3)


def test_users_add_a_family_with_one_function() -> None:
    class Novel(Family):
        model_types = ("novel",)

        def shapes(self, config: Any, modality: str, max_pixels: int | None) -> list[Shape]:
            return [Shape(modality, ((4, 4),))]

        def fit(self, config: Any, shape: Shape) -> Shape:
            return shape

        def inputs(self, config: Any, shape: Shape) -> dict[str, Any]:
            return {"pixel_values": Noise((len(shape.items), 16))}

    try:
        register_family(Novel())
        assert isinstance(family_for({"model_type": "novel"}), Novel)
        assert "novel" in families()
    finally:
        _by_type.pop("novel")

    class Nameless(Novel):
        model_types = ()

    with pytest.raises(ConfigError, match=r"Nameless\.model_types is empty"):
        register_family(Nameless())

    class Comma(Novel):
        model_types = "novel"  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"Comma.model_types is 'novel', want a tuple: \('novel',\)"):
        register_family(Comma())
    with pytest.raises(ConfigError, match=r"register_family got <class .*Novel'>, want an object of a subclass"):
        register_family(Novel)  # type: ignore[arg-type]
    assert not {"n", "novel"} & set(families())


def test_descriptions_need_no_torch() -> None:
    script = (
        "import sys\nsys.modules['torch'] = None\nfrom mmcopy.prewarm.inputs import Shape, family_for\n"
        "config = {'model_type': 'qwen3_vl', 'vision_config': {'patch_size': 16}}\n"
        "family = family_for(config)\n"
        "print(family.inputs(config, family.fit(config, Shape('image', ((480, 640),))))['pixel_values'].shape)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("(1200, 1536)\n", "")


def test_noise_is_never_all_zero_and_values_are_whole() -> None:
    config = as_config(build("gemma4").config)
    family = family_for(config)
    inputs = family.inputs(config, family.fit(config, Shape("image", ((60, 36),))))
    assert inputs["pixel_values"].unit  # type: ignore[union-attr]
    places = inputs["image_position_ids"].array  # type: ignore[union-attr]
    assert places.dtype == np.int64
    assert places.shape == (1, 2520, 2)
    assert (places[0, :135].max(0) == (8, 14)).all()
    assert (places[0, 135:] == -1).all()
