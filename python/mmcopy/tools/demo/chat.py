"""OpenAI chat requests with pictures, over plain HTTP: building the body, sending it, reading the answer."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["HttpReply", "chat_body", "data_url", "http", "media_type_of"]

# Never through a proxy: everything is on 127.0.0.1.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class HttpReply:
    """``status`` is None when there was no answer; ``text`` then says why."""

    status: int | None
    text: str

    def json(self) -> dict[str, Any]:
        """The body as an object; empty when it is not one."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def http(method: str, url: str, body: object = None, *, timeout_s: float) -> HttpReply:
    """Sends one request and reads the whole answer, whatever its status. Blocks.

    ``timeout_s`` limits connecting and each wait for bytes. ``body``: bytes as they are, anything else as JSON.
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    status: int | None
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            status, text = answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode(errors="replace")
    except OSError as error:
        status, text = None, str(getattr(error, "reason", error))
    return HttpReply(status, text)


def chat_body(
    model: str,
    *,
    images: Sequence[bytes | str] = (),
    videos: Sequence[bytes | str] = (),
    text: str = "What is this?",
    max_tokens: int = 8,
    stream: bool = False,
) -> bytes:
    """The JSON body of a chat request: one user message, pictures and videos first, then ``text``."""
    parts: list[dict[str, Any]] = []
    for kind, files in (("image_url", images), ("video_url", videos)):
        parts += [{"type": kind, kind: {"url": file if isinstance(file, str) else data_url(file)}} for file in files]
    parts.append({"type": "text", "text": text})
    message = {"role": "user", "content": parts}
    return json.dumps({"model": model, "max_tokens": max_tokens, "stream": stream, "messages": [message]}).encode()


def data_url(file: bytes) -> str:
    """An encoded file as a ``data:`` URL."""
    return f"data:{media_type_of(file)};base64,{base64.b64encode(file).decode()}"


def media_type_of(file: bytes) -> str:
    """The media type that the first bytes of an encoded file say."""
    if file.startswith(b"\x89PNG"):
        return "image/png"
    if file.startswith(b"\xff\xd8"):
        return "image/jpeg"
    if file[:4] == b"RIFF" and file[8:12] == b"WEBP":
        return "image/webp"
    if file[4:8] == b"ftyp":
        return "video/mp4"
    return "application/octet-stream"
