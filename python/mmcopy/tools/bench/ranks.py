"""The ranks of ``mmcopy bench tp`` as processes: started on this host, or by torchrun.

``python -m mmcopy.tools.bench.ranks STORE RANK SIZE SPEC RESULT`` is one rank; SPEC is a ``TpSpec`` as JSON. Rank 0
writes RESULT, and its progress to stdout. Exit code 0, 1 for wrong or left-over bytes, 2 when it could not run or
another rank ended, 128 + n when signal n stopped it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mmcopy.config import parse_count
from mmcopy.errors import ConfigError, MmcopyError
from mmcopy.tools.process import ChildProcess
from mmcopy.tools.signals import Interrupted, Signals

from .breakeven import BreakEven
from .load import BytesDifferError
from .paths import LeftBehindError
from .plan import Effort
from .tp import TpResult, TpRow, TpSpec, run_rank

__all__ = ["RanksFailedError", "run_as_rank", "start_ranks", "started_by_torchrun"]

POLL_S = 0.05
LINGER_S = 10.0


class RanksFailedError(MmcopyError):
    """Ranks ended with an error, which they have printed; ``code`` is the exit code of the benchmark."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the benchmark ended with {code}")
        self.code = code


def started_by_torchrun() -> bool:
    """Whether this process is a rank of a launcher's."""
    return "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ


def run_as_rank(spec: TpSpec, *, ranks: int | None) -> TpResult | None:
    """This process's part as a rank that torchrun has started; the result on rank 0, None on the others. Blocks.

    Raises :class:`ConfigError` where torchrun has not started ``ranks`` ranks, and :class:`RanksFailedError`.
    """
    started = parse_count(os.environ["WORLD_SIZE"], setting="WORLD_SIZE")
    if ranks not in (None, started):
        raise ConfigError(f"--ranks {ranks}, but torchrun has started {started}")
    local_rank = parse_count(os.environ["LOCAL_RANK"], setting="LOCAL_RANK", least=0)
    is_first = os.environ.get("RANK") == "0"

    def say(text: str) -> None:
        if is_first:
            print(text, file=sys.stderr, flush=True)

    def run() -> TpResult | None:
        with _default_group(spec.device, local_rank=local_rank):
            return run_rank(spec, local_rank=local_rank, say=say)

    code, result = _exit_code_of(run, name="mmcopy bench")
    if code:
        raise RanksFailedError(code)
    return result


def start_ranks(spec: TpSpec, ranks: int) -> TpResult:
    """Start ``ranks`` processes on this host and return what the first has found. Blocks; all are gone afterwards.

    Raises :class:`RanksFailedError` after printing what they said.
    """
    text = json.dumps(dataclasses.asdict(spec))
    with tempfile.TemporaryDirectory(prefix="mmcopy-bench-") as folder, ExitStack() as stack:
        directory = Path(folder)
        signals = stack.enter_context(Signals())
        result_file = directory / "result.json"
        command = [sys.executable, "-m", __name__, str(directory / "store")]
        children = [
            stack.enter_context(
                ChildProcess(
                    [*command, str(rank), str(ranks), text, str(result_file)],
                    log_path=directory / f"rank{rank}.log",
                    watched=True,
                )
            )
            for rank in range(ranks)
        ]
        printed = 0
        linger_until: float | None = None
        while any(child.running for child in children):
            signals.check()
            log = children[0].log()
            sys.stderr.write(log[printed:])
            sys.stderr.flush()
            printed = len(log)
            # One rank's failure soon becomes that of all; a rank that hangs all the same ends with this block.
            if linger_until is None and any(child.returncode for child in children):
                linger_until = time.monotonic() + LINGER_S
            if linger_until is not None and time.monotonic() > linger_until:
                break
            time.sleep(POLL_S)
        sys.stderr.write(children[0].log()[printed:])
        codes = [child.returncode for child in children]
        if any(codes):
            for child in children[1:]:
                sys.stderr.write(child.log())
            raise RanksFailedError(1 if 1 in codes else 2)
        return _result_from(result_file.read_text())


def main(arguments: Sequence[str]) -> int:
    """Run one rank; its exit code."""
    store, rank, size, text, result_file = arguments
    spec = _spec_from(text)

    def say(line: str) -> None:
        if rank == "0":
            print(line, flush=True)

    def run() -> TpResult | None:
        group = {"init_method": f"file://{store}", "rank": int(rank), "world_size": int(size)}
        with Signals() as signals, _default_group(spec.device, local_rank=int(rank), **group):
            return run_rank(spec, local_rank=int(rank), poll=signals.check, say=say)

    code, result = _exit_code_of(run, name=f"rank {rank}")
    if result is not None:
        Path(result_file).write_text(json.dumps(dataclasses.asdict(result)))
    # An error's traceback keeps torch's groups alive. A thread of theirs that frees a tensor while the interpreter ends
    # would abort the process, so they end here.
    gc.collect()
    return code


def _exit_code_of(run: Callable[[], TpResult | None], *, name: str) -> tuple[int, TpResult | None]:
    """The exit code and the result of a rank; an error is printed behind ``name``."""
    try:
        return 0, run()
    except Interrupted as error:
        code, said = 128 + error.number, str(error)
    except (BytesDifferError, LeftBehindError) as error:
        code, said = 1, str(error)
    # RuntimeError and ValueError are torch's: another rank is gone, or there is no rendezvous.
    except (MmcopyError, RuntimeError, ValueError, MemoryError) as error:
        code, said = 2, str(error)
    print(f"{name}: {said}", file=sys.stderr, flush=True)
    return code, None


@contextmanager
def _default_group(device: str, *, local_rank: int, **options: Any) -> Iterator[None]:
    """torch.distributed's default group, with gloo for host memory and, for ``cuda``, NCCL for that rank's GPU."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _spec_from(text: str) -> TpSpec:
    given = json.loads(text)
    return TpSpec(**{**given, "sizes": tuple(given["sizes"]), "effort": Effort(**given["effort"])})


def _result_from(text: str) -> TpResult:
    given = json.loads(text)
    rows = tuple(TpRow(**row) for row in given["rows"])
    return TpResult(given["header"], given["ranks"], rows, BreakEven(**given["break_even"]), given["payload"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
