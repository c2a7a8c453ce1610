"""mmcopy's tensors as the messages of real engines: one module per engine, over that engine's own protobuf classes.

``mmcopy.wire.tokenspeed`` and ``mmcopy.wire.vllm`` have the same functions. The messages look alike, but their field
numbers differ, so a message of one engine is not one of the other. Both need ``pip install 'mmcopy[smg]'``; importing
them does not.
"""

from __future__ import annotations

from . import tokenspeed, vllm

__all__ = ["tokenspeed", "vllm"]
