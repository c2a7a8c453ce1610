"""Programs with a /dev/shm of their own, in a mount namespace of their own. Needs root."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap


def private_shm(mount_options: str = "size=8m") -> tuple[str, ...]:
    """What goes in front of a command so that it finds a fresh /dev/shm."""
    return ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {mount_options} tmpfs /dev/shm && exec "$@"', "sh")


def in_private_shm(script: str, *, mount_options: str = "size=8m") -> dict[str, object]:
    """Run a Python script with a fresh /dev/shm; the last line that it prints is a JSON object."""
    done = subprocess.run(
        [*private_shm(mount_options), sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result
