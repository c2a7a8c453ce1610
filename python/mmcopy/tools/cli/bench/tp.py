"""``mmcopy bench tp``: started under torchrun each process is a rank; by itself it starts the ranks on this host."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmcopy.config import parse_count
from mmcopy.errors import ConfigError, MissingDependencyError

from .options import add_common, argument, effort, one_count

if TYPE_CHECKING:
    from mmcopy.tools.bench.tp import TpResult, TpSpec

__all__ = ["add_parser", "run"]

DEFAULT_SIZES = "64KiB,1MiB,16MiB,32MiB,64MiB,128MiB,256MiB,512MiB"
DESCRIPTION = (
    "Receive new segments, or leases, on a group of ranks: every rank reads (each), one rank reads and broadcasts "
    "(broadcast), every rank reads a share and the shares are gathered (scatter), beside one rank's plain receive, in "
    "turns. Prints from which size on which one is fastest, and the settings to use. Under torchrun each process is a "
    "rank; otherwise --ranks of them are started here. Exit code 1 when a rank gets wrong bytes; 2 when it could not "
    "run."
)
POLL_S = 0.05
LINGER_S = 10.0


def add_parser(which: Any) -> None:
    """Add the benchmark to those of ``mmcopy bench``."""
    from mmcopy.tools.bench import plan

    tp = which.add_parser("tp", help="the strategies of a group of ranks", description=DESCRIPTION)
    add_common(tp, device_help="cpu, or cuda: rank r takes cuda:r of its host")
    tp.add_argument(
        "--ranks", type=argument(one_count), metavar="N", help="ranks to start here. default: 2, or one a GPU"
    )
    tp.add_argument(
        "--sizes",
        type=argument(plan.parse_sizes),
        default=DEFAULT_SIZES,
        metavar="SIZE,...",
        help="default: %(default)s",
    )
    tp.add_argument(
        "--threads",
        type=argument(one_count),
        metavar="N",
        help="copy threads of each rank. default: a receiver's own",
    )
    tp.add_argument(
        "--payload",
        choices=("segment", "lease"),
        default="segment",
        help="new segments, or leases of an arena that every rank has (on one host). default: %(default)s",
    )
    tp.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """``mmcopy bench tp``. Returns 0, or 1 for wrong bytes; raises when it could not run."""
    from mmcopy.tools.bench.h2d import SHM_DIR
    from mmcopy.tools.bench.paths import free_bytes
    from mmcopy.tools.bench.plan import Case, check_space
    from mmcopy.tools.bench.tp import TpSpec

    if not args.sizes:
        raise ConfigError("nothing to measure: give at least one size with --sizes")
    if args.device not in ("cpu", "cuda"):
        raise ConfigError(f"device is {args.device!r}, want 'cpu', or 'cuda': rank r takes cuda:r")
    if args.payload == "segment":  # an arena is refused by its sender where there is no room
        check_space([Case(nbytes) for nbytes in args.sizes], free_bytes=free_bytes(SHM_DIR), shm_dir=SHM_DIR)
    spec = TpSpec(tuple(sorted(args.sizes)), args.device, args.threads, effort(args), payload=args.payload)
    found = _torch()
    if "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ:  # torchrun's own names
        return _as_a_rank(spec, args)
    gpus = found.cuda.device_count() if args.device == "cuda" else 0
    ranks = args.ranks or (gpus if args.device == "cuda" else 2)
    if args.device == "cuda" and not 0 < ranks <= gpus:
        raise ConfigError(f"{ranks} ranks need as many GPUs, torch finds {gpus}")
    return _start(spec, ranks, args)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("mmcopy bench tp needs torch: pip install 'mmcopy[torch]'") from error
    return torch


def _as_a_rank(spec: TpSpec, args: argparse.Namespace) -> int:
    from mmcopy.tools.bench.load import BytesDifferError
    from mmcopy.tools.bench.paths import LeftBehindError
    from mmcopy.tools.bench.rank import default_group
    from mmcopy.tools.bench.tp import run_rank

    started = parse_count(os.environ["WORLD_SIZE"], setting="WORLD_SIZE")
    if args.ranks not in (None, started):
        raise ConfigError(f"--ranks {args.ranks}, but torchrun has started {started}")
    local_rank = parse_count(os.environ["LOCAL_RANK"], setting="LOCAL_RANK", least=0)
    is_first = os.environ.get("RANK") == "0"

    def say(text: str) -> None:
        if is_first:
            print(text, file=sys.stderr, flush=True)

    try:
        with default_group(spec.device, local_rank=local_rank):
            result = run_rank(spec, local_rank=local_rank, say=say)
    except (BytesDifferError, LeftBehindError) as error:
        print(f"mmcopy bench: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, ValueError, MemoryError) as error:  # the first two are torch's: a rank gone, no rendezvous
        print(f"mmcopy bench: {error}", file=sys.stderr)
        return 2
    if result is not None:
        _print(result, is_json=args.json)
    return 0


def _start(spec: TpSpec, ranks: int, args: argparse.Namespace) -> int:
    """Start the ranks, and print what the first has found; all are gone when this returns."""
    from mmcopy.tools.bench.rank import result_from
    from mmcopy.tools.demo.process import ChildProcess
    from mmcopy.tools.demo.signals import Signals

    text = json.dumps(dataclasses.asdict(spec))
    with tempfile.TemporaryDirectory(prefix="mmcopy-bench-") as folder, ExitStack() as stack:
        directory = Path(folder)
        signals = stack.enter_context(Signals())
        result_file = directory / "result.json"
        command = [sys.executable, "-m", "mmcopy.tools.cli.bench_rank", str(directory / "store")]
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
        told = 0
        linger_until: float | None = None
        while any(child.running for child in children):
            signals.check()
            log = children[0].log()
            sys.stderr.write(log[told:])
            sys.stderr.flush()
            told = len(log)
            # One rank's failure is soon that of all; one that hangs all the same is ended with this block.
            if linger_until is None and any(child.returncode for child in children):
                linger_until = time.monotonic() + LINGER_S
            if linger_until is not None and time.monotonic() > linger_until:
                break
            time.sleep(POLL_S)
        sys.stderr.write(children[0].log()[told:])
        codes = [child.returncode for child in children]
        if any(codes):
            for child in children[1:]:
                sys.stderr.write(child.log())
            return 1 if 1 in codes else 2
        result = result_from(result_file.read_text())
    _print(result, is_json=args.json)
    return 0


def _print(result: TpResult, *, is_json: bool) -> None:
    from mmcopy.tools.bench.table import print_table
    from mmcopy.tools.bench.tp import tp_notes, tp_table

    out = sys.stderr if is_json else sys.stdout
    print(result.header, end="\n\n", file=out)
    print_table(tp_table(result), out)
    print(f"\n{tp_notes(result)}", file=out)
    if is_json:
        print(json.dumps(result.as_record()))
