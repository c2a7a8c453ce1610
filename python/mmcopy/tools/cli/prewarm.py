"""``mmcopy prewarm``: what a model's first pictures cost on this machine, cold and after a prewarm.

Light to import: what the command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mmcopy.config import MODALITIES, parse_count, parse_seconds
from mmcopy.config.arguments import argument_type
from mmcopy.errors import ConfigError, MmcopyError

__all__ = ["add_parser", "run"]

CHILD_LIMIT_S = 900.0
"""How long one measuring process may take beyond the prewarm's deadline: building, compiling, steady state."""

POLL_S = 0.2
"""How often signals are checked."""

count = argument_type(parse_count)


def add_parser(subparsers: Any) -> None:
    """Add the command to an ``argparse`` sub-parser collection."""
    parser = subparsers.add_parser(
        "prewarm",
        help="measure a model's first encodes on this machine, cold and after a prewarm",
        description=(
            "Build the encoders of a model from its config (random weights when the folder has none). Measure their "
            "first encode in a fresh process, a prewarm in another one, and the first encodes after that, beside the "
            "steady state. Exit code 1 when the prewarm was not complete; 2 when it could not run."
        ),
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--model", required=True, metavar="DIR_OR_CONFIG", help="a model's folder, or its config.json")
    what.add_argument("--device", default="cpu", help="cpu or cuda:N. default: %(default)s")
    what.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default: %(default)s"
    )
    what.add_argument("--attention", metavar="NAME", help="sdpa, eager, flash_attention_2 ... default: the model's")
    what.add_argument(
        "--no-cudnn-attention",
        dest="cudnn_attention",
        action="store_false",
        help="keep torch's sdpa from cuDNN's attention, which makes a plan for every size that is new to a thread",
    )
    what.add_argument(
        "--compile",
        nargs="?",
        choices=("tower", "blocks"),
        const="tower",
        help="torch.compile the whole tower, or each of its blocks. default: eager",
    )
    what.add_argument(
        "--recompile-limit",
        type=count,
        metavar="N",
        help="compilations after which torch gives up. default: torch's, 8",
    )
    what.add_argument("--backend", default="inductor", help="torch.compile's. default: %(default)s")
    what.add_argument(
        "--role", default="aggregated", help="aggregated, prefill, encode or decode. default: %(default)s"
    )
    sizes = parser.add_argument_group("sizes (HxW, FRAMESxHxW or FRAMES; + joins several that are encoded at once)")
    for modality, form in (("image", "HxW"), ("video", "FxHxW"), ("audio", "F")):
        sizes.add_argument(
            f"--{modality}",
            nargs="+",
            default=[],
            metavar=form,
            help=f"{modality} sizes to warm. default: the family's",
        )
        sizes.add_argument(
            f"--check-{modality}", nargs="+", default=[], metavar=form, help="sizes to encode afterwards, not warmed"
        )
    sizes.add_argument("--modalities", nargs="+", metavar="NAME", help="image, video, audio. default: all it has")
    sizes.add_argument("--max-pixels", type=count, metavar="N", help="the preprocessor's limit for one picture")
    parser.add_argument(
        "--deadline-s",
        type=argument_type(parse_seconds),
        default=300.0,
        metavar="S",
        help="of the prewarm. default: %(default)s",
    )
    parser.add_argument(
        "--rounds", type=count, default=10, metavar="N", help="steady encodes per shape. default: %(default)s"
    )
    parser.add_argument("--no-cold", action="store_true", help="leave out the cold process")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write prewarm.json and prewarm.md there")
    parser.add_argument(
        "--json", action="store_true", help="one JSON line on stdout at the end; the table goes to stderr"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0, or 1 for a prewarm that was not complete; raises when it could not run."""
    from mmcopy.prewarm.build import read_config
    from mmcopy.prewarm.plan import encodes, parse_role
    from mmcopy.prewarm.target import parse_device
    from mmcopy.tools.bench.encoder import Spec
    from mmcopy.tools.bench.encoder_table import as_markdown, encoder_table, notes
    from mmcopy.tools.bench.table import print_table

    out = sys.stderr if args.json else sys.stdout
    parse_device(args.device)
    if not encodes(parse_role(args.role)):
        print(f"prewarm of {args.role}: skipped, a {args.role} worker encodes nothing", file=out)
        return 0
    read_config(args.model)
    spec = Spec(
        model=str(Path(args.model).absolute()),
        device=args.device,
        dtype=args.dtype,
        attention=args.attention,
        cudnn_attention=args.cudnn_attention,
        compile=args.compile or "none",
        backend=args.backend,
        recompile_limit=args.recompile_limit,
        role=args.role,
        sizes={name: parse(name, getattr(args, name)) for name in MODALITIES if getattr(args, name)},
        checks={
            name: parse(name, getattr(args, f"check_{name}")) for name in MODALITIES if getattr(args, f"check_{name}")
        },
        modalities=args.modalities,
        max_pixels=args.max_pixels,
        deadline_s=args.deadline_s,
        rounds=args.rounds,
    )
    cold = None if args.no_cold else _in_a_process("cold", spec)
    warm = _in_a_process("warm", spec)
    for note in notes(warm):
        print(note, file=out)
    print(file=out)
    print_table(encoder_table(warm, cold), out)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "prewarm.json").write_text(json.dumps({"cold": cold, "warm": warm}, indent=1) + "\n")
        (args.out / "prewarm.md").write_text(as_markdown(warm, cold))
    if args.json:
        print(json.dumps({"cold": cold, "warm": warm}))
    return 0 if warm["report"]["status"] == "warm" else 1


def parse(modality: str, texts: list[str]) -> list[list[list[int]]]:
    """``["1024x1024", "512x512+512x768"]`` as the sizes of one encode each. Raises :class:`ConfigError`."""
    from mmcopy.prewarm.inputs import Shape

    entries = []
    for text in texts:
        try:
            items = [[int(side) for side in item.split("x")] for item in text.split("+")]
        except ValueError:
            raise ConfigError(f"--{modality} {text!r}: want sizes such as 1024x1024, or 512x512+512x768") from None
        Shape(modality, tuple(map(tuple, items)))
        entries.append(items)
    return entries


def _in_a_process(kind: str, spec: Any) -> dict[str, Any]:
    """What the measuring process prints; its own errors become one of ours."""
    import dataclasses

    with tempfile.TemporaryDirectory(prefix="mmcopy-prewarm-") as cache:
        # Compiled code of an earlier run must not make this one look warm.
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "mmcopy.tools.bench.encoder", kind, json.dumps(dataclasses.asdict(spec))]
        code, text = _output(kind, command, environment, limit_s=spec.deadline_s + CHILD_LIMIT_S)
    if code != 0:
        raise MmcopyError(f"the {kind} measurement ended with code {code}; its messages are above")
    result: dict[str, Any] = json.loads(text.splitlines()[-1])
    return result


def _output(kind: str, command: list[str], environment: dict[str, str], *, limit_s: float) -> tuple[int, str]:
    """Exit code and stdout of a command, which is gone when this ends, by a signal that asks us to stop too."""
    from mmcopy.tools.signals import Signals

    until = time.monotonic() + limit_s
    with Signals() as signals, subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            while True:
                signals.check()
                try:
                    text, _ = child.communicate(timeout=POLL_S)
                    return child.returncode, text
                except subprocess.TimeoutExpired:
                    if time.monotonic() > until:
                        raise MmcopyError(f"the {kind} measurement did not end within {limit_s:g} s") from None
        finally:
            child.kill()
