"""Bytes and seconds as people read them."""

from __future__ import annotations

import pytest

from mmcopy.tools.units import GIB, MIB, bytes_text, time_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.456e-6, "3.46 us"),
        (45.6e-6, "45.6 us"),
        (0.456e-3, "456 us"),
        (0.0123, "12.3 ms"),
        (1.5, "1.50 s"),
        (2e3, "2000 s"),
    ],
)
def test_times_keep_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (24, "24 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (64 << 10, "64 KiB"),
        (8 * MIB, "8 MiB"),
        (int(23.5 * GIB), "23.5 GiB"),
        (1536, "1.5 KiB"),
        (145_539_072, "138.8 MiB"),
        (3 << 40, "3 TiB"),
    ],
)
def test_bytes_in_words(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text
