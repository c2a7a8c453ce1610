"""The parent's side of a worker process: its options, its address."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from .gateway import Worker
from .reporting import ReportingProcess, WorkerError

__all__ = ["NIXL", "WorkerError", "WorkerProcess"]

Framework = Literal["torch", "numpy"]
NIXL = "NixlConnector"
"""A connector that makes vLLM workers take part in pd: the gateway passes prefill's answer to decode."""


class WorkerProcess(ReportingProcess):
    """One :mod:`mmcopy.tools.demo.worker`.

    ``endpoint_dir``: where its socket for mmcopy's senders is. None: it has no socket.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        served_model_name: str,
        log_path: Path | str,
        role: str = "regular",
        engine: str = "tokenspeed",
        device: str = "cpu",
        framework: Framework = "torch",
        encoder_dtype: str = "bfloat16",
        shm_namespace: str = "own",
        bootstrap_port: int | None = None,
        kv_connector: str = "",
        endpoint_dir: Path | str | None = None,
    ) -> None:
        self.role = role
        self.bootstrap_port = bootstrap_port
        options = {
            "model-dir": str(model_dir),
            "served-model-name": served_model_name,
            "role": role,
            "engine": engine,
            "device": device,
            "framework": framework,
            "encoder-dtype": encoder_dtype,
            "shm-namespace": shm_namespace,
            "kv-connector": kv_connector,
            **({} if endpoint_dir is None else {"endpoint-dir": str(endpoint_dir)}),
        }
        super().__init__("mmcopy.tools.demo.worker", options, name=f"{role} worker", log_path=log_path)

    @property
    def address(self) -> Worker:
        """What the gateway is given."""
        return Worker(str(self.reports("ready")[0]["address"]), self.role, self.bootstrap_port)

    @property
    def device(self) -> str:
        """Where its tensors are."""
        return str(self.reports("ready")[0]["device"])
