"""The examples run against each other, and README.md shows them as they are."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

from mmcopy.integrations.smg import ask_worker
from mmcopy.tools.demo.model_dir import write_model_dir

ROOT = pathlib.Path(__file__).parent.parent


def code_of(name: str) -> str:
    """An example without its docstring."""
    return (ROOT / "examples" / name).read_text().split('"""\n', 2)[-1].strip()


def test_the_readme_shows_the_examples() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("gateway.py", "worker.py"):
        assert code_of(name) in readme, f"README.md shows another {name}"
        assert len([line for line in code_of(name).splitlines() if line.strip()]) <= 24


def test_gateway_and_worker_run(tmp_path: pathlib.Path, segments: Callable[[], list[str]]) -> None:
    write_model_dir("qwen3_vl", tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        worker = subprocess.Popen(
            [sys.executable, str(ROOT / "examples/worker.py"), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert worker.stdout is not None
        address = worker.stdout.readline().strip()
        assert address.startswith("grpc://127.0.0.1:"), address
        socket = pathlib.Path(ask_worker(address).labels["mmcopy_endpoint"])
        assert socket.is_socket()
        gateway = subprocess.run(
            [sys.executable, str(ROOT / "examples/gateway.py"), address],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (gateway.returncode, gateway.stderr, gateway.stdout) == (0, "", "hi\n")
        assert worker.stdout.readline() == "image (1200, 1536) torch.bfloat16 cpu lease\n"
        assert segments() == []
    finally:
        worker.send_signal(signal.SIGINT)  # as Ctrl-C: the blocks are left, and the socket goes
        worker.communicate(timeout=20)
    assert not socket.exists()
