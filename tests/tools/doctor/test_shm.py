"""Judgements of shared memory, on mounts that are not at hand."""

from __future__ import annotations

import pytest

from mmcopy.tools.doctor import Status, shm
from mmcopy.tools.units import GIB, MIB

GOOD, WARNING, PROBLEM = Status.GOOD, Status.WARNING, Status.PROBLEM


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
