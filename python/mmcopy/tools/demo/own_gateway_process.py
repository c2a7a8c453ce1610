"""The parent's side of mmcopy's own gateway, with the interface of the real one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .chat import HttpReply, chat_body, http
from .gateway import Worker
from .reporting import ReportingProcess

__all__ = ["OwnGatewayProcess"]


class OwnGatewayProcess(ReportingProcess):
    """One :mod:`mmcopy.tools.demo.own_gateway` in front of ``worker``.

    SMG_* variables of this process are not passed on.
    """

    def __init__(
        self,
        model_dir: Path | str,
        worker: Worker,
        *,
        family: str,
        transport: str,
        shm_min_bytes: int | None,
        model: str,
        log_path: Path | str,
        start_timeout_s: float = 30.0,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        options = {"worker": worker.url, "model-dir": str(model_dir), "family": family, "transport": transport}
        if shm_min_bytes is not None:
            options["shm-min-bytes"] = str(shm_min_bytes)
        env = {name: value for name, value in os.environ.items() if not name.startswith("SMG_")}
        super().__init__("mmcopy.tools.demo.own_gateway", options, name="mmcopy gateway", log_path=log_path, env=env)
        self._model = model
        self._start_timeout_s = start_timeout_s
        self._poll = poll
        self.pids: list[int] = []
        """Empty: its segments are found by their sender's id."""

    def start(self) -> None:
        """Starts it and waits until it serves. Raises :class:`WorkerError`; it is stopped then."""
        try:
            super().start()
            self.wait_until_ready(time.monotonic() + self._start_timeout_s, self._poll)
        except BaseException:
            self.stop()
            raise

    def chat(
        self, *, images: Sequence[bytes | str] = (), videos: Sequence[bytes | str] = (), timeout_s: float = 60.0
    ) -> HttpReply:
        """One chat request; returns the answer whatever its status (None: no answer within the limit)."""
        body = chat_body(self._model, images=images, videos=videos)
        url = str(self.reports("ready")[0]["url"]) + "/v1/chat/completions"
        return http("POST", url, body, timeout_s=timeout_s)

    def errors(self) -> list[str]:
        """What was wrong at its end, after :meth:`stop`: no last report, or leases still in flight."""
        stopped = self.reports("stopped")
        if not stopped:
            return [f"the {self.name} did not end properly\n{self.log_tail()}"]
        leases = int(stopped[0]["leases_out"])
        return [f"the {self.name}'s arena still had {leases} leases out at the end"] if leases else []

    def notes(self) -> list[str]:
        """Why some tensors did not go by lease, after :meth:`stop`."""
        counters: dict[str, dict[str, Any]] = (self.reports("stopped") or [{"counters": {}}])[0]["counters"]
        reasons = []
        for name in ("lease_fallbacks", "arena_hand_overs", "inline_fallbacks"):
            reasons += [f"{name} {why} {count}" for why, count in counters.get(name, {}).items() if why != "ok"]
        return [f"not everything went by a lease: {', '.join(reasons)}"] if reasons else []
