"""Fixtures of the tests with the real gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mmcopy.tools.demo.model_dir import write_model_dir
from tests.rigs.gateway_stack import Leg, Stack

StackMaker = Callable[..., Stack]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir("qwen3_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(tmp_path: Path, model_dir: Path) -> Iterator[StackMaker]:
    """Starts a stack: ``start(Leg(...), ..., transport="shm")``; it is stopped, and checked, after the test."""
    with ExitStack() as running:

        def start(*legs: Leg, **options: Any) -> Stack:
            directory = tmp_path / f"stack{len(list(tmp_path.iterdir()))}"
            directory.mkdir()
            return running.enter_context(Stack(directory, model_dir, legs or [Leg()], **options))

        yield start
