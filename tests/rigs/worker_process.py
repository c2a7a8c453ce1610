"""A worker in a process of its own: ``python -m tests.rigs.worker_process SHM_DIR [UID]`` prints its port.

It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import os
import sys

from .smg_rig import Worker, cpu_receiver


async def serve(worker: Worker) -> None:
    print(await worker.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()


def main(shm_dir: str, uid: str = "") -> None:
    if uid:
        os.setgroups([])
        os.setgid(int(uid))
        os.setuid(int(uid))
    with cpu_receiver(shm_dir) as receiver:
        asyncio.run(serve(Worker(receiver)))


if __name__ == "__main__":
    main(*sys.argv[1:])
