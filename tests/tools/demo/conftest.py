from __future__ import annotations

from typing import Any

import pytest

from mmcopy.tools.demo import checks
from mmcopy.tools.demo.expected import Recomputed, expected_tensors


@pytest.fixture
def one_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's check, which runs in this process, expects another last byte of the pixels than is sent."""

    def spoiled(*args: Any, **options: Any) -> Any:
        tensors = expected_tensors(*args, **options)
        pixels = tensors[0, "encoder_input"]
        assert pixels is not None
        elements = pixels.elements.copy()
        elements.reshape(-1)[-1] ^= 1
        return {**tensors, (0, "encoder_input"): Recomputed(pixels.dtype, elements)}

    monkeypatch.setattr(checks, "expected_tensors", spoiled)
