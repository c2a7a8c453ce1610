"""Each judgement by itself, on values of machines that are not at hand."""

from __future__ import annotations

import pathlib
import subprocess
import types

import pytest

from mmcopy.arena import DEFAULT_ARENA_BYTES
from mmcopy.config import SHARED, Reason, Sharing, WorkerSpec
from mmcopy.doctor import Line, Status, arena, as_text, examine, exit_code, gpu, machine, proof, shm, versions
from mmcopy.doctor.cgroup import CgroupLimits, read_limits
from mmcopy.doctor.line import GIB, MIB, bytes_text

GOOD, WARNING, PROBLEM = Status.GOOD, Status.WARNING, Status.PROBLEM


def test_a_fault_without_advice_is_refused() -> None:
    with pytest.raises(ValueError, match="'shm space' is a warning"):
        Line("shm space", WARNING, "8 MiB")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (64 << 10, "64 KiB"),
        (8 * MIB, "8 MiB"),
        (int(23.5 * GIB), "23.5 GiB"),
        (3 << 40, "3 TiB"),
    ],
)
def test_bytes_in_words(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text


def test_only_a_problem_makes_the_exit_code_1() -> None:
    good, warning = Line("a", GOOD, "x"), Line("b", WARNING, "y", "do")
    assert exit_code([good, warning]) == 0
    assert exit_code([good, warning, Line("c", PROBLEM, "z", "do")]) == 1


@pytest.mark.parametrize(
    ("module", "function", "name"),
    [(versions, "lines", "versions"), (gpu, "find_gpus", "GPUs"), (shm, "writable", "shared memory")],
)
def test_a_check_that_breaks_becomes_a_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, shm_dir: pathlib.Path, module: types.ModuleType, function: str, name: str
) -> None:
    def broken(*arguments: object) -> object:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(module, function, broken)
    monkeypatch.setattr(gpu, "_is_importable", lambda name: False)
    lines = examine(shm_dir=str(shm_dir))
    (line,) = [line for line in lines if line.status is PROBLEM]
    assert line.name == name
    assert line.found == "this check failed: RuntimeError: no such thing"
    told = {line.name for line in lines}
    assert {"shm space", "leftovers SMG", "memory"} < told, "the others, and what came before the failure"


def test_the_text_keeps_to_its_width_and_puts_advice_below() -> None:
    text = as_text([Line("cores", GOOD, "2"), Line("shm space", WARNING, "few " * 40, "get more " * 30)], width=80)
    rows = text.splitlines()
    assert max(map(len, rows)) <= 80
    assert rows[0] == "good     cores      2"
    assert rows[1].startswith("warning  shm space  few few")
    assert any(row.startswith("                    -> get more") for row in rows)
    assert rows[-1] == "1 good, 1 warning, 0 problems"


# -- shared memory

MOUNTINFO = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,size=12g
25 24 0:23 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=64k
31 24 0:99 / /dev/shmore rw,nosuid - ext4 /dev/vdb rw
30 25 0:27 / /dev/shm ro,relatime shared:3 master:1 - tmpfs tmpfs rw,size=24g
40 27 0:40 / /mnt/a\\040b rw - tmpfs tmpfs rw
this row is damaged
"""


@pytest.mark.parametrize(
    ("path", "point", "fstype"),
    [
        ("/dev/shm", "/dev/shm", "tmpfs"),
        ("/dev/shm/sub", "/dev/shm", "tmpfs"),
        ("/dev/shmore", "/dev/shmore", "ext4"),
        ("/dev/shmost", "/dev", "devtmpfs"),
        ("/home", "/", "ext4"),
        ("/mnt/a b", "/mnt/a b", "tmpfs"),
    ],
)
def test_the_deepest_and_last_mount_counts(path: str, point: str, fstype: str) -> None:
    found = shm.mount_of(path, MOUNTINFO)
    assert found is not None
    assert (found.point, found.fstype) == (point, fstype)


def test_a_mount_is_judged_by_kind_and_options() -> None:
    read_only = shm.mount_of("/dev/shm", MOUNTINFO)
    assert read_only is not None
    assert "rw" not in read_only.options
    assert shm.mount(read_only, "/dev/shm").status is PROBLEM
    assert shm.mount(shm.mount_of("/home", MOUNTINFO), "/home").status is WARNING
    assert shm.mount(shm.mount_of("/mnt/a b", MOUNTINFO), "/mnt/a b").status is GOOD
    assert shm.mount(shm.mount_of("/x", ""), "/x").status is WARNING


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [
        (8 * MIB, 8 * MIB, PROBLEM),
        (64 * MIB, 64 * MIB, PROBLEM),
        (139 * MIB - 4096, 139 * MIB - 4096, PROBLEM),
        (139 * MIB, 139 * MIB, WARNING),
        (GIB - 4096, GIB - 4096, WARNING),
        (GIB, GIB, GOOD),
        (24 * GIB, 139 * MIB - 1, WARNING),
        (24 * GIB, 0, WARNING),
    ],
)
def test_the_room(total: int, free: int, status: Status) -> None:
    assert shm.space(total=total, free=free, shm_dir="/dev/shm").status is status


def test_no_namespace_id_means_auto_goes_inline() -> None:
    assert shm.namespace("", "/dev/shm").status is WARNING
    assert shm.namespace("b:7", "/dev/shm").found == "b:7"


# -- the arena


@pytest.mark.parametrize(
    ("trial", "status", "found"),
    [
        (arena.Trial(), GOOD, "sealed in its size and against running; read-only for workers"),
        (arena.Trial(is_noexec=False), GOOD, "(the seal against running: not known to this kernel); read-only"),
        (arena.Trial(is_read_only=False), WARNING, "but workers could write to it"),
        (arena.Trial("memfd_create: errno 1"), WARNING, "no: memfd_create: errno 1"),
    ],
)
def test_an_arena_is_judged_by_its_seals(trial: arena.Trial, status: Status, found: str) -> None:
    line = arena.seals(trial)
    assert line.status is status
    assert found in line.found


@pytest.mark.parametrize(
    ("setting", "found"),
    [("advise", "huge where"), ("force", "huge where"), ("never", "small"), ("deny", "small"), ("unknown", "small")],
)
def test_the_arenas_pages_are_told(setting: str, found: str) -> None:
    line = arena.huge_pages(setting)
    assert line.status is GOOD
    assert line.found.startswith(found)
    assert f"shmem_enabled is {setting}" in line.found


LEAST = DEFAULT_ARENA_BYTES // 7 * 8 + 64


@pytest.mark.parametrize(
    ("available", "limits", "status"),
    [
        (LEAST, CgroupLimits(), GOOD),
        (LEAST - 4096, CgroupLimits(), WARNING),
        (None, CgroupLimits(), GOOD),
        (8 * GIB, CgroupLimits(memory_bytes=LEAST), GOOD),
        (8 * GIB, CgroupLimits(memory_bytes=LEAST, memory_used_bytes=MIB), WARNING),
        (8 * GIB, CgroupLimits(memory_bytes=MIB, memory_used_bytes=2 * MIB), WARNING),
        (0, CgroupLimits(memory_bytes=8 * GIB), WARNING),
    ],
)
def test_the_default_arena_has_to_fit(available: int | None, limits: CgroupLimits, status: Status) -> None:
    line = arena.room(available, limits)
    assert line.status is status
    assert "512 MiB" in line.found


@pytest.mark.parametrize(
    ("limit", "status"), [(None, GOOD), (DEFAULT_ARENA_BYTES, GOOD), (DEFAULT_ARENA_BYTES - 1, WARNING), (0, WARNING)]
)
def test_a_worker_with_a_gpu_has_to_lock_an_arena(limit: int | None, status: Status) -> None:
    assert arena.locked(limit).status is status


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_limit_of_locked_memory_is_for_gpus(has_gpu: bool) -> None:
    names = [line.name for line in arena.lines(has_gpu=has_gpu)]
    assert names == ["arena", "arena pages", "arena memory", *["arena locked"] * has_gpu]


def test_without_an_arena_its_pages_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "TRIAL_BYTES", 1 << 60)
    first, second = arena.lines(has_gpu=False)
    assert (first.name, first.status, second.name) == ("arena", WARNING, "arena memory")


FOREIGN = Sharing(Reason.NAMESPACE_DIFFERS, "theirs is a:1, ours b:2")
TAKEN, REFUSED = arena.Offer(True, "handed over at /s"), arena.Offer(False, "the worker takes none at /s")


@pytest.mark.parametrize(
    ("sharing", "offer", "status", "found"),
    [
        (SHARED, TAKEN, GOOD, "takes the arena, auto uses it; reads what uid"),
        (FOREIGN, TAKEN, GOOD, "takes the arena, auto uses it; theirs is a:1, ours b:2"),
        (SHARED, REFUSED, GOOD, "auto uses segments; no arena (the worker takes none at /s)"),
        (FOREIGN, REFUSED, WARNING, "theirs is a:1, ours b:2; no arena (the worker takes none at /s)"),
    ],
)
def test_a_worker_that_takes_the_arena_needs_no_other_proof(
    sharing: Sharing, offer: arena.Offer, status: Status, found: str
) -> None:
    line = proof.judge_worker(WorkerSpec("grpc://a:1", labels={"mmcopy_endpoint": "/s"}), sharing, offer)
    assert line.status is status
    assert found in line.found


# -- versions


@pytest.mark.parametrize(
    ("version", "status"),
    [("1.26.0", GOOD), ("2.4.6+local", GOOD), ("1.25.9", PROBLEM), ("1.26rc1", GOOD), ("1", PROBLEM), (None, GOOD)],
)
def test_an_optional_package_may_be_missing_but_not_too_old(version: str | None, status: Status) -> None:
    assert versions.package("numpy", version, oldest=(1, 26), needed_by="mmcopy").status is status


@pytest.mark.parametrize(
    ("installed", "built", "debug", "status"),
    [
        ("0.1.0", "0.1.0", False, GOOD),
        (None, "0.1.0", False, GOOD),
        ("0.1.0", "0.1.0", True, WARNING),
        ("0.2.0", "0.1.0", False, PROBLEM),
    ],
)
def test_package_and_native_module_are_of_one_build(
    installed: str | None, built: str, debug: bool, status: Status
) -> None:
    assert versions.extension(installed=installed, built=built, debug=debug, path="x.so").status is status


# -- limits, cores, memory


@pytest.mark.parametrize(
    ("limit", "has_gpu", "status"),
    [
        (None, True, GOOD),
        (64 << 10, False, WARNING),
        (8 * MIB - 1, False, WARNING),
        (8 * MIB, False, GOOD),
        (8 * MIB, True, WARNING),
        (256 * MIB, True, GOOD),
        (0, False, WARNING),
    ],
)
def test_locked_memory(limit: int | None, has_gpu: bool, status: Status) -> None:
    assert machine.memlock(limit, has_gpu=has_gpu).status is status


@pytest.mark.parametrize(("limit", "status"), [(None, GOOD), (1024, GOOD), (1023, WARNING)])
def test_open_files(limit: int | None, status: Status) -> None:
    assert machine.open_files(limit).status is status


@pytest.mark.parametrize(
    ("affinity", "quota", "status"), [(16, None, GOOD), (1, None, WARNING), (16, 0.5, WARNING), (16, 2.0, GOOD)]
)
def test_cores(affinity: int, quota: float | None, status: Status) -> None:
    assert machine.cores(affinity, quota).status is status


@pytest.mark.parametrize(
    ("available", "limits", "shm_bytes", "status"),
    [
        (8 * GIB, CgroupLimits(), 24 * GIB, GOOD),
        (None, CgroupLimits(), 0, GOOD),
        (100 * MIB, CgroupLimits(), GIB, WARNING),
        (8 * GIB, CgroupLimits(memory_bytes=4 * GIB), 2 * GIB, GOOD),
        (8 * GIB, CgroupLimits(memory_bytes=GIB), 2 * GIB, WARNING),
        (8 * GIB, CgroupLimits(memory_bytes=4 * GIB, memory_used_bytes=4 * GIB - 1), 2 * GIB, WARNING),
        (8 * GIB, CgroupLimits(memory_bytes=GIB, memory_used_bytes=2 * GIB), 0, WARNING),
    ],
)
def test_memory(available: int | None, limits: CgroupLimits, shm_bytes: int, status: Status) -> None:
    assert machine.memory(available, limits, shm_bytes=shm_bytes).status is status


def test_available_memory_is_read_in_bytes() -> None:
    assert machine.memory_available("MemTotal:       24684084 kB\nMemAvailable:   24000000 kB\n") == 24_576_000_000
    assert machine.memory_available("MemTotal: 1 kB\n") is None


NEVER = "always within_size advise [never] deny force\n"
DENY = "always within_size advise never [deny] force\n"
FORCE = "always within_size advise never deny [force]\n"


@pytest.mark.parametrize(
    ("fstype", "options", "setting", "has_gpu", "status", "found"),
    [
        ("tmpfs", ("rw",), NEVER, True, WARNING, "huge=never on /dev/shm"),
        ("tmpfs", ("rw", "huge=advise"), NEVER, True, WARNING, "huge=advise"),
        ("tmpfs", ("rw", "huge=within_size"), NEVER, True, GOOD, "huge=within_size"),
        ("tmpfs", ("rw", "huge=always"), DENY, True, WARNING, "deny, for all"),
        ("tmpfs", ("rw",), FORCE, True, GOOD, "force, for all"),
        ("tmpfs", ("rw",), NEVER, False, GOOD, "huge=never"),
        ("tmpfs", ("rw",), "", True, GOOD, "offers none"),
        ("ext4", ("rw",), NEVER, True, GOOD, "offers none"),
    ],
)
def test_huge_pages(
    fstype: str, options: tuple[str, ...], setting: str, has_gpu: bool, status: Status, found: str
) -> None:
    line = shm.huge_pages(shm.Mount("/dev/shm", fstype, options), setting, has_gpu=has_gpu)
    assert line.status is status
    assert found in line.found
    assert ("remount,huge=within_size /dev/shm" in line.advice) is (status is WARNING)
    assert shm.huge_pages(None, setting, has_gpu=has_gpu).status is GOOD


def proc_self(folder: pathlib.Path, cgroup: str, mounts: list[tuple[str, pathlib.Path, str, str]]) -> pathlib.Path:
    """A /proc/self of the test's own; a mount is (root, mount point, fstype, super options)."""
    (folder / "cgroup").write_text(cgroup)
    rows = [f"31 30 0:28 {root} {point} rw - {fstype} cgroup {options}" for root, point, fstype, options in mounts]
    (folder / "mountinfo").write_text("\n".join(rows))
    return folder


def test_control_groups_version_2_take_the_tightest_limit_on_the_way_up(tmp_path: pathlib.Path) -> None:
    top = tmp_path / "sys"
    group = top / "pods" / "one"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")
    (top / "pods" / "cpu.max").write_text("150000 100000\n")
    (top / "pods" / "memory.max").write_text(f"{GIB}\n")
    (top / "pods" / "memory.current").write_text(f"{MIB}\n")
    proc = proc_self(tmp_path, "0::/pods/one\n", [("/", top, "cgroup2", "rw")])
    assert read_limits(proc) == CgroupLimits(num_cpus=1.5, memory_bytes=GIB, memory_used_bytes=MIB)


def test_control_groups_version_1_in_a_container_that_sees_its_group_as_the_root(tmp_path: pathlib.Path) -> None:
    cpu, memory = tmp_path / "cpu", tmp_path / "memory"
    cpu.mkdir()
    memory.mkdir()
    (cpu / "cpu.cfs_quota_us").write_text("50000\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    (memory / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (memory / "memory.usage_in_bytes").write_text("4096\n")
    proc = proc_self(
        tmp_path,
        "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
        [("/docker/abc", cpu, "cgroup", "rw,cpu,cpuacct"), ("/docker/abc", memory, "cgroup", "rw,memory")],
    )
    assert read_limits(proc) == CgroupLimits(num_cpus=0.5, memory_bytes=2 * GIB, memory_used_bytes=4096)


def test_no_limits_where_none_are_set_or_readable(tmp_path: pathlib.Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (memory / "cpu.cfs_quota_us").write_text("-1\n")
    proc = proc_self(tmp_path, "4:memory,cpu:/\n0::/../else\n", [("/", memory, "cgroup", "rw,memory,cpu")])
    assert read_limits(proc) == CgroupLimits()
    assert read_limits(tmp_path / "missing") == CgroupLimits()


# -- GPUs


def a_gpu(**changed: object) -> gpu.Gpu:
    fields = {"generation": 5, "generation_max": 5, "width": 16, "width_max": 16, "power_state": "P0"} | changed
    return gpu.Gpu(0, "NVIDIA H200", "00000000:0F:00.0", 141 * GIB, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "status", "text"),
    [
        (a_gpu(), GOOD, "gen 5 of 5, 16 of 16 lanes, at most 63 GB/s"),
        (a_gpu(width=8), WARNING, "8 of 16 lanes"),
        (a_gpu(generation=1, power_state="P8"), GOOD, "an idle GPU lowers its link (P8)"),
        (a_gpu(generation=3), WARNING, "gen 3 of 5"),
        (a_gpu(generation=3, power_state=None), GOOD, "look again under load"),
        (a_gpu(generation=None), GOOD, "not told"),
        (a_gpu(width=None), GOOD, "not told"),
        (a_gpu(generation_max=None, width_max=None), GOOD, "gen 5 of 5, 16 of 16"),
    ],
)
def test_a_link_is_judged_by_width_always_and_by_generation_under_load(
    found: gpu.Gpu, status: Status, text: str
) -> None:
    line = gpu.link(found)
    assert line.status is status
    assert text in line.found


def test_rows_of_nvidia_smi() -> None:
    found = gpu.parse_nvidia_smi(
        "0, NVIDIA H200, 00000000:0F:00.0, 580.95.05, 143771, 5, 5, 16, 16, P0\n"
        "1, Tesla T4, 00000000:10:00.0, 580.95.05, [N/A], [N/A], 3, [N/A], 16, [N/A]\n"
        "some warning\n"
    )
    assert found.driver == "580.95.05"
    assert found.gpus[0] == gpu.Gpu(0, "NVIDIA H200", "00000000:0F:00.0", 143771 * MIB, 5, 5, 16, 16, "P0")
    assert found.gpus[1] == gpu.Gpu(1, "Tesla T4", "00000000:10:00.0", None, None, 3, None, 16, None)
    assert gpu.parse_nvidia_smi("") == gpu.GpusFound(())


def test_gpus_on_the_bus_without_a_driver(tmp_path: pathlib.Path) -> None:
    def device(name: str, **files: str) -> None:
        (tmp_path / name).mkdir()
        for file_name, text in files.items():
            (tmp_path / name / file_name).write_text(f"{text}\n")

    device("0000:00:01.0", vendor="0x8086", **{"class": "0x030000"}, device="0x1")
    device("0000:00:02.0", vendor="0x10de", **{"class": "0x040300"}, device="0x2")
    device(
        "0000:0f:00.0",
        vendor="0x10de",
        **{"class": "0x030200"},
        device="0x2335",
        current_link_speed="32.0 GT/s PCIe",
        max_link_speed="32.0 GT/s PCIe",
        current_link_width="16",
        max_link_width="16",
    )
    device(
        "0000:10:00.0",
        vendor="0x10de",
        **{"class": "0x030000"},
        device="0x1",
        current_link_speed="Unknown",
        current_link_width="255",
    )
    gpus = gpu.read_sysfs(tmp_path)
    assert gpus == (
        gpu.Gpu(0, "NVIDIA device 0x2335", "0000:0f:00.0", None, 5, 5, 16, 16),
        gpu.Gpu(1, "NVIDIA device 0x1", "0000:10:00.0"),
    )
    assert gpu.gpus(gpu.GpusFound(gpus)).status is WARNING
    assert gpu.read_sysfs(tmp_path / "missing") == ()


def test_an_nvidia_smi_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpu, "SMI_TIMEOUT_S", 0.2)
    line = gpu.gpus(gpu.find_gpus())
    assert line.status is WARNING
    assert "no answer within" in line.found


def test_an_import_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "slow_package.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "IMPORT_TIMEOUT_S", 0.5)
    told = gpu.probe(["slow_package"], start_cuda=False)
    assert told == {"slow_package": {"error": "importing slow_package took more than 0 s"}}


@pytest.mark.parametrize(
    ("told", "has_gpu", "status"),
    [
        (None, False, GOOD),
        (None, True, WARNING),
        ({"version": "2.11.0", "cuda": "13.0"}, True, GOOD),
        ({"version": "2.11.0", "cuda": None}, True, WARNING),
        ({"version": "2.11.0", "cuda": None}, False, GOOD),
        ({"error": "ImportError: libcudart"}, False, PROBLEM),
    ],
)
def test_torch(told: dict[str, str | None] | None, has_gpu: bool, status: Status) -> None:
    assert gpu.torch_package(told, has_gpu=has_gpu).status is status


@pytest.mark.parametrize(
    ("majors", "told", "has_gpu", "status"),
    [
        (set(), None, False, GOOD),
        (set(), None, True, WARNING),
        ({"13"}, {"version": "14.2.0"}, True, GOOD),
        ({"12"}, {"version": "14.2.0"}, True, WARNING),
        ({"12", "13"}, {"version": "14.2.0"}, True, PROBLEM),
        ({"13"}, {"error": "ImportError: libcudart"}, True, PROBLEM),
        ({"13"}, {"error": "ImportError: libcudart"}, False, WARNING),
    ],
)
def test_cupy_has_to_match_torch(
    monkeypatch: pytest.MonkeyPatch, majors: set[str], told: dict[str, str] | None, has_gpu: bool, status: Status
) -> None:
    monkeypatch.setattr(gpu, "_cupy_majors", lambda: majors)
    torch = {"version": "2.11.0", "cuda": "13.0"}
    assert gpu.cupy_package(told, torch=torch, has_gpu=has_gpu).status is status


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (None, WARNING),
        ({"error": "RuntimeError: no NVIDIA driver"}, PROBLEM),
        ({"devices": 2, "equal": False}, PROBLEM),
        ({"devices": 2, "equal": True}, GOOD),
    ],
)
def test_the_trial_of_cuda(told: dict[str, object] | None, status: Status) -> None:
    assert gpu.cuda(told).status is status


def test_find_gpus_falls_back_to_the_bus_without_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu, "read_sysfs", lambda: (a_gpu(),))
    assert gpu.find_gpus() == gpu.GpusFound((a_gpu(),), driver=None, trouble="")


def test_find_gpus_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(subprocess, "run", refused)
    monkeypatch.setattr(gpu, "read_sysfs", lambda: ())
    assert "Permission denied" in gpu.find_gpus().trouble
