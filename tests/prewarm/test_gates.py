"""When a prewarm runs encoders and when it does not: roles, modalities, models and arguments that cannot be."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mmcopy import Readiness
from mmcopy.errors import ConfigError, DeviceError, UnknownFamilyError
from mmcopy.prewarm import PrewarmStatus, plan_shapes
from mmcopy.prewarm.inputs import Noise, Shape
from tests.rigs.encoder_fakes import PLAIN, Model, PlainFamily
from tests.rigs.warming import warm_with

nn = torch.nn


def warm(model: Any, **options: Any) -> Any:
    return warm_with(model, **{"role": "aggregated", "device": "cpu", "family": PLAIN, **options})


@pytest.mark.parametrize(("role", "encodes"), [("aggregated", 3), ("prefill", 3), ("encode", 3), ("decode", 0)])
def test_the_role_decides(role: str, encodes: int, caplog: pytest.LogCaptureFixture) -> None:
    model, readiness = Model(), Readiness()
    with caplog.at_level(logging.INFO):
        report = warm(model, role=role, readiness=readiness)
    assert len(model.sizes) == encodes
    assert readiness.is_ready
    if encodes:
        assert (report.status, report.reason) == (PrewarmStatus.WARM, "")
        assert len(report.warmed) == 3
    else:
        assert (report.status, report.reason) == (PrewarmStatus.SKIPPED, "a decode worker encodes nothing")
        assert report.seconds == 0
        assert "prewarm of decode on cpu: skipped, a decode worker encodes nothing" in caplog.text


def test_language_only_encodes_nothing_and_says_so() -> None:
    model = Model()
    report = warm(model, modalities=())
    assert model.sizes == []
    assert (report.status, report.reason) == (PrewarmStatus.SKIPPED, "language only: no modality is wanted")


@pytest.mark.parametrize("required", [False, True])
def test_a_model_without_encoders_is_a_reported_skip(required: bool) -> None:
    readiness = Readiness()
    report = warm(nn.Linear(2, 2), readiness=readiness, required=required)
    assert report.status is PrewarmStatus.SKIPPED
    assert report.reason.startswith("the model has no encoder: no module called visual")
    assert readiness.is_ready
    with pytest.raises(ConfigError, match="the prewarm was skipped"):
        report.forecast("image", (8, 8))


def test_modalities_pick() -> None:
    model = Model(video=True)
    assert [str(shape) for shape in warm(model).warmed] == [
        "image 8x8", "image 8x16", "image 32x32", "video 2x8x8", "video 2x8x16", "video 2x32x32",
    ]  # fmt: skip
    assert {shape.modality for shape in warm(model, modalities=["video"]).warmed} == {"video"}


def test_a_modality_that_the_model_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the model encodes no audio, only image: no module called audio_tower"):
        warm(Model(), modalities=["image", "audio"])
    with pytest.raises(ConfigError, match="modality 'smell'"):
        warm(Model(), modalities=["smell"])


class ImagesOnly(PlainFamily):
    modalities = ("image",)


def test_a_modality_without_inputs_is_a_reported_skip_unless_it_was_asked_for() -> None:
    report = warm(Model(video=True), family=ImagesOnly())
    assert {shape.modality for shape in report.warmed} == {"image"}
    assert report.warnings == ("video is not warmed: ImagesOnly has no inputs for it",)
    with pytest.raises(UnknownFamilyError, match=r"no warm-up inputs for video.*register_family"):
        warm(Model(video=True), family=ImagesOnly(), modalities=["video"])


@pytest.mark.parametrize("config", [{"model_type": "never heard of"}, None])
def test_an_unknown_model_is_a_reported_skip_and_an_error_when_required(config: Any) -> None:
    model = Model()
    model.config = config
    readiness = Readiness()
    report = warm(model, family=None, readiness=readiness)
    assert report.status is PrewarmStatus.SKIPPED
    assert "register_family()" in report.reason
    assert "the encoders are not warmed" in report.warnings[0]
    assert readiness.is_ready
    with pytest.raises(UnknownFamilyError, match=r"register_family\(\)"):
        warm(model, family=None, required=True, readiness=readiness)
    assert "UnknownFamilyError" in str(readiness.snapshot())


def test_an_encode_function_of_the_users_own() -> None:
    """A module that is called in a way of its own, with a config given beside it."""
    seen: list[tuple[str, dict[str, Any]]] = []
    model = Model()
    del model.config
    report = warm(
        model, config={"model_type": "mine"}, encode=lambda modality, tensors: seen.append((modality, tensors))
    )
    assert len(report.warmed) == len(seen) == 3
    assert model.sizes == []
    assert {(modality, tuple(tensors)) for modality, tensors in seen} == {("image", ("pixel_values",))}


# ---- arguments that cannot be ----------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"role": "prefil"}, ConfigError, "role is 'prefil', want one of .*; did you mean 'prefill'"),
        ({"role": ""}, ConfigError, "role is ''"),
        ({"device": "cuda"}, DeviceError, "give the index, for example 'cuda:0'"),
        ({"device": "cuda:99"}, DeviceError, "device is 'cuda:99', this machine has"),
        ({"device": "tpu"}, DeviceError, "want 'cpu' or 'cuda:N'"),
        ({"deadline_s": 0}, ConfigError, "prewarm deadline_s is 0"),
        ({"deadline_s": "1x"}, ConfigError, "prewarm deadline_s is '1x'"),
        ({"repeats": 0}, ConfigError, "prewarm repeats is 0"),
        ({"max_pixels": 0}, ConfigError, "prewarm max_pixels is 0"),
        ({"sizes": [(8, 8)]}, ConfigError, "sizes is a list, want a mapping"),
        ({"sizes": {"image": [(8,)]}}, ConfigError, r"image size \(8,\): want \(height, width\)"),
        ({"sizes": {"image": [(8, 0)]}}, ConfigError, "each 1 or more"),
        ({"sizes": {"image": ["8x8"]}}, ConfigError, "want a tuple of whole numbers"),
        ({"sizes": {"image": 8}}, ConfigError, r"sizes\['image'\] is 8, want a list of sizes"),
        ({"modalities": "image"}, ConfigError, r"modalities is 'image', want some of .* such as \('image',\)"),
        ({"modalities": 5}, ConfigError, "modalities is 5"),
        ({"family": "plain"}, ConfigError, "family is 'plain', want an object of a subclass of"),
        ({"family": PlainFamily}, ConfigError, "want an object of a subclass of"),
        ({"sizes": {"image": [[8, (8, 8)]]}}, ConfigError, "want tuples of whole numbers"),
        ({"sizes": {"audio": [(100,)]}}, ConfigError, "sizes has 'audio', which is not warmed: image"),
        ({"sizes": {"image": [Shape("video", ((1, 8, 8),))]}}, ConfigError, "sizes.'image'. has video 1x8x8"),
    ],
)
def test_bad_arguments_are_one_clear_error_and_readiness_fails(options: Any, error: Any, says: str) -> None:
    model, readiness = Model(), Readiness()
    with pytest.raises(error, match=says):
        warm(model, readiness=readiness, **options)
    assert model.sizes == []
    assert readiness.snapshot().state == "failed"
    assert error.__name__ in readiness.snapshot().reason


def test_what_is_no_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"the model is a str, want a torch\.nn\.Module"):
        warm("a path")


def test_a_forecast_of_what_cannot_be_is_an_error() -> None:
    report = warm(Model())
    with pytest.raises(ConfigError, match=r"image size 8: want \(height, width\)"):
        report.forecast("image", 8, 8)
    with pytest.raises(ConfigError, match="PlainFamily has no inputs for audio, only for image, video"):
        report.forecast("audio", (100,))


def test_a_model_elsewhere_is_an_error() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ConfigError, match="the image encoder visual has no weights yet, device is cpu"):
        warm(model)


def test_sizes_of_the_users_own_replace_the_familys() -> None:
    model = Model(video=True)
    warm(model, sizes={"image": [(4, 4), [(6, 6), (6, 6)], (4, 4)]}, modalities=["image", "video"])
    assert model.sizes[:2] == [(1, 4, 4), (2, 6, 6)], "and none twice"
    assert len(model.sizes) == 2 + 3


def test_the_plan_is_a_pure_function_of_config_and_options() -> None:
    config = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}}
    from mmcopy.prewarm.inputs import family_for

    family = family_for(config)
    plans = [plan_shapes(config, family, ["video", "image"], max_pixels=1 << 20) for _ in range(2)]
    assert plans[0] == plans[1]
    assert [shape.modality for shape in plans[0]] == sorted(shape.modality for shape in plans[0])
    assert str(plans[0][0]) == "image 1024x1024"
    assert len(plans[0]) == len(set(plans[0]))
    assert any(len(shape.items) == 2 for shape in plans[0])
    assert max(plans[0], key=lambda shape: shape.volume).modality == "video"


def test_inputs_are_noise_in_the_encoders_dtype_and_the_same_each_time() -> None:
    first, second = Model(), Model()
    warm(first, required=True)
    warm(second, required=True)
    assert len(first.visual.calls) == 3
    for one, other in zip(first.visual.calls, second.visual.calls, strict=True):
        assert one.dtype == torch.float16
        assert torch.equal(one, other)
        assert one.std() > 0.5
        assert (one != 0).any()


class UnitFamily(PlainFamily):
    def inputs(self, config: Any, shape: Shape) -> Any:
        return {"pixel_values": Noise((1, 3, *shape.items[0]), unit=True)}


def test_noise_between_0_and_1_where_a_family_wants_it() -> None:
    model = Model()
    warm(model, family=UnitFamily(), required=True)
    assert len(model.visual.calls) == 3
    assert all(0 <= call.min() < call.max() <= 1 for call in model.visual.calls)
