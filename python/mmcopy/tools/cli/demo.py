"""``mmcopy demo``: a real gateway, or mmcopy's own, real workers, every tensor checked.

Light to import: what the command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmcopy.config import parse_count, parse_size
from mmcopy.config.arguments import argument_type
from mmcopy.errors import ConfigError

if TYPE_CHECKING:
    from mmcopy.tools.demo.families import Family
    from mmcopy.tools.demo.pictures import Attachments

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the command to an ``argparse`` sub-parser collection."""
    from mmcopy.tools.demo.families import FAMILIES, RECOMPUTED

    parser = subparsers.add_parser(
        "demo",
        help="send pictures through a real SMG gateway to workers on this machine and check every tensor",
        description=(
            "Start workers and a real SMG gateway (or mmcopy's own) on 127.0.0.1, send chat requests with pictures, "
            "check every tensor that the workers received, and list what is left in shared memory. Tensors of "
            f"{RECOMPUTED} are compared with an independent computation, those of other families with a checksum of "
            "what the gateway wrote. Exit code 1 for a mismatch, a failed request or a leftover; 2 when it could "
            "not run."
        ),
    )
    what = parser.add_argument_group("what runs")
    what.add_argument(
        "--gateway",
        choices=("smg", "mmcopy"),
        default="smg",
        help="the real SMG gateway, or a Python process that preprocesses with numpy and sends through mmcopy's arena "
        f"(one worker, {RECOMPUTED}, pictures that need no resize). default: %(default)s",
    )
    what.add_argument("--engine", choices=("tokenspeed", "vllm"), default="tokenspeed", help="default: %(default)s")
    what.add_argument(
        "--topology",
        choices=("regular", "pd", "epd"),
        default="regular",
        help="one worker; prefill and decode; encode, prefill and decode (tokenspeed only). default: %(default)s",
    )
    what.add_argument(
        "--family",
        choices=sorted(FAMILIES),
        default=RECOMPUTED,
        metavar="NAME",
        help=f"model family, as the gateway preprocesses it: {', '.join(sorted(FAMILIES))}. default: %(default)s",
    )
    what.add_argument("--device", default="cpu", help="cpu or cuda:N, where the tensors go. default: %(default)s")
    what.add_argument(
        "--encoder-dtype",
        choices=("bfloat16", "float16", "float32", "uint8"),
        default="bfloat16",
        help="what the worker asks pixels to be (uint8: raw, vllm only). default: %(default)s",
    )
    sent = parser.add_argument_group("what is sent")
    sent.add_argument(
        "--image", nargs="+", type=Path, default=[], metavar="FILE", help="PNG or JPEG files, instead of generated ones"
    )
    sent.add_argument("--video", nargs="+", type=Path, default=[], metavar="FILE", help="video files; needs ffmpeg")
    count = argument_type(parse_count)
    sent.add_argument("--requests", type=count, metavar="N", help="chat requests. default: each set of pictures once")
    sent.add_argument("--concurrency", type=count, default=2, metavar="N", help="at a time. default: %(default)s")
    how = parser.add_argument_group("how tensors travel")
    how.add_argument("--transport", choices=("inline", "shm", "auto"), help="default: shm, with --gateway mmcopy auto")
    how.add_argument(
        "--shm-namespace",
        choices=("own", "foreign", "none"),
        default="own",
        help="what the workers advertise as their shared memory, for --transport auto: the truth, that of another "
        "host, or nothing. default: %(default)s",
    )
    how.add_argument(
        "--shm-min-bytes",
        type=argument_type(parse_size),
        metavar="SIZE",
        help="smaller tensors go inline (65536, 64KiB). default: the gateway's, 65536",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON line on stdout at the end; the table goes to stderr"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the demo. Returns 0, or 1 when something was wrong with what arrived; raises when it could not run."""
    from mmcopy.tools.demo.families import FAMILIES
    from mmcopy.tools.demo.gateway import find_smg
    from mmcopy.tools.demo.job import Job, default_framework, run_job
    from mmcopy.tools.demo.report import console_for, json_line, print_report
    from mmcopy.tools.signals import Signals

    console = console_for(sys.stderr if args.json else sys.stdout)
    progress = console_for(sys.stderr)
    is_own = args.gateway == "mmcopy"
    if not is_own:
        find_smg()
    family = FAMILIES[args.family]
    attachments = (decoded_attachments if is_own else attachments_for)(family, args.image, args.video)
    job = Job(
        family=family,
        attachments=attachments,
        gateway=args.gateway,
        engine=args.engine,
        topology=args.topology,
        transport=args.transport or ("auto" if is_own else "shm"),
        shm_min_bytes=args.shm_min_bytes,
        device=args.device,
        framework=default_framework(args.device),
        encoder_dtype=args.encoder_dtype,
        shm_namespace=args.shm_namespace,
        requests=args.requests or len(attachments),
        concurrency=args.concurrency,
    )
    with Signals() as signals:
        if progress.is_terminal:
            with progress.status("preparing") as status:
                outcome = run_job(job, poll=signals.check, say=status.update)
        else:
            outcome = run_job(job, poll=signals.check)
        signals.check()
    print_report(console, job, outcome)
    if args.json:
        print(json_line(outcome))
    return 0 if outcome.good else 1


def attachments_for(family: Family, images: list[Path], videos: list[Path]) -> list[Attachments]:
    """What the requests carry. Raises :class:`ConfigError` for a file that can't be sent, or videos without ffmpeg."""
    from mmcopy.tools.demo.pictures import attachments_of_files, generated_attachments

    if videos and family.video_text is None:
        raise ConfigError(f"the family {family.name} takes no video")
    if videos and shutil.which("ffmpeg") is None:
        raise ConfigError("--video needs ffmpeg on PATH: the gateway decodes videos with it")
    if images or videos:
        return attachments_of_files(images, videos, images_max=family.max_images)
    return generated_attachments()


def decoded_attachments(family: Family, images: list[Path], videos: list[Path]) -> list[Attachments]:
    """As :func:`attachments_for`, for mmcopy's own gateway: with the pixels of every picture."""
    from mmcopy.tools.demo.pictures import decoded

    return [decoded(attached) for attached in attachments_for(family, images, videos)]
