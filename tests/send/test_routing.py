"""Who receives what, over every combination of roles, overrides, labels and modes, against a plain second opinion."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from mmcopy import TransportConfig, WorkerSpec
from mmcopy.config import ResolvedTransport, TransportMode, read_environment
from mmcopy.errors import ConfigError
from mmcopy.send.routing import (
    SHARED,
    Delivery,
    Reason,
    Route,
    Sharing,
    Snapshot,
    by_labels,
    decide,
    plan_route,
    receivers_of,
)

OURS, FOREIGN = "boot:27", "boot:28"
UID = 1000
NO_ENVIRONMENT = read_environment({})

TOPOLOGIES = {
    "single": ("aggregated",),
    "pd": ("prefill", "decode"),
    "prefill": ("prefill",),
    "epd": ("encode", "prefill", "decode"),
    "epd of two": ("encode", "encode", "prefill", "decode"),
    "ep": ("encode", "prefill"),
    "e and aggregated": ("encode", "aggregated"),
}


def route(workers: Sequence[WorkerSpec], config: TransportConfig | None = None) -> Route:
    config = config or TransportConfig()

    def resolve(worker: WorkerSpec | None) -> ResolvedTransport:
        return config.resolve_in(NO_ENVIRONMENT, worker)

    return plan_route(workers, resolve, lambda worker: by_labels(worker, namespace_id=OURS, uid=UID))


def workers_of(roles: Sequence[str], **columns: Sequence[object]) -> list[WorkerSpec]:
    """A worker a role; each column has one value a worker."""
    specs = []
    for i, role in enumerate(roles):
        namespace = columns["namespaces"][i] if "namespaces" in columns else OURS
        labels = {} if namespace is None else {"shm_namespace_id": str(namespace)}
        options = {
            "multimodal_tensor_transport": columns["modes"][i] if "modes" in columns else None,
            "multimodal_shm_min_bytes": columns["sizes"][i] if "sizes" in columns else None,
        }
        specs.append(WorkerSpec(f"grpc://{i}-{role}", role=role, labels=labels, **options))  # type: ignore[arg-type]
    return specs


def opinion(
    receivers: Sequence[WorkerSpec], router_mode: str, *, asked: Sequence[WorkerSpec] = (), readers: int = 1
) -> tuple[str, Reason | None]:
    """What 1 MiB gets, said in another way than the library says it."""
    modes = {str(worker.multimodal_tensor_transport or router_mode) for worker in receivers}
    sizes = {
        65536 if worker.multimodal_shm_min_bytes is None else worker.multimodal_shm_min_bytes for worker in receivers
    }
    if len(modes) > 1:
        return "inline", Reason.RECEIVERS_DISAGREE
    if modes == {"inline"}:
        return "inline", Reason.MODE
    if len(sizes) > 1:
        return "inline", Reason.RECEIVERS_DISAGREE
    if readers > 1:
        return "inline", Reason.SEVERAL_READERS
    if modes == {"auto"}:
        for worker in [*receivers, *asked]:
            namespace = worker.labels.get("shm_namespace_id")
            if namespace != OURS:
                return "inline", Reason.NAMESPACE_DIFFERS if namespace else Reason.NAMESPACE_UNKNOWN
    return "segment", None


def taken(delivery: Delivery, nbytes: int = 1 << 20) -> tuple[str, Reason | None]:
    choice = decide(delivery, Snapshot(), nbytes)
    return choice.path, choice.reason


def check(workers: Sequence[WorkerSpec], router_mode: str) -> Route:
    found = route(workers, TransportConfig(mode=router_mode))
    by_role = {role: [w for w in workers if w.role == role] for role in ("aggregated", "encode", "prefill", "decode")}
    side = by_role["aggregated"] + by_role["prefill"] + by_role["decode"]
    pixels = by_role["encode"] or by_role["aggregated"] + by_role["prefill"]
    asked = [] if by_role["encode"] else by_role["decode"]
    assert found.pixels.receivers == tuple(pixels)
    assert found.side_tensors.receivers == tuple(side)
    assert taken(found.pixels) == opinion(pixels, router_mode, asked=asked), found.pixels
    assert taken(found.side_tensors) == opinion(side, router_mode, readers=len(side)), found.side_tensors
    for delivery in (found.pixels, found.side_tensors):
        assert (delivery.reason is None) == (delivery.detail == "")
    return found


def products(count: int, *values: object) -> Iterator[tuple[object, ...]]:
    return itertools.product(values, repeat=count)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("router_mode", ["inline", "shm", "auto"])
def test_every_combination_of_modes_and_labels(topology: str, router_mode: str) -> None:
    roles = TOPOLOGIES[topology]
    seen = set()
    for modes in products(len(roles), None, "inline", "shm", "auto"):
        for namespaces in products(len(roles), OURS, FOREIGN, None):
            found = check(workers_of(roles, modes=modes, namespaces=namespaces), router_mode)
            seen |= {found.pixels.reason, found.side_tensors.reason}
    assert seen >= {None, Reason.MODE, Reason.NAMESPACE_DIFFERS, Reason.NAMESPACE_UNKNOWN}
    assert (Reason.RECEIVERS_DISAGREE in seen) == (topology in ("pd", "epd", "epd of two"))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("router_mode", ["inline", "shm", "auto"])
def test_every_combination_of_modes_and_thresholds(topology: str, router_mode: str) -> None:
    roles = TOPOLOGIES[topology]
    for modes in products(len(roles), None, "inline", "shm"):
        for sizes in products(len(roles), None, 0, 65536):
            check(workers_of(roles, modes=modes, sizes=sizes), router_mode)


def test_prefills_override_does_not_decide_for_pixels_that_go_to_encode_workers() -> None:
    roles = TOPOLOGIES["epd of two"]
    found = route(workers_of(roles, modes=["inline", "inline", "shm", "shm"]))
    assert taken(found.pixels) == ("inline", Reason.MODE)
    found = route(workers_of(roles, modes=["shm", "shm", "inline", "inline"]))
    assert taken(found.pixels) == ("segment", None)
    assert found.pixels.mode_source == "worker"


def test_a_disagreement_is_told_with_each_ones_value_and_source() -> None:
    workers = workers_of(("encode", "encode", "prefill", "decode"), modes=["shm", None, None, None])
    found = route(workers, TransportConfig(mode="auto")).pixels
    assert (found.mode, found.mode_source) == (TransportMode.INLINE, "receivers_disagree")
    assert found.detail == (
        "the receivers disagree about mode: grpc://0-encode shm (worker), grpc://1-encode auto (config)"
    )
    workers = workers_of(("encode", "encode", "prefill", "decode"), sizes=[1, 2, None, None])
    found = route(workers, TransportConfig(mode="shm")).pixels
    assert found.detail.endswith("shm_min_bytes: grpc://0-encode 1 (worker), grpc://1-encode 2 (worker)")
    assert found.shm_min_bytes == 1


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        ((), "want a prefill or an aggregated worker: none"),
        (("decode",), "want a prefill or an aggregated worker"),
        (("encode",), "want a prefill or an aggregated worker"),
        (("encode", "decode"), "want a prefill or an aggregated worker"),
        (("aggregated", "aggregated"), r"2 of role aggregated, want 1 at most: grpc://0-aggregated \(aggregated\)"),
        (("prefill", "prefill", "decode"), "2 of role prefill"),
        (("prefill", "decode", "decode"), "2 of role decode"),
        (("aggregated", "decode"), "either an aggregated worker or prefill and decode"),
        (("aggregated", "prefill"), "either an aggregated worker or prefill and decode"),
    ],
)
def test_roles_that_serve_no_request(roles: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        route(workers_of(roles))


def test_every_set_of_roles_is_either_served_or_refused() -> None:
    served = set()
    for count in range(5):
        for roles in itertools.combinations_with_replacement(("aggregated", "encode", "prefill", "decode"), count):
            try:
                pixels, side = receivers_of(workers_of(roles))
            except ConfigError:
                continue
            served.add(tuple(dict.fromkeys(roles)))
            assert len(pixels) >= 1
            assert 1 <= len(side) <= 2
            assert {worker.role for worker in (*pixels, *side)} == set(roles)
    assert served == {
        ("aggregated",),
        ("aggregated", "encode"),
        ("prefill",),
        ("prefill", "decode"),
        ("encode", "prefill"),
        ("encode", "prefill", "decode"),
    }


@pytest.mark.parametrize(
    ("labels", "namespace_id", "reason"),
    [
        ({"shm_namespace_id": OURS}, OURS, None),
        ({"shm_namespace_id": OURS, "shm_uid": "1000"}, OURS, None),
        ({"shm_namespace_id": OURS, "shm_uid": "0"}, OURS, None),
        ({"shm_namespace_id": OURS, "shm_uid": "1001"}, OURS, Reason.UID_DIFFERS),
        ({"shm_namespace_id": OURS, "shm_uid": "x"}, OURS, Reason.UID_DIFFERS),
        ({"shm_namespace_id": OURS, "shm_uid": ""}, OURS, None),
        ({"shm_namespace_id": FOREIGN, "shm_uid": "1000"}, OURS, Reason.NAMESPACE_DIFFERS),
        ({"shm_namespace_id": ""}, "", Reason.NAMESPACE_UNKNOWN),
        ({"shm_namespace_id": OURS}, "", Reason.NAMESPACE_UNKNOWN),
        ({}, OURS, Reason.NAMESPACE_UNKNOWN),
    ],
)
def test_what_labels_prove(labels: dict[str, str], namespace_id: str, reason: Reason | None) -> None:
    found = by_labels(WorkerSpec("grpc://w", labels=labels), namespace_id=namespace_id, uid=UID)
    assert found.reason is reason
    assert (found == SHARED) == (reason is None)
    if reason is Reason.UID_DIFFERS:
        assert f"uid {labels['shm_uid']}" in found.detail
        assert "1000" in found.detail


@pytest.mark.parametrize(
    ("nbytes", "choice"),
    [
        (0, ("inline", Reason.EMPTY)),
        (99, ("inline", Reason.SMALL)),
        (100, ("segment", None)),
        (1 << 40, ("segment", None)),
    ],
)
def test_the_threshold_is_inclusive_and_empty_is_always_inline(nbytes: int, choice: tuple[str, Reason | None]) -> None:
    delivery = route(workers_of(["aggregated"]), TransportConfig(mode="shm", shm_min_bytes=100)).pixels
    assert taken(delivery, nbytes) == choice


def test_what_is_small_is_no_fallback_whatever_else_stands_in_the_way() -> None:
    side = route(workers_of(("prefill", "decode"), modes=["shm", "inline"])).side_tensors
    assert taken(side, 24) == ("inline", Reason.SMALL)
    assert taken(side) == ("inline", Reason.RECEIVERS_DISAGREE)
    assert not Reason.SMALL.is_fallback
    assert Reason.RECEIVERS_DISAGREE.is_fallback


def test_a_delivery_is_narrowed_to_the_one_who_gets_the_tensor() -> None:
    workers = workers_of(("encode", "encode", "prefill", "decode"))
    pixels = route(workers, TransportConfig(mode="shm")).pixels
    assert pixels.to(workers[1]).receivers == (workers[1],)
    assert pixels.to(workers[1]).mode == "shm"
    with pytest.raises(
        ConfigError, match=r"worker grpc://2-prefill is not a receiver of .* grpc://0-encode, grpc://1-enc"
    ):
        pixels.to(workers[2])
    side = route(workers, TransportConfig(mode="shm", shm_min_bytes=0)).side_tensors
    # What was decided for both holds for each: the same message goes to both.
    assert taken(side.to(workers[2])) == ("inline", Reason.SEVERAL_READERS)


def test_sharing_is_asked_under_auto_alone_and_once_a_worker() -> None:
    asked: list[str] = []

    def sharing(worker: WorkerSpec) -> Sharing:
        asked.append(worker.url)
        return SHARED

    for mode, wanted in [("inline", []), ("shm", []), ("auto", ["grpc://0-encode", "grpc://1-encode"])]:
        asked.clear()
        workers = workers_of(TOPOLOGIES["epd of two"])
        plan_route(workers, lambda w, mode=mode: TransportConfig(mode=mode).resolve_in(NO_ENVIRONMENT, w), sharing)
        assert asked == wanted
