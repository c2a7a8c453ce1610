"""Ranks of a group as long-lived processes, driven from a test: see tests/rank_process.py."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from mmcopy import Inline, TensorData

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 60.0


def as_json(item: TensorData) -> dict[str, Any]:
    given: dict[str, Any] = {"dtype": item.dtype, "shape": list(item.shape)}
    payload = item.payload
    if isinstance(payload, Inline):
        return given | {"inline": bytes(payload.data).hex()}
    return given | {"handle": [payload.name, payload.offset, payload.nbytes, payload.owner_id]}


def told(tensor: Any) -> dict[str, Any]:
    """What a rank tells of a torch tensor."""
    import torch

    flat = tensor.detach().cpu().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha": hashlib.sha256(raw).hexdigest(),
        "contiguous": tensor.is_contiguous(),
    }


def wanted(array: np.ndarray[Any, Any], dtype: str) -> dict[str, Any]:
    """What a rank tells of a tensor that arrived as it should."""
    return {
        "dtype": dtype,
        "shape": list(array.shape),
        "sha": hashlib.sha256(array.tobytes()).hexdigest(),
        "contiguous": True,
    }


class Ranks:
    """``size`` processes in one gloo group. ``prefixes[rank]`` is put before a rank's command line."""

    def __init__(
        self,
        size: int,
        directory: pathlib.Path,
        *,
        prefixes: Sequence[Sequence[str]] | None = None,
        environment: Sequence[dict[str, str]] | None = None,
    ) -> None:
        self.size = size
        self._errors = [(directory / f"rank{rank}.stderr").open("w+") for rank in range(size)]
        self.processes = [
            subprocess.Popen(
                [
                    *(prefixes[rank] if prefixes else ()),
                    *(sys.executable, "-m", "tests.rigs.rank_process", str(directory / "store"), str(rank), str(size)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors[rank],
                bufsize=0,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment[rank] if environment else {})},
            )
            for rank in range(size)
        ]
        try:
            self.collect(range(size))
        except BaseException:
            self.close()
            raise

    def all(self, do: str, **command: Any) -> list[dict[str, Any]]:
        """Every rank does the same; the answers in the order of ranks."""
        return self.each([{"do": do, **command}] * self.size)

    def each(self, commands: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
        """Every rank its own command; none for None, whose answer is empty. All are sent before any is waited for."""
        busy = [rank for rank, command in enumerate(commands) if command is not None]
        for rank in busy:
            self.send(rank, commands[rank] or {})
        answers = self.collect([rank for rank in busy if (commands[rank] or {})["do"] != "die"])
        return [answers.get(rank, {}) for rank in range(self.size)]

    def send(self, rank: int, command: dict[str, Any]) -> None:
        """A command; its answer is fetched by :meth:`collect`, in the order of the commands."""
        pipe = self.processes[rank].stdin
        assert pipe is not None
        pipe.write(json.dumps(command).encode() + b"\n")

    def receive(self, items: Sequence[TensorData], *, receiver: str, **options: Any) -> list[dict[str, Any]]:
        """Every rank receives the same."""
        return self.all("receive", receiver=receiver, items=[as_json(item) for item in items], **options)

    def collect(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """One answer of each of these ranks."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + LIMIT_S
        for rank in ranks:
            pipe = self.processes[rank].stdout
            assert pipe is not None
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            line = pipe.readline() if ready else b""
            if not line:
                self._errors[rank].seek(0)
                raise AssertionError(f"rank {rank} did not answer: {self._errors[rank].read()[-4000:]}")
            answers[rank] = json.loads(line)
            assert "crash" not in answers[rank], answers[rank]
        return answers

    def close(self) -> None:
        """End the processes; those that do not end by themselves are killed."""
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process, errors in zip(self.processes, self._errors, strict=True):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
            errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
