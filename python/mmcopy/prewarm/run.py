"""The encodes of a prewarm, one shape after the other, on a thread that the caller need not wait for.

An encode cannot be interrupted. So it runs on a daemon thread and the caller waits for that, up to the deadline: one
that hangs then is reported and left behind. Between shapes the thread itself looks at the clock.

On a GPU, what was encoded there is then encoded once more on the caller's thread, where it has been seen not to hang:
cuDNN's attention has its plans for each thread (attention.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .compiles import count_graphs
from .feed import make_tensors
from .inputs import Config, Family, Shape
from .memory import Meter, is_out_of_memory, largest_that_fits
from .progress import Step
from .ranks import Ranks
from .report import Outcome, ShapeReport

__all__ = ["Job", "run_job"]

_log = logging.getLogger("mmcopy.prewarm")

Encode = Callable[[str, Mapping[str, Any]], Any]

_OK, _OUT_OF_MEMORY, _RAISED = 0, 1, 2


@dataclass(eq=False)
class Job:
    """What to do, and what has come of it. Only the thread that runs it writes the results."""

    family: Family
    config: Config
    plan: list[Shape]
    dtypes: Mapping[str, str]
    device: Any
    stream: Any
    encode: Encode
    ranks: Ranks
    meter: Meter
    deadline: float
    """As time.monotonic() tells it."""
    repeats: int
    step: Step
    prepare: Callable[[], float]
    """Warms the transport; its seconds."""
    agreed: list[str]
    """What every rank has to have alike."""

    results: list[ShapeReport] = field(default_factory=list)
    current: Shape | None = None
    transport_seconds: float = 0.0
    error: BaseException | None = None
    late: bool = False
    late_elsewhere: bool = False
    """Whether it was another rank's deadline that passed."""
    at_home: bool = False
    """Whether the thread that works is the caller's own."""
    failure: BaseException | None = None
    """Not an encoder's: raised again by the caller."""
    _failed: set[str] = field(default_factory=set)
    _limits: dict[str, int] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        """Run the plan. Blocks; exceptions are kept."""
        try:
            with _inference(self.device, self.stream):
                self.ranks.agree(self.agreed)
                if not self.ranks.all_of(self._is_over(), any):  # a rank may have come after another one's deadline
                    self.transport_seconds = self.prepare()
                for index, planned in enumerate(self.plan):
                    over = self._is_over()
                    if self.ranks.all_of(over, any) and not self.late:
                        self.late, self.late_elsewhere = True, not over
                    if self.late or planned.modality in self._failed:
                        self._add(ShapeReport(planned, planned, Outcome.NOT_RUN))
                        continue
                    self.step(planned, index, len(self.plan))
                    self._add(self._encode(planned))
        except BaseException as error:
            self.failure = error

    def settle(self) -> None:
        """Encode on this thread what was encoded on another, until the deadline; blocks for the encode that runs
        then."""
        with _inference(self.device, self.stream):
            for index, result in enumerate(self.results):
                # Another rank may have left at its own deadline, which a rank that waits for it cannot see.
                left = self.deadline - time.monotonic()
                if self.ranks.within(left, lambda: self.ranks.all_of(self._is_over(), any)) is not False:
                    return
                if result.outcome is not Outcome.WARM:
                    continue
                graphs, started = count_graphs(), time.monotonic()
                try:
                    self._encode_once(result.shape)
                except Exception as error:  # it was possible a moment ago: the next one may be again
                    _log.warning("%s, again: %s: %s", result.shape, type(error).__name__, error)
                    continue
                again, compiled = time.monotonic() - started, count_graphs() - graphs
                self.results[index] = replace(
                    result, again_seconds=again, graphs=result.graphs + compiled, on_callers_thread=True
                )

    def abandon(self) -> list[ShapeReport]:
        """The deadline has passed, or the caller was interrupted: the results so far, the running shape as hung."""
        self._stop.set()
        self.late = True
        results, current = list(self.results), self.current
        if current is not None and len(results) < len(self.plan):
            planned = self.plan[len(results)]
            note = "still running at the deadline; it cannot be interrupted"
            results.append(ShapeReport(planned, current, Outcome.HUNG, note=note))
        results += [ShapeReport(each, each, Outcome.NOT_RUN) for each in self.plan[len(results) :]]
        return results

    def _is_over(self) -> bool:
        return self._stop.is_set() or time.monotonic() > self.deadline

    def _add(self, result: ShapeReport) -> None:
        self.current = None
        self.results.append(result)
        if result.outcome is Outcome.WARM:
            _log.info("%s: %.2f s, %d graphs compiled%s", result.shape, result.seconds, result.graphs, _in(result.note))
        elif result.outcome is Outcome.FAILED:
            self._failed.add(result.shape.modality)
            _log.warning("%s failed: %s", result.shape, result.note)

    def _encode(self, planned: Shape) -> ShapeReport:
        shape, notes = self._bounded(planned), []
        if shape != planned:
            notes.append(f"less than planned: {planned} would not fit into the memory left")
        while True:
            self.current = shape
            kind, result = self._try(planned, shape)
            kinds = self.ranks.gather((kind, result.note))
            worst = max(kinds)
            if worst[0] == _OK:
                return replace(result, note="; ".join(notes))
            why = result.note if kind == worst[0] else f"rank {kinds.index(worst)}: {worst[1]}"
            if worst[0] == _RAISED:
                return replace(result, outcome=Outcome.FAILED, note=why)
            self.meter.give_back()
            notes.append(f"out of memory at {shape}")
            _log.warning("out of memory at %s: %s", shape, why)
            self._limits[shape.modality] = shape.volume
            smaller = self.family.shrink(self.config, shape)
            if smaller is None or self.ranks.all_of(self._is_over(), any):
                return replace(result, outcome=Outcome.FAILED, note=f"{'; '.join(notes)}: {why}")
            shape = smaller

    def _try(self, planned: Shape, shape: Shape) -> tuple[int, ShapeReport]:
        graphs, begun = count_graphs(), self.meter.begin()
        started = time.monotonic()
        seconds = 0.0
        try:
            for attempt in range(self.repeats):
                self._encode_once(shape)
                if not attempt:
                    seconds = time.monotonic() - started
        except Exception as error:
            _clear_frames(error)
            if self.error is None or not is_out_of_memory(error):
                self.error = error
            kind = _OUT_OF_MEMORY if is_out_of_memory(error) else _RAISED
            return kind, ShapeReport(planned, shape, Outcome.FAILED, note=f"{type(error).__name__}: {error}")
        return _OK, ShapeReport(
            planned,
            shape,
            Outcome.WARM,
            seconds,
            count_graphs() - graphs,
            self.meter.peak(begun),
            on_callers_thread=self.at_home,
        )

    def _encode_once(self, shape: Shape) -> None:
        """Holds the tensors in a frame of its own, which can be cleared out of a failure's traceback."""
        import torch

        inputs = self.family.inputs(self.config, shape)
        # As a receiver makes them. Those of inference mode are of another kind, which torch.compile guards on: the
        # first request would compile again.
        with torch.inference_mode(False):
            tensors = make_tensors(inputs, dtype=self.dtypes[shape.modality], device=self.device)
        self.encode(shape.modality, tensors)
        self.meter.synchronize()

    def _bounded(self, planned: Shape) -> Shape:
        """``planned``, or less where memory ran out at that size before, or where it would by what was measured."""

        def shrink(shape: Shape) -> Shape | None:
            return self.family.shrink(self.config, shape)

        shape, limit = planned, self._limits.get(planned.modality)
        while limit is not None and shape.volume >= limit:
            smaller = shrink(shape)
            if smaller is None:
                break
            shape = smaller
        largest = max(
            (each for each in self.results if each.peak_bytes and each.shape.modality == shape.modality),
            key=lambda each: each.shape.volume,
            default=None,
        )
        rate = 0.0 if largest is None or not largest.peak_bytes else largest.peak_bytes / largest.shape.volume
        known = largest is not None and shape.volume <= largest.shape.volume
        rate = self.ranks.all_of(0.0 if known else rate, max)
        available = self.ranks.all_of(self.meter.available(), lambda each: min((a for a in each if a), default=None))
        if rate and available is not None:
            shape = largest_that_fits(shape, rate, available, shrink)
        return shape


def run_job(job: Job, *, timeout_s: float | None) -> list[ShapeReport]:
    """Do ``job`` within ``timeout_s``; its results, complete or not. Blocks the caller for no longer.

    None: on the caller's own thread, for as long as it takes. Raises what went wrong outside of the encoder.
    """
    if timeout_s is None:
        job.at_home = True
        job.work()
    else:
        finished = threading.Event()
        thread = threading.Thread(target=_work, args=(job, finished), name="mmcopy-prewarm", daemon=True)
        thread.start()
        try:
            on_time = finished.wait(max(0.0, job.deadline - time.monotonic()))
        except BaseException:
            job.abandon()
            raise
        if not on_time:
            return job.abandon()
        if job.failure is None and not job.late and job.device.type == "cuda":
            job.settle()
    if job.failure is not None:
        raise job.failure
    return list(job.results)


def _work(job: Job, finished: threading.Event) -> None:
    import torch

    graphs = count_graphs()
    job.work()
    finished.set()
    if count_graphs() > graphs and not torch.cuda.is_available():
        # Without a GPU torch 2.11 keeps a device guard of the first thread that compiles, by its address: when that
        # thread has ended, the next compilation of any other crashes the process. So this one stays, asleep.
        threading.Event().wait()


def _clear_frames(error: BaseException) -> None:
    """Of ``error`` and of those that it came from: they hold the tensors of the encode, as long as it is kept."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            left += [each.__cause__, each.__context__]
            if each.__traceback__ is not None:
                traceback.clear_frames(each.__traceback__)


@contextlib.contextmanager
def _inference(device: Any, stream: Any) -> Iterator[None]:
    import torch

    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(torch.inference_mode())
        yield


def _in(note: str) -> str:
    return f" ({note})" if note else ""
