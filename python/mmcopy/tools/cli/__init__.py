"""The command ``mmcopy``: one file per command, each with ``add_parser(subparsers)`` and ``run(args) -> int``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from mmcopy import __version__
from mmcopy.config import read_own_variables
from mmcopy.errors import MmcopyError

__all__ = ["main"]

COMMANDS = ("demo", "doctor", "explain", "bench", "prewarm")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code: 0 good, 1 a bad result, 2 a bad call, 128 + n when stopped by signal n."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="mmcopy", description="Moves preprocessed tensors onto a worker's GPU.")
    parser.add_argument("--version", action="version", version=f"mmcopy {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # Only the chosen command's module is imported; without a choice (--help, a typo) all of them are described.
    chosen = [name for name in arguments[:1] if name in COMMANDS]
    for name in chosen or COMMANDS:
        importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
    args = parser.parse_args(arguments)
    try:
        read_own_variables(os.environ)  # a misspelt one is an error whichever command runs
        code = int(args.run(args))
        sys.stdout.flush()
    except MmcopyError as error:
        print(f"mmcopy {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"mmcopy {args.command}: {str(error) or 'stopped'}", file=sys.stderr)
        return 128 + getattr(error, "number", 2)
    except BrokenPipeError:
        # The reader of our output has closed it; the interpreter must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
