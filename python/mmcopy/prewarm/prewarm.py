"""The one function of this package: have the encoders warm before the worker says ready."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmcopy.config import LONGEST_S
from mmcopy.errors import MmcopyError, MmcopyTimeoutError, PrewarmError, UnknownFamilyError
from mmcopy.receive.receiver import Receiver

from .attention import attention_of, takes_cudnn
from .compiles import count_graphs, is_compiled, limit_was_hit
from .memory import Meter
from .options import PrewarmOptions
from .plan import Role, encodes, parse_role, plan_shapes
from .progress import following
from .ranks import Ranks
from .readiness import Readiness
from .report import Outcome, PrewarmReport, PrewarmStatus, ShapeReport
from .run import Job, run_job
from .target import NothingToWarm, Target, choose_target, parse_device
from .transport import warm_collectives, warm_receiver

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["prewarm"]

_log = logging.getLogger("mmcopy.prewarm")


def prewarm(
    model: nn.Module,
    *,
    role: Role | str,
    device: Any,
    options: PrewarmOptions | None = None,
    receiver: Receiver | None = None,
    group: Any = None,
    device_group: Any = None,
    readiness: Readiness | None = None,
    before_ready: Callable[[PrewarmReport], object] | None = None,
) -> PrewarmReport:
    """Run every encoder of ``model`` on a set of shapes, so that the first user does not wait for it.

    Real encodes, of random pixels, in inference mode, of ordinary tensors such as those that a receiver makes outside
    of it (serve in that way too: torch.compile compiles again for another mode, and for tensors made in inference
    mode), each waited for: kernels are loaded and chosen, a compiled encoder is compiled, memory is allocated. The
    shapes are those of the model's family: a typical one, a second size, so that a compiler makes sizes dynamic,
    several pictures at once, a short video, the smallest, and the largest that the memory left has room for, which is
    estimated from the others and halved when it was not enough.

    Args:
        model: Any ``torch.nn.Module`` with encoders, on ``device``; see :func:`mmcopy.encoder_dtypes`.
        role: Aggregated, prefill and encode workers are warmed; a decode worker is not, and the report says so.
        device: ``"cpu"`` or ``"cuda:N"``.
        options: Shapes, limits and hooks; None: the defaults of :class:`PrewarmOptions`.
        receiver: Is warmed too, by small tensors from segments and messages (they count in its metrics).
        group: A gloo group of the tensor-parallel ranks. All of them call; they agree on the shapes first, encode the
            same ones in the same order, and go smaller together; a rank that encodes nothing, or cannot, meets the
            others first.
        device_group: The ranks' group for tensors; gets a broadcast.
        readiness: Is warming meanwhile, then ready or failed; failed for every exception that is raised here, too.
        before_ready: Called with the report when all has ended well enough, before ``readiness`` is ready: size the KV
            cache there. What the encoders need is allocated by then.

    Raises:
        ConfigError, DeviceError: options, sizes or a device that cannot be.
        MmcopyTimeoutError (``what`` is "prewarm"), PrewarmError: it is required and was not done; the report is in
            ``report``, the encoder's exception in ``__cause__``. PrewarmError also when ranks disagree.

    Blocking: until that is done, or until ``options.deadline_s`` has passed. An encode cannot be interrupted: it runs
    on a thread of its own, and one that hangs is left behind there, with its memory; a process that wants to end while
    it still hangs ends cleanly by ``os._exit`` alone. On a GPU each shape is encoded once more on the caller's thread:
    serve from that one, since cuDNN's attention has plans for each thread (``report.cudnn_attention``).
    """
    options = options or PrewarmOptions()
    readiness = readiness or Readiness()
    try:
        options = options.checked()
        report = _prewarm(
            model,
            options,
            role=parse_role(role),
            device=device,
            receiver=receiver,
            group=group,
            device_group=device_group,
            readiness=readiness,
        )
        if report.status is PrewarmStatus.INCOMPLETE:
            if options.required:
                late = report.error is None or any(each.outcome is Outcome.HUNG for each in report.shapes)
                failed = (
                    MmcopyTimeoutError("prewarm", str(report).removeprefix("prewarm of "))
                    if late
                    else PrewarmError(str(report))
                )
                failed.report = report
                raise failed from report.error
            _log.warning("%s", report)
        else:
            _log.info("%s", report)
        for line in (*report.warnings, *report.outlooks):
            _log.warning("%s", line)
        if before_ready is not None:
            before_ready(report)
    except BaseException as error:
        readiness.fail(f"{type(error).__name__}: {error}")
        raise
    readiness.ready(str(report) if report.status is PrewarmStatus.INCOMPLETE else "")
    return report


def _prewarm(
    model: nn.Module,
    options: PrewarmOptions,
    *,
    role: Role,
    device: Any,
    receiver: Receiver | None,
    group: Any,
    device_group: Any,
    readiness: Readiness,
) -> PrewarmReport:
    started = time.monotonic()
    deadline_s = options.deadline_s
    deadline = started + (deadline_s if deadline_s is not None else LONGEST_S)
    nothing = PrewarmReport(status=PrewarmStatus.SKIPPED, reason="", role=role, device=str(device))
    ranks = Ranks(group)

    def tell(what: str) -> None:
        """The other ranks, which would otherwise wait for this one until their deadline."""
        ranks.within(deadline - time.monotonic(), lambda: ranks.agree([what]))

    try:
        if not encodes(role):
            raise NothingToWarm(f"a {role} worker encodes nothing")
        where = parse_device(device)
        target = choose_target(
            model, device=where, modalities=options.modalities, config=options.config, family=options.family
        )
        plan = plan_shapes(
            target.config, target.family, target.modalities, sizes=options.sizes, max_pixels=options.max_pixels
        )
    except NothingToWarm as why:
        tell(f"nothing: {why}")
        return replace(nothing, reason=str(why))
    except Exception as error:
        if isinstance(error, UnknownFamilyError) and not options.required and options.modalities is None:
            tell(f"nothing: {error}")
            return replace(nothing, reason=str(error), warnings=[f"the encoders are not warmed: {error}"])
        with contextlib.suppress(Exception):  # that they differ is the smaller news here
            tell(f"{type(error).__name__}: {error}")
        raise
    # Before the encodes: one that hangs may keep the device's allocator, and the answer is that for this process now.
    cudnn = {name: takes_cudnn(tower, dtype=target.dtypes[name], device=where) for name, tower in target.towers.items()}
    meter = Meter(where)

    def prepare() -> float:
        began = time.monotonic()
        if receiver is not None:
            try:
                warm_receiver(receiver)
            except MmcopyError as error:
                target.warnings.append(f"the receiver could not be warmed: {type(error).__name__}: {error}")
        if device_group is not None:
            warm_collectives(device_group, where)
        meter.synchronize()
        return time.monotonic() - began

    def run_encoder(modality: str, tensors: Mapping[str, Any]) -> Any:
        return target.family.encode(model, modality, tensors)

    graphs, given_up = count_graphs(), limit_was_hit()
    with following(readiness, len(plan), bar=options.progress and ranks.rank == 0) as step:
        job = Job(
            family=target.family,
            config=target.config,
            plan=plan,
            dtypes=target.dtypes,
            device=where,
            stream=_stream(where, options.stream),
            encode=options.encode or run_encoder,
            ranks=ranks,
            meter=meter,
            deadline=deadline,
            repeats=options.repeats,
            step=step,
            prepare=prepare,
            agreed=[
                str(role),
                type(target.family).__name__,
                str(dict(target.dtypes)),
                *map(str, plan),
                f"repeats {options.repeats}",
            ],
        )
        shapes = run_job(job, timeout_s=deadline_s)
    if limit_was_hit() > given_up:
        target.warnings.append(
            "torch.compile gave up on a part of the encoder, which runs eagerly now: more compilations than "
            "torch._dynamo.config.recompile_limit; raise it, or warm fewer sizes"
        )
    retained, reserved = meter.kept()
    limit = "another rank's deadline" if job.late_elsewhere else f"the deadline of {deadline_s or LONGEST_S:g} s"
    status, reason = _verdict(shapes, late=job.late, limit=limit, deadline_s=deadline_s)
    return PrewarmReport(
        status=status,
        reason=reason,
        role=role,
        device=str(where),
        dtypes=target.dtypes,
        shapes=tuple(shapes),
        seconds=time.monotonic() - started,
        transport_seconds=job.transport_seconds,
        compiled=any(is_compiled(model, tower) for tower in target.towers.values()),
        attention=_attention(target),
        cudnn_attention=cudnn,
        graphs=count_graphs() - graphs,
        peak_bytes=max((each.peak_bytes for each in shapes if each.peak_bytes is not None), default=None),
        retained_bytes=retained,
        reserved_bytes=reserved,
        warnings=tuple(target.warnings),
        error=job.error if status is PrewarmStatus.INCOMPLETE else None,
        family=target.family,
        config=target.config,
    )


def _verdict(
    shapes: Sequence[ShapeReport], *, late: bool, limit: str, deadline_s: float | None
) -> tuple[PrewarmStatus, str]:
    reasons = [f"{each.shape} failed: {each.note}" for each in shapes if each.outcome is Outcome.FAILED]
    hung = next((each for each in shapes if each.outcome is Outcome.HUNG), None)
    if hung is not None:
        reasons.insert(0, f"{hung.shape} was still running after {deadline_s:g} s, the deadline")
    elif late:
        reasons.insert(0, f"{limit} passed")
    return (PrewarmStatus.INCOMPLETE, "; ".join(reasons)) if reasons else (PrewarmStatus.WARM, "")


def _stream(device: torch.device, stream: Any) -> Any:
    """The stream that is current for the caller, since the work is on another thread."""
    if device.type != "cuda" or stream is not None:
        return stream
    import torch

    return torch.cuda.current_stream(device)


def _attention(target: Target) -> str:
    return next((name for name in map(attention_of, target.towers.values()) if name), "")
