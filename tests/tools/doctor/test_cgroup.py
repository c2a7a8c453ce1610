"""The limits of control groups, read from files of the test's own."""

from __future__ import annotations

import pathlib

from mmcopy.tools.doctor.cgroup import CgroupLimits, read_limits
from mmcopy.tools.doctor.line import GIB, MIB


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


def test_what_is_left_counts_as_it_does_for_an_arena(tmp_path: pathlib.Path) -> None:
    """Idle file pages are free, and a parent that is nearly full is tighter than a smaller group inside."""
    top = tmp_path / "sys"
    group = top / "pod"
    group.mkdir(parents=True)
    for folder, limit, used, idle in ((top, 8 * GIB, 7 * GIB, MIB), (group, 4 * GIB, 3 * GIB, 2 * GIB)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {idle}\n")
    proc = proc_self(tmp_path, "0::/pod\n", [("/", top, "cgroup2", "rw")])
    assert read_limits(proc) == CgroupLimits(memory_bytes=8 * GIB, memory_used_bytes=7 * GIB - MIB)


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
