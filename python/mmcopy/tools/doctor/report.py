"""All checks together, as text or JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from . import arena, gpu, leftovers, machine, probe, shm, versions
from .line import Line, Status

__all__ = ["as_json", "as_text", "examine", "exit_code"]


def examine(*, shm_dir: str = "/dev/shm", start_cuda: bool = False, workers: Sequence[str] = ()) -> tuple[Line, ...]:
    """Look at this machine. Takes a few seconds: torch, where it is installed, is imported in another process.

    Writes one small file into ``shm_dir`` and removes it. ``start_cuda`` creates a CUDA context, in another
    process. ``workers``: the URLs of workers to ask what they share with this process. Never raises.
    """
    gpus = gpu.GpusFound(())

    def gpu_lines() -> Iterator[Line]:
        nonlocal gpus
        gpus = gpu.find_gpus()
        yield from gpu.lines(gpus, start_cuda=start_cuda)

    # Whether there is a GPU decides how limits are judged, so it is looked for first; its lines come last.
    about_gpus = _guarded("GPUs", gpu_lines)
    return (
        *_guarded("versions", versions.lines),
        *_guarded("shared memory", lambda: shm.lines(shm_dir, has_gpu=bool(gpus.gpus))),
        *_guarded("probe", lambda: probe.lines(shm_dir, workers)),
        *_guarded("arena", lambda: arena.lines(has_gpu=bool(gpus.gpus))),
        *_guarded("leftovers", lambda: leftovers.lines(shm_dir)),
        *_guarded("machine", lambda: machine.lines(has_gpu=bool(gpus.gpus), shm_dir=shm_dir)),
        *about_gpus,
    )


def _guarded(name: str, check: Callable[[], Iterable[Line]]) -> list[Line]:
    lines: list[Line] = []
    try:
        for line in check():
            lines.append(line)  # one by one, to keep those before a failure
    except Exception as error:  # never a traceback
        found = f"this check failed: {type(error).__name__}: {error}"
        lines.append(Line(name, Status.PROBLEM, found, "report this line as a bug of mmcopy"))
    return lines


def counts(lines: Iterable[Line]) -> dict[str, int]:
    """How many lines are good, warnings and problems."""
    result = {status.value: 0 for status in Status}
    for line in lines:
        result[line.status.value] += 1
    return result


def exit_code(lines: Iterable[Line]) -> int:
    """1 when any line is a problem, else 0."""
    return 1 if any(line.status is Status.PROBLEM for line in lines) else 0


def as_json(lines: Sequence[Line]) -> str:
    """The report as one object: ``lines``, each with name, status, found and advice, and ``summary``, their counts."""
    records = [
        {"name": line.name, "status": line.status.value, "found": line.found, "advice": line.advice} for line in lines
    ]
    return json.dumps({"lines": records, "summary": counts(lines)}, indent=2)


def summary(lines: Iterable[Line]) -> str:
    """``"20 good, 1 warning, 0 problems"``"""
    number = counts(lines)
    plural = {name: "" if n == 1 else "s" for name, n in number.items()}
    return (
        f"{number['good']} good, {number['warning']} warning{plural['warning']}, "
        f"{number['problem']} problem{plural['problem']}"
    )


def as_text(lines: Sequence[Line], *, width: int = 110) -> str:
    """The report for a terminal without colours, with each advice under its line."""
    name_width = max((len(line.name) for line in lines), default=0)
    indent = " " * (8 + 1 + name_width + 2)
    text = []
    for line in lines:
        head = f"{line.status.value:<8} {line.name:<{name_width}}  "
        text += textwrap.wrap(head + line.found, width, subsequent_indent=indent, drop_whitespace=True)
        if line.advice:
            text += textwrap.wrap(line.advice, width, initial_indent=indent + "-> ", subsequent_indent=indent + "   ")
    return "\n".join([*text, "", summary(lines)])
