"""README's configuration page says what the code does."""

from __future__ import annotations

import pathlib
import re

import pytest

from mmcopy import TransportConfig, WorkerSpec
from mmcopy.config import OWN_NAMES, SMG_NAMES, Role, RouterConfig
from mmcopy.config.yaml_file import parse_yaml

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
PAGE = README.partition("\n## Configuration\n")[2].partition("\n## ")[0]


def test_its_file_is_read_as_it_says() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert parse_yaml(text, name="README") == RouterConfig(
        TransportConfig(mode="auto", shm_min_bytes=65536, probe_max_age_s=30),
        (
            WorkerSpec(
                "grpc://127.0.0.1:9000",
                role=Role.ENCODE,
                engine="tokenspeed",
                multimodal_shm_min_bytes=1 << 20,
                labels={"multimodal_encoder_dtype": "float16"},
            ),
        ),
    )


@pytest.mark.parametrize("name", [*OWN_NAMES, *(n for n in SMG_NAMES if "VIDEO" not in n and "AUDIO" not in n)])
def test_every_variable_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_the_table_has_the_layers_in_their_order() -> None:
    """The sources that resolve() names, from the first layer to the last, each time without the one before."""
    environ = {
        "SMG_MM_TENSOR_TRANSPORT": "shm",
        "SMG_TOKENSPEED_MM_TENSOR_TRANSPORT": "auto",
    }
    worker = WorkerSpec("w", multimodal_tensor_transport="shm")
    config = TransportConfig(mode="auto")
    sources = [config.resolve(worker, environ).mode_source, config.resolve(None, environ).mode_source]
    for _ in range(3):
        sources.append(TransportConfig().resolve(None, environ).mode_source)
        environ.pop(sources[-1], None)
    rows = [row for row in PAGE.splitlines() if re.match(r"\| [1-5] ", row)]
    words = {"worker": "the worker's override", "config": "the router's config", "default": "default"}
    found = [next(i for i, row in enumerate(rows) if words.get(source, f"`{source}`") in row) for source in sources]
    assert found == sorted(found)
    assert len(set(found)) == len(sources) == 5
