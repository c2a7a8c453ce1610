"""The real gateway, configured by each of its own means, and what mmcopy resolves from the same settings.

Each case starts a real gateway with these flags, variables, overrides and labels, asks it about one picture, and
compares the way and the dtype of every tensor that reached the workers with what mmcopy's policy says. The workers are
started once; their labels are asked for, not known.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from mmcopy import TransportConfig, WorkerSpec, shm_namespace_id
from mmcopy.config import Role, read_environment, wire_dtype
from mmcopy.integrations.smg import Advertised, ask_worker, with_advertised
from mmcopy.send.routing import Delivery, Route, Snapshot, by_labels, decide, plan_route
from mmcopy.tools.demo.gateway import Worker as Registered
from mmcopy.tools.demo.model_dir import write_model_dir
from tests.rigs.gateway_pictures import picture, png
from tests.rigs.gateway_stack import FOREIGN, Leg, Row, WorkerProcess
from tests.rigs.gateway_worker_process import SERVED_NAME
from tests.rigs.smg_gateway import Gateway
from tests.rigs.waiting import settle

pytestmark = [pytest.mark.gateway, pytest.mark.filterwarnings("error")]

MODE, LEGACY_MODE = "SMG_MM_TENSOR_TRANSPORT", "SMG_TOKENSPEED_MM_TENSOR_TRANSPORT"
SIZE, LEGACY_SIZE = "SMG_MM_SHM_MIN_BYTES", "SMG_TOKENSPEED_MM_SHM_MIN_BYTES"
DTYPE, IMAGE_DTYPE = "SMG_TOKENSPEED_ENCODER_INPUT_DTYPE", "SMG_TOKENSPEED_IMAGE_ENCODER_INPUT_DTYPE"
VLLM_DTYPE = "SMG_VLLM_ENCODER_INPUT_DTYPE"
TOPOLOGIES = {"regular": ("regular",), "pd": ("prefill", "decode"), "epd": ("encode", "prefill", "decode")}
BIG = 10 << 20
"""More bytes than the picture's pixels have."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the gateway is given: flags, variables, and by role what is posted for a worker."""

    flag: str | None = None
    min_bytes_flag: int | None = None
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    posted: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


class Workers:
    """Processes that are started when they are first needed, and what they advertise."""

    def __init__(self, directory: pathlib.Path, model_dir: pathlib.Path) -> None:
        self._directory = directory
        self.model_dir = model_dir
        self._started: dict[Leg, tuple[WorkerProcess, Advertised]] = {}
        self.gateways = 0

    def get(self, leg: Leg) -> tuple[WorkerProcess, Advertised]:
        if leg not in self._started:
            process = WorkerProcess(leg, self._directory / f"worker{len(self._started)}", self.model_dir)
            process.start()
            try:
                process.wait_until_ready()
                self._started[leg] = process, ask_worker(process.address)
            except BaseException:
                process.process.stop()
                raise
        return self._started[leg]

    def log_path(self) -> pathlib.Path:
        self.gateways += 1
        return self._directory / f"gateway{self.gateways}.log"

    def stop(self) -> None:
        for process, _ in self._started.values():
            assert process.process.stop() == 0, process.log


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    model_dir = write_model_dir("qwen3_vl", tmp_path_factory.mktemp("model"))
    running = Workers(tmp_path_factory.mktemp("policy"), model_dir)
    yield running
    running.stop()


def tensors_that_arrive(workers: Workers, legs: Sequence[Leg], topology: str, settings: Settings) -> dict[str, Row]:
    """By role, what reached the workers of one picture: each tensor's path, dtype and bytes."""
    processes = [workers.get(leg)[0] for leg in legs]
    before = [len(process.rows()) for process in processes]
    registered = [
        Registered(process.address, leg.role, 9000 + i if leg.role in ("encode", "prefill") else None)
        for i, (process, leg) in enumerate(zip(processes, legs, strict=True))
    ]
    options: dict[str, Any] = {
        "transport": settings.flag,
        "shm_min_bytes": settings.min_bytes_flag,
        "env": settings.environ,
        "model": SERVED_NAME,
        "log_path": workers.log_path(),
        "shutdown_grace_s": 0,
    }
    if settings.posted:
        gateway = Gateway(workers.model_dir, [], flags=["--enable-igw"], **options)
    else:
        gateway = Gateway(workers.model_dir, registered, topology=topology, **options)
    try:
        gateway.start()
        if settings.posted:
            post(gateway, registered, settings)
        reply = gateway.chat(images=[png(picture(1))])
        assert reply.status == 200, reply.text
        events = {"encode": "encode"}

        def rows() -> list[Row | None]:
            found = [process.rows()[count:] for process, count in zip(processes, before, strict=True)]
            return [
                next((row for row in seen if row["event"] == events.get(leg.role, "generate")), None)
                for leg, seen in zip(legs, found, strict=True)
            ]

        assert settle(lambda: None not in rows(), limit_s=10), rows()
        assert settle(lambda: gateway.segments() == []), gateway.segments()
        return {leg.role: row["tensors"] for leg, row in zip(legs, rows(), strict=True) if row is not None}
    finally:
        gateway.kill()


def post(gateway: Gateway, registered: Sequence[Registered], settings: Settings) -> None:
    for worker in registered:
        body = {"url": worker.url, "worker_type": worker.role, **settings.posted.get(worker.role, {})}
        if worker.bootstrap_port is not None:
            body["bootstrap_port"] = worker.bootstrap_port
        reply = gateway.request("POST", "/workers", body)
        assert reply.status == 202, reply.text

    def serving() -> bool:
        healthy = sum(bool(worker.get("is_healthy")) for worker in gateway.workers())
        models = gateway.request("GET", "/v1/models").json().get("data", [])
        return healthy == len(registered) and SERVED_NAME in [card["id"] for card in models]

    assert settle(serving, limit_s=20), gateway.workers()


def route_by_mmcopy(workers: Workers, legs: Sequence[Leg], settings: Settings) -> Route:
    environment = read_environment(settings.environ)
    config = TransportConfig(mode=settings.flag, shm_min_bytes=settings.min_bytes_flag)
    specs = []
    for leg in legs:
        process, advertised = workers.get(leg)
        posted = settings.posted.get(leg.role, {})
        spec = WorkerSpec(process.address, role=leg.role, **posted)
        specs.append(with_advertised(spec, advertised))
    return plan_route(
        specs,
        lambda worker: config.resolve_in(environment, worker),
        lambda worker: by_labels(worker, namespace_id=shm_namespace_id(), uid=0),
    )


def path_of(delivery: Delivery, nbytes: int) -> str:
    return decide(delivery, Snapshot(), nbytes).path


def is_pixels(label: str) -> bool:
    return label.endswith(("encoder_input", "pixel_values"))


def agree(workers: Workers, settings: Settings, *, topology: str = "regular", engine: str = "tokenspeed") -> set[str]:
    """Compare, and return the ways of the pixels: inline or segment."""
    legs = [Leg(role, engine=engine) for role in TOPOLOGIES[topology]]
    route = route_by_mmcopy(workers, legs, settings)
    arrived = tensors_that_arrive(workers, legs, topology, settings)
    ways: set[str] = set()
    for role, tensors in arrived.items():
        for label, tensor in tensors.items():
            if is_pixels(label):
                receiver = route.pixels.receivers[0]
                assert receiver.role == Role("aggregated" if role == "regular" else role), "who gets pixels"
                assert tensor["path"] == path_of(route.pixels, tensor["nbytes"]), (label, route.pixels)
                assert tensor["dtype"] == wire_dtype("image", worker=receiver, environ=settings.environ).dtype
                ways.add(tensor["path"])
            elif engine == "vllm" and label.endswith("image_grid_thw"):
                assert tensor["path"] == "inline"  # always, and not by the policy
            else:
                delivery = route.pixels if role == "encode" else route.side_tensors
                assert tensor["path"] == path_of(delivery, tensor["nbytes"]), (label, delivery)
    assert ways, arrived
    return ways


REGULAR: dict[str, tuple[Settings, str]] = {
    "nothing": (Settings(), "inline"),
    # the flags
    "flag shm": (Settings(flag="shm"), "segment"),
    "flag auto": (Settings(flag="auto"), "segment"),
    "flag inline over everything": (Settings(flag="inline", environ={MODE: "shm", LEGACY_MODE: "shm"}), "inline"),
    "flag threshold": (Settings(flag="shm", min_bytes_flag=BIG), "inline"),
    "flag threshold 0": (Settings(flag="shm", min_bytes_flag=0), "segment"),
    "flag threshold of a side tensor": (Settings(flag="shm", min_bytes_flag=24), "segment"),
    "flag threshold over the variable": (
        Settings(flag="shm", min_bytes_flag=65536, environ={SIZE: str(BIG)}),
        "segment",
    ),
    # the environment
    "variable": (Settings(environ={MODE: "shm"}), "segment"),
    "variable trimmed, any case": (Settings(environ={MODE: " Auto\t"}), "segment"),
    "variable over the legacy name": (Settings(environ={MODE: "inline", LEGACY_MODE: "shm"}), "inline"),
    "bad variable": (Settings(environ={MODE: "bogus", LEGACY_MODE: "shm"}), "inline"),
    "rdma": (Settings(environ={MODE: "rdma", LEGACY_MODE: "shm"}), "inline"),
    "variable threshold": (Settings(flag="shm", environ={SIZE: " +0 "}), "segment"),
    "bad variable threshold": (Settings(flag="shm", environ={SIZE: "64k", LEGACY_SIZE: "0"}), "segment"),
    "too large variable threshold": (Settings(flag="shm", environ={SIZE: str(2**64), LEGACY_SIZE: "0"}), "segment"),
    "largest variable threshold": (Settings(flag="shm", environ={SIZE: str(2**64 - 1)}), "inline"),
    # the legacy environment
    "legacy": (Settings(environ={LEGACY_MODE: "shm"}), "segment"),
    "legacy behind a blank one": (Settings(environ={MODE: "  ", LEGACY_MODE: "SHM"}), "segment"),
    "bad legacy": (Settings(environ={LEGACY_MODE: "bogus"}), "inline"),
    "legacy threshold": (Settings(environ={MODE: "shm", SIZE: "", LEGACY_SIZE: "24"}), "segment"),
    "bad legacy threshold": (Settings(flag="shm", environ={LEGACY_SIZE: "x"}), "segment"),
    "each key by itself": (Settings(environ={MODE: "shm", LEGACY_SIZE: str(BIG)}), "inline"),
    # POST /workers
    "posted mode": (Settings(posted={"regular": {"multimodal_tensor_transport": "shm"}}), "segment"),
    "posted mode over the flag": (
        Settings(flag="shm", posted={"regular": {"multimodal_tensor_transport": "inline"}}),
        "inline",
    ),
    "posted mode over the variables": (
        Settings(environ={MODE: "inline"}, posted={"regular": {"multimodal_tensor_transport": "auto"}}),
        "segment",
    ),
    "posted threshold": (
        Settings(flag="shm", min_bytes_flag=BIG, posted={"regular": {"multimodal_shm_min_bytes": 0}}),
        "segment",
    ),
    "posted threshold 0 is set": (
        Settings(environ={MODE: "shm", SIZE: str(BIG)}, posted={"regular": {"multimodal_shm_min_bytes": 0}}),
        "segment",
    ),
    "nothing posted": (Settings(flag="shm", posted={"regular": {}}), "segment"),
    # labels
    "foreign namespace by label": (
        Settings(flag="auto", posted={"regular": {"labels": {"shm_namespace_id": FOREIGN}}}),
        "inline",
    ),
    "no namespace by label": (
        Settings(flag="auto", posted={"regular": {"labels": {"shm_namespace_id": ""}}}),
        "inline",
    ),
    "shm compares no label": (
        Settings(flag="shm", posted={"regular": {"labels": {"shm_namespace_id": FOREIGN}}}),
        "segment",
    ),
    "a label is no override": (
        Settings(posted={"regular": {"labels": {"multimodal_tensor_transport": "shm"}}}),
        "inline",
    ),
}


@pytest.mark.parametrize("name", REGULAR)
def test_one_worker(workers: Workers, name: str) -> None:
    settings, way = REGULAR[name]
    assert agree(workers, settings) == {way}


@pytest.mark.parametrize("name", [name for name in REGULAR if name.split()[0] in ("flag", "posted", "legacy", "no")])
def test_one_vllm_worker(workers: Workers, name: str) -> None:
    settings, way = REGULAR[name]
    assert agree(workers, settings, engine="vllm") == {way}


def label(name: str, value: str) -> Mapping[str, Mapping[str, Any]]:
    return {"regular": {"labels": {name: value}}}


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("tokenspeed", Settings(environ={DTYPE: "float16"})),
        ("tokenspeed", Settings(environ={DTYPE: "float16", IMAGE_DTYPE: " FP32 "})),
        ("tokenspeed", Settings(environ={DTYPE: "half", IMAGE_DTYPE: ""})),
        ("tokenspeed", Settings(environ={DTYPE: "float16", IMAGE_DTYPE: "bogus"})),
        ("tokenspeed", Settings(environ={DTYPE: " "})),
        ("tokenspeed", Settings(environ={DTYPE: "uint8"})),
        ("tokenspeed", Settings(environ={VLLM_DTYPE: "float16"})),
        ("tokenspeed", Settings(posted=label("multimodal_encoder_dtype", "float16"))),
        ("tokenspeed", Settings(posted=label("multimodal_encoder_dtype", ""))),
        ("tokenspeed", Settings(posted=label("multimodal_encoder_dtype", "float64"))),
        ("tokenspeed", Settings(posted=label("multimodal_encoder_dtype", "uint8"))),
        ("tokenspeed", Settings(environ={DTYPE: "bf16"}, posted=label("multimodal_encoder_dtype", "float16"))),
        ("tokenspeed", Settings(posted=label("mm_device_do_normalize", "true"))),
        ("vllm", Settings(environ={DTYPE: "float16", IMAGE_DTYPE: "float16"})),
        ("vllm", Settings(environ={VLLM_DTYPE: " F16 "})),
        ("vllm", Settings(environ={VLLM_DTYPE: "bogus"})),
        ("vllm", Settings(environ={VLLM_DTYPE: ""})),
        ("vllm", Settings(posted=label("multimodal_encoder_dtype", ""))),
        ("vllm", Settings(posted=label("multimodal_encoder_dtype", "int64"))),
        ("vllm", Settings(posted=label("multimodal_encoder_dtype", "uint8"))),
        ("vllm", Settings(environ={VLLM_DTYPE: "float16"}, posted=label("mm_device_do_normalize", "true"))),
    ],
    ids=lambda value: value if isinstance(value, str) else str({**value.environ, **value.posted.get("regular", {})}),
)
def test_the_dtype_of_pixels(workers: Workers, engine: str, settings: Settings) -> None:
    agree(workers, settings, engine=engine)


def override(mode: str | None = None, min_bytes: int | None = None, namespace: str | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if mode is not None:
        body["multimodal_tensor_transport"] = mode
    if min_bytes is not None:
        body["multimodal_shm_min_bytes"] = min_bytes
    if namespace is not None:
        body["labels"] = {"shm_namespace_id": namespace}
    return body


SEPARATE: dict[str, tuple[str, Settings, str]] = {
    "pd, flag": ("pd", Settings(flag="shm"), "segment"),
    "pd, variable": ("pd", Settings(environ={MODE: "auto"}), "segment"),
    "pd, legacy": ("pd", Settings(environ={LEGACY_MODE: "shm", LEGACY_SIZE: str(BIG)}), "inline"),
    "pd, prefill's mode": ("pd", Settings(posted={"prefill": override("shm")}), "segment"),
    "pd, prefill inline": ("pd", Settings(flag="shm", posted={"prefill": override("inline")}), "inline"),
    "pd, decode's mode is not pixels'": ("pd", Settings(posted={"decode": override("shm")}), "inline"),
    "pd, decode inline": ("pd", Settings(flag="shm", posted={"decode": override("inline")}), "segment"),
    "pd, prefill's threshold": ("pd", Settings(flag="shm", posted={"prefill": override(min_bytes=BIG)}), "inline"),
    "pd, decode's threshold": ("pd", Settings(flag="shm", posted={"decode": override(min_bytes=BIG)}), "segment"),
    "pd, foreign prefill": ("pd", Settings(flag="auto", posted={"prefill": override(namespace=FOREIGN)}), "inline"),
    "pd, foreign decode": ("pd", Settings(flag="auto", posted={"decode": override(namespace=FOREIGN)}), "inline"),
    "pd, foreign decode, forced": (
        "pd",
        Settings(flag="shm", posted={"decode": override("auto", namespace=FOREIGN)}),
        "segment",
    ),
    "epd, flag": ("epd", Settings(flag="auto"), "segment"),
    "epd, variable": ("epd", Settings(environ={MODE: "shm", SIZE: "786432"}), "segment"),
    "epd, legacy": ("epd", Settings(environ={LEGACY_MODE: "auto", SIZE: "786433"}), "inline"),
    "epd, encode's mode": (
        "epd",
        Settings(posted={"encode": override("shm"), "prefill": override("inline")}),
        "segment",
    ),
    "epd, encode inline": (
        "epd",
        Settings(flag="inline", posted={"prefill": override("shm"), "decode": override("shm")}),
        "inline",
    ),
    "epd, encode's threshold": (
        "epd",
        Settings(flag="shm", posted={"encode": override(min_bytes=BIG), "prefill": override(min_bytes=0)}),
        "inline",
    ),
    "epd, foreign encode": ("epd", Settings(flag="auto", posted={"encode": override(namespace=FOREIGN)}), "inline"),
    "epd, foreign prefill": ("epd", Settings(flag="auto", posted={"prefill": override(namespace=FOREIGN)}), "segment"),
    "epd, foreign decode": ("epd", Settings(flag="auto", posted={"decode": override(namespace=FOREIGN)}), "segment"),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_prefill_decode_and_encode_apart(workers: Workers, name: str) -> None:
    topology, settings, way = SEPARATE[name]
    assert agree(workers, settings, topology=topology) == {way}


def test_a_comparison_that_should_fail_does(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway is told something else than mmcopy."""
    real: Callable[..., Route] = route_by_mmcopy

    def told_otherwise(workers: Workers, legs: Sequence[Leg], settings: Settings) -> Route:
        return real(workers, legs, dataclasses.replace(settings, flag="inline"))

    monkeypatch.setitem(globals(), "route_by_mmcopy", told_otherwise)
    with pytest.raises(AssertionError, match="encoder_input"):
        agree(workers, Settings(flag="shm"))
