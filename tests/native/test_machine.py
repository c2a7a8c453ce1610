"""What the machine and its control groups leave a process, read from files of the test's own."""

from __future__ import annotations

import os
import pathlib

from mmcopy._native import available_cores, memory_budget

MIB, GIB = 1 << 20, 1 << 30
NOTHING = {"available": None, "limited_by": None, "machine": None, "limit": None, "used": None}


def proc(folder: pathlib.Path, cgroup: str, mounts: list[tuple[str, pathlib.Path, str, str]]) -> pathlib.Path:
    """A /proc of the test's own; a mount is (root, mount point, fstype, super options)."""
    (folder / "self").mkdir()
    (folder / "self/cgroup").write_text(cgroup)
    rows = [f"31 30 0:28 {root} {point} rw - {fstype} cgroup {options}" for root, point, fstype, options in mounts]
    (folder / "self/mountinfo").write_text("\n".join(rows))
    return folder


def test_version_2_takes_the_tightest_limit_on_the_way_up(tmp_path: pathlib.Path) -> None:
    top = tmp_path / "sys"
    group = top / "pods" / "one"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (top / "pods" / "memory.max").write_text(f"{GIB}\n")
    (top / "pods" / "memory.current").write_text(f"{MIB}\n")
    (tmp_path / "meminfo").write_text("MemTotal: 24684084 kB\nMemAvailable:   24000000 kB\n")
    assert memory_budget(proc(tmp_path, "0::/pods/one\n", [("/", top, "cgroup2", "rw")])) == {
        "available": GIB - MIB,
        "limited_by": f"memory.max {GIB} of {top}/pods",
        "machine": 24_576_000_000,
        "limit": GIB,
        "used": MIB,
    }


def test_idle_file_pages_are_free_and_a_full_parent_is_tighter_than_a_smaller_group(tmp_path: pathlib.Path) -> None:
    top = tmp_path / "sys"
    group = top / "pod"
    group.mkdir(parents=True)
    for folder, limit, used, idle in ((top, 8 * GIB, 7 * GIB, MIB), (group, 4 * GIB, 3 * GIB, 2 * GIB)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {idle}\n")
    budget = memory_budget(proc(tmp_path, "0::/pod\n", [("/", top, "cgroup2", "rw")]))
    assert (budget["limit"], budget["used"]) == (8 * GIB, 7 * GIB - MIB)
    assert budget["available"] == GIB + MIB


def test_version_1_in_a_container_that_sees_its_group_as_the_root(tmp_path: pathlib.Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    (memory / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (memory / "memory.usage_in_bytes").write_text("4096\n")
    mounts = [("/docker/abc", memory, "cgroup", "rw,memory")]
    budget = memory_budget(proc(tmp_path, "4:memory:/docker/abc\n", mounts))
    assert (budget["limit"], budget["used"], budget["available"]) == (2 * GIB, 4096, 2 * GIB - 4096)


def test_no_limits_where_none_are_set_or_readable(tmp_path: pathlib.Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    mounts = [("/", memory, "cgroup", "rw,memory,cpu")]
    assert memory_budget(proc(tmp_path, "4:memory,cpu:/\n0::/../else\n", mounts)) == NOTHING
    assert memory_budget(tmp_path / "missing") == NOTHING


def test_a_limit_below_its_use_leaves_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "memory.max").write_text(f"{MIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * MIB}\n")
    assert memory_budget(proc(tmp_path, "0::/\n", [("/", tmp_path, "cgroup2", "rw")]))["available"] == 0


def test_cores_are_those_of_the_affinity_at_most() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))
