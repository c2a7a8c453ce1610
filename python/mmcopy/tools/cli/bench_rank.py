"""One rank of ``mmcopy bench tp``, in a process of its own.

``python -m mmcopy.tools.cli.bench_rank STORE RANK SIZE SPEC RESULT``: SPEC is a ``TpSpec`` as JSON. Rank 0 writes
RESULT;
what it says on the way goes to stdout. Exit code 0, 1 for wrong or left-over bytes, 2 when it could not run or another
rank ended, 128 + n when signal n stopped it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mmcopy.errors import MmcopyError
from mmcopy.tools.bench.load import BytesDifferError
from mmcopy.tools.bench.paths import LeftBehindError
from mmcopy.tools.bench.rank import default_group, spec_from
from mmcopy.tools.bench.tp import run_rank
from mmcopy.tools.demo.signals import Interrupted, Signals

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run this rank; its exit code."""
    code = _run(arguments)
    # What an error refers to keeps torch's groups. A thread of theirs that lets go of a tensor while the interpreter
    # ends would abort the process; so they end here.
    gc.collect()
    return code


def _run(arguments: Sequence[str]) -> int:
    store, rank, size, text, result_file = arguments
    spec = spec_from(text)

    def say(line: str) -> None:
        if rank == "0":
            print(line, flush=True)

    def fail(error: BaseException, code: int) -> int:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        return code

    try:
        with (
            Signals() as signals,
            default_group(
                spec.device, local_rank=int(rank), init_method=f"file://{store}", rank=int(rank), world_size=int(size)
            ),
        ):
            result = run_rank(spec, local_rank=int(rank), poll=signals.check, say=say)
    except Interrupted as error:
        return fail(error, 128 + error.number)
    except (BytesDifferError, LeftBehindError) as error:
        return fail(error, 1)
    except (MmcopyError, RuntimeError, MemoryError) as error:  # RuntimeError: torch's word when another rank is gone
        return fail(error, 2)
    if result is not None:
        Path(result_file).write_text(json.dumps(dataclasses.asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
