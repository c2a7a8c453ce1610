"""Checks what the workers reported: which tensors arrived, and whether their bytes are right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .expected import Recomputed, expected_tensors
from .families import Family
from .pictures import Attachments

__all__ = ["Checker", "Expect", "Row", "Sent", "is_primary", "linked"]

Expect = Callable[..., Mapping[tuple[int, str], Recomputed | None]]
"""Recomputes the tensors of one request: called as :func:`expected_tensors` is."""

PRIMARY_NAMES = ("encoder_input", "pixel_values")


@dataclass(frozen=True)
class Sent:
    """A request that was sent. ``id`` is the one in the answer, empty when it failed, and ``error`` then says why."""

    number: int
    attached: Attachments
    id: str
    error: str = ""


@dataclass(frozen=True)
class Row:
    """One tensor that arrived at a worker. ``error`` is empty when the check passed."""

    request: int
    role: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    nbytes: int
    seconds: float
    check: str
    error: str = ""


@dataclass(frozen=True)
class Linked:
    """A worker's report and the request it belongs to; ``first_item`` is the place of its first item there."""

    sent: Sent
    report: Mapping[str, Any]
    first_item: int


def linked(sent: Iterable[Sent], reports: Sequence[Mapping[str, Any]]) -> list[Linked]:
    """Reports with their requests, in the order of requests. Reports of no request (a retry's, say) are left out.

    Generate carries the request's id. Encode has an id of its own: its room is one of those in prefill's request.
    """
    by_id = {each.id: each for each in sent if each.id}
    found, rooms = [], {}
    for report in reports:
        each = by_id.get(report["request_id"])
        if each is not None and report["rpc"] == "generate":
            found.append(Linked(each, report, 0))
            rooms.update({room: (each, index) for index, room in report["encode_rooms"]})
    for report in reports:
        for room in report["own_rooms"][:1]:
            if room in rooms:
                each, index = rooms[room]
                found.append(Linked(each, report, index))
    return sorted(
        found, key=lambda link: (link.sent.number, link.report["rpc"], link.report["role"] == "decode", link.first_item)
    )


def is_primary(name: str) -> bool:
    """Whether this is the encoder's input and not a side tensor."""
    return name in PRIMARY_NAMES


class Checker:
    """Compares digests. Those expected of the same attachments are computed once, however often they are sent."""

    def __init__(
        self,
        family: Family,
        *,
        engine: str,
        dtype: str,
        device: str,
        expect: Expect | None = None,
    ) -> None:
        self._family = family
        self._engine = engine
        self._dtype = dtype
        self._device = device
        self._expect = expect or expected_tensors
        self._known: dict[int, dict[tuple[int, str], tuple[str, tuple[int, ...], str]]] = {}

    def rows(self, link: Linked) -> list[Row]:
        """A row for each tensor of a report."""
        rows = []
        prefix = "input" if self._engine == "vllm" else "item"
        expected = self._expected(link.sent.attached)
        for at, item in enumerate(link.report["items"], link.first_item):
            for tensor in item["tensors"]:
                check, error = _judge(tensor, expected.get((at, tensor["name"])), self._device)
                rows.append(
                    Row(
                        request=link.sent.number,
                        role=str(link.report["role"]),
                        tensor=f"{prefix}{at}.{tensor['name']}",
                        dtype=str(tensor["dtype"]),
                        shape=tuple(tensor["shape"]),
                        path=str(tensor["path"]),
                        nbytes=int(tensor["nbytes"]),
                        seconds=float(tensor["seconds"]),
                        check=check,
                        error=error,
                    )
                )
        return sorted(rows, key=lambda row: (row.tensor.split(".")[0], not is_primary(row.tensor.split(".")[1])))

    def _expected(self, attached: Attachments) -> dict[tuple[int, str], tuple[str, tuple[int, ...], str]]:
        known = self._known.get(id(attached))
        if known is None:
            pictures = [(picture.pixels, picture.width, picture.height) for picture in attached.pictures]
            tensors = self._expect(self._family, pictures, engine=self._engine, dtype=self._dtype)
            known = {
                key: (tensor.dtype, tensor.shape, _digest(tensor))
                for key, tensor in tensors.items()
                if tensor is not None
            }
            self._known[id(attached)] = known
        return known


def _digest(tensor: Recomputed) -> str:
    return hashlib.sha256(np.ascontiguousarray(tensor.elements).reshape(-1).view(np.uint8).data).hexdigest()


def _judge(
    tensor: Mapping[str, Any], expected: tuple[str, tuple[int, ...], str] | None, device: str
) -> tuple[str, str]:
    """(kind of check, error or ""). The payload as read with plain system calls must agree in either kind; a lease has
    no such digest."""
    check = "checksum" if expected is None else "numpy"
    is_lease = tensor["path"] == "lease"
    if tensor["device"] != device:
        return check, f"it is on {tensor['device']}, want {device}"
    if tensor["plain_error"] is not None:
        return check, f"the payload could not be read plainly: {tensor['plain_error']}"
    if is_lease and expected is None:
        return check, "it came by lease, and there is nothing to compare it with"
    if not is_lease and tensor["plain_sha256"] != tensor["device_sha256"]:
        return check, "the bytes on the device are not those of the payload"
    if expected is None:
        return check, ""
    dtype, shape, digest = expected
    if (tensor["dtype"], tuple(tensor["shape"])) != (dtype, shape):
        return check, f"want {dtype} {list(shape)}"
    if tensor["device_sha256"] != digest:
        return check, "the bytes are not those that numpy computes"
    return check, ""
