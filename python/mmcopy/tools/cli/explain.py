"""``mmcopy explain``: which way tensors go to each worker, and where each value came from.

Light to import: what the command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmcopy.config import RouterConfig

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the command to an ``argparse`` sub-parser collection."""
    from mmcopy.config import add_transport_args

    parser = subparsers.add_parser(
        "explain",
        help="say which way tensors go to each worker, and where each setting came from",
        description=(
            "For each worker: mode, threshold, dtype and the way of 1 KiB, 64 KiB and 64 MiB, and where each value "
            "came from: the worker's own override, the router's config (these options, or the file), SMG's environment "
            "variables, or the default. Workers are asked for their labels, and mmcopy workers are probed: whether "
            "they read segments made here, and take an arena. Run it where the gateway runs, as the gateway's user. "
            "Exit code 1 when a worker does not answer; 2 for a bad setting."
        ),
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the router's YAML file. default: that of MMCOPY_CONFIG, if set"
    )
    parser.add_argument(
        "--worker",
        nargs="+",
        default=[],
        metavar="[ROLE=]URL",
        help="more workers, grpc://host:port; ROLE is aggregated (the default), encode, prefill or decode",
    )
    add_transport_args(parser)
    parser.add_argument(
        "--shm-dir", default="/dev/shm", metavar="DIR", help="the shared-memory folder. default: %(default)s"
    )
    parser.add_argument("--timeout", default="5", metavar="S", help="how long a worker may take. default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the explanation. Returns 1 when a worker did not answer; raises for bad settings."""
    from mmcopy.config import parse_seconds
    from mmcopy.tools.explain import as_json, as_text, explain

    timeout_s = parse_seconds(args.timeout, setting="--timeout")
    explanation = explain(router_of(args), shm_dir=args.shm_dir, timeout_s=timeout_s)
    print(as_json(explanation) if args.json else as_text(explanation))
    return 0 if explanation.all_answered else 1


def router_of(args: argparse.Namespace) -> RouterConfig:
    """The file's settings under those of the command line, and the workers of both."""
    from mmcopy.config import RouterConfig, WorkerSpec, load_config, transport_from_args

    file = load_config(args.config)
    workers = []
    for text in args.worker:
        role, equals, url = text.partition("=")
        workers.append(WorkerSpec(url, role=role) if equals else WorkerSpec(text))
    return RouterConfig(transport_from_args(args).over(file.transport), (*file.workers, *workers))
