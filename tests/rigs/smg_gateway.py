"""The demo's gateway with what only tests need: streamed answers, its metrics, its segments, its log, its crash."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mmcopy.tools.demo import gateway
from mmcopy.tools.demo.chat import HttpReply, chat_body, http

__all__ = ["ChatReply", "Gateway"]

_METRIC = re.compile(r"^([a-zA-Z_:][\w:]*(?:\{.*\})?)\s+(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class ChatReply(HttpReply):
    """An answer to a chat request, streamed or not. ``id`` is the id that the workers saw too."""

    id: str = ""
    content: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    chunks: int = 0

    @classmethod
    def from_http(cls, reply: HttpReply) -> Self:
        if reply.text.startswith("data:"):
            lines = [line[5:].strip() for line in reply.text.splitlines() if line.startswith("data:")]
            events = [HttpReply(None, line).json() for line in lines if line != "[DONE]"]
        else:
            events = [reply.json()]
        found, content = "", ""
        usage: dict[str, Any] = {}
        for event in events:
            found = found or str(event.get("id") or "")
            usage = event.get("usage") or usage
            for choice in event.get("choices") or []:
                part = choice.get("delta") or choice.get("message") or {}
                content += part.get("content") or ""
        chunks = len(events) if reply.text.startswith("data:") else 0
        return cls(reply.status, reply.text, found, content, usage, chunks)


class Gateway(gateway.Gateway):
    """A real SMG gateway that tests look into."""

    def chat(
        self,
        *,
        images: Sequence[bytes | str] = (),
        videos: Sequence[bytes | str] = (),
        timeout_s: float = 60.0,
        text: str = "What is this?",
        stream: bool = False,
    ) -> ChatReply:
        """One chat request; ``images`` and ``videos`` come before ``text``."""
        body = chat_body(self.model, images=images, videos=videos, text=text, stream=stream)
        return ChatReply.from_http(self.request("POST", "/v1/chat/completions", body, timeout_s=timeout_s))

    def kill(self) -> None:
        """SIGKILL: the gateway has no chance to clean up. Idempotent."""
        if self._process is not None:
            self._process.kill()

    def metrics(self, prefix: str = "smg_mm") -> dict[str, float]:
        """Prometheus samples whose name starts with ``prefix``: name with labels -> value."""
        reply = http("GET", self.metrics_url + "/metrics", timeout_s=10.0)
        found = _METRIC.findall(reply.text) if reply.status == 200 else []
        return {name: float(value) for name, value in found if name.startswith(prefix)}

    def segments(self) -> list[str]:
        """Names in /dev/shm that this gateway made (each of its processes, where it was started again)."""
        mine = tuple(f"smg-tokenspeed-{pid}-" for pid in self.pids)
        return sorted(path.name for path in Path("/dev/shm").iterdir() if mine and path.name.startswith(mine))

    def log_lines(self, pattern: str = "") -> list[str]:
        """Lines of :meth:`log_text` that match the regular expression."""
        return [line for line in self.log_text().splitlines() if re.search(pattern, line)]
