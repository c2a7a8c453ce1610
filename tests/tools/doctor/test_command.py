"""The command as a whole: on a machine as it should be, and on real machines with something wrong."""

from __future__ import annotations

import os
import pathlib
import resource
import stat

import pytest

from tests.rigs.doctor_command import blocking, doctor, with_private_shm

NAMES = {
    "mmcopy",
    "Python",
    "numpy",
    "grpcio",
    "smg",
    "smg-grpc-proto",
    "kernel",
    "namespace id",
    "shm mount",
    "shm space",
    "shm writable",
    "probe",
    "arena",
    "arena pages",
    "arena memory",
    "leftovers mmcopy",
    "leftovers SMG",
    "locked memory",
    "open files",
    "cores",
    "memory",
    "huge pages",
    "GPUs",
    "torch",
    "cupy",
}
NO_IMPORT = blocking("torch", "cupy")
"""Makes a run quick where torch is not what is tested."""


def test_every_line_says_what_was_found_and_every_fault_what_to_do() -> None:
    ran = doctor("--json")
    assert ran.stderr == ""
    lines, summary = ran.report["lines"], ran.report["summary"]
    names = [line["name"] for line in lines]
    assert len(names) == len(set(names))
    assert set(names) >= NAMES
    for line in lines:
        assert line["found"], line
        assert (line["status"] == "good") == (line["advice"] == ""), line
    statuses = [line["status"] for line in lines]
    assert summary == {status: statuses.count(status) for status in ("good", "warning", "problem")}
    assert ran.code == (1 if summary["problem"] else 0)


def test_neither_table_nor_text_writes_to_standard_error() -> None:
    table = doctor(before=NO_IMPORT)
    text = doctor(before=blocking("torch", "cupy", "rich"))
    assert table.stderr == text.stderr == ""
    assert table.code == text.code
    for ran in (table, text):
        told = ran.stdout
        assert all(name in told for name in NAMES), told
        assert told.rstrip().splitlines()[-1].split(" ")[1] == "good,"


def test_the_process_itself_imports_neither_torch_nor_cupy(tmp_path: pathlib.Path) -> None:
    seen = tmp_path / "modules"
    at_exit = (
        "import atexit, pathlib, sys; "
        f"atexit.register(lambda: pathlib.Path({str(seen)!r}).write_text(' '.join(sys.modules)))"
    )
    doctor("--json", before=at_exit)
    modules = seen.read_text().split()
    assert "mmcopy.tools.doctor" in modules
    assert not {"torch", "cupy", "grpc", "smg"} & set(modules)


@pytest.mark.root
def test_a_shared_memory_of_8_mib_is_a_problem() -> None:
    ran = doctor("--json", before=NO_IMPORT, wrapper=with_private_shm("size=8m"))
    assert ran.stderr == ""
    assert ran.code == 1
    space = ran.line("shm space")
    assert space["status"] == "problem"
    assert "8 MiB" in space["found"]
    assert "8388608" in space["found"]
    assert "--shm-size" in space["advice"]
    assert ran.line("shm writable")["status"] == "good"


@pytest.mark.root
def test_a_roomy_shared_memory_is_good_and_the_exit_code_is_0() -> None:
    ran = doctor("--json", before=NO_IMPORT, wrapper=with_private_shm("size=2g"))
    assert ran.stderr == ""
    for name in ("namespace id", "shm mount", "shm space", "shm writable", "leftovers mmcopy", "leftovers SMG"):
        assert ran.line(name)["status"] == "good"
    assert ran.report["summary"]["problem"] == 0
    assert ran.code == 0


@pytest.mark.root
@pytest.mark.parametrize(
    ("size", "filled", "writable"), [("2g", "2000m", "good"), ("256m", "256m", "problem")], ids=["nearly full", "full"]
)
def test_a_shared_memory_that_others_fill(size: str, filled: str, writable: str) -> None:
    ran = doctor(
        "--json", before=NO_IMPORT, wrapper=with_private_shm(f"size={size}", then=f"fallocate -l {filled} /dev/shm/x")
    )
    assert ran.stderr == ""
    assert ran.line("shm space")["status"] == "warning"
    line = ran.line("shm writable")
    assert line["status"] == writable
    if writable == "problem":
        assert ran.code == 1
        assert "make room" in line["advice"]


@pytest.mark.root
def test_a_read_only_shared_memory_is_a_problem() -> None:
    ran = doctor("--json", before=NO_IMPORT, wrapper=with_private_shm("ro,size=2g"))
    assert ran.stderr == ""
    assert ran.code == 1
    assert ran.line("shm mount")["status"] == "problem"
    assert "remount,rw" in ran.line("shm mount")["advice"]
    assert ran.line("shm writable")["status"] == "problem"


@pytest.mark.root
def test_a_shared_memory_that_this_user_may_not_write_is_a_problem() -> None:
    ran = doctor(
        "--json",
        before=f"import os, mmcopy.tools.cli.doctor; os.setgroups([]); os.setuid(65534)\n{NO_IMPORT}",
        wrapper=with_private_shm("size=2g,mode=0755"),
    )
    assert ran.stderr == ""
    assert ran.code == 1
    line = ran.line("shm writable")
    assert line["status"] == "problem"
    assert "65534" in line["advice"]


def test_no_shared_memory_at_all_is_a_problem(tmp_path: pathlib.Path) -> None:
    missing = tmp_path / "missing"
    ran = doctor("--json", "--shm-dir", str(missing), before=NO_IMPORT)
    assert ran.stderr == ""
    assert ran.code == 1
    assert ran.line("shm mount")["status"] == "problem"
    assert str(missing) in ran.line("shm mount")["found"]
    assert ran.line("namespace id")["status"] == "warning"


@pytest.mark.parametrize(
    ("which", "limit", "name", "found", "advice"),
    [
        (resource.RLIMIT_MEMLOCK, 64 << 10, "locked memory", "64 KiB", "ulimit -l unlimited"),
        (resource.RLIMIT_NOFILE, 64, "open files", "at most 64 ", "ulimit -n"),
    ],
)
def test_a_low_limit_of_the_process_is_a_warning(which: int, limit: int, name: str, found: str, advice: str) -> None:
    lower = f"import resource; resource.setrlimit({which}, ({limit}, {limit}))"
    line = doctor("--json", before=f"{lower}\n{NO_IMPORT}").line(name)
    assert line["status"] == "warning"
    assert found in line["found"]
    assert advice in line["advice"]


def test_packages_that_are_missing_are_no_fault_without_a_gpu(tmp_path: pathlib.Path) -> None:
    ran = doctor("--json", before=NO_IMPORT, environ={"PATH": str(tmp_path)})
    assert ran.stderr == ""
    for name in ("torch", "cupy"):
        line = ran.line(name)
        assert "not installed" in line["found"]
        assert line["status"] == ("good" if ran.line("GPUs")["found"].startswith("none") else "warning")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("import os; os._exit(139)", "ended with 139"),
        (
            "print('noise'); __version__ = '2.11.0'; import types; version = types.SimpleNamespace(cuda='13.0')",
            "2.11.0",
        ),
    ],
    ids=["raises", "crashes", "prints"],
)
def test_a_torch_that_misbehaves_costs_a_line_and_not_the_report(
    tmp_path: pathlib.Path, source: str, found: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = doctor("--json", before=blocking("cupy"), environ={"PYTHONPATH": search})
    assert ran.stderr == ""
    line = ran.line("torch")
    assert found in line["found"]
    assert line["status"] == ("good" if "noise" in source else "problem")


def fake_nvidia_smi(folder: pathlib.Path, script: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_a_gpu_without_torch_is_a_warning_and_its_link_is_told(tmp_path: pathlib.Path) -> None:
    row = "0, NVIDIA H200, 00000000:0F:00.0, 580.95.05, 143771, 5, 5, 8, 16, P0"
    ran = doctor("--json", before=NO_IMPORT, environ=fake_nvidia_smi(tmp_path, f"echo '{row}'"))
    assert ran.line("GPUs")["found"] == "1 GPU, driver 580.95.05"
    link = ran.line("GPU 0")
    assert link["status"] == "warning"
    assert "8 of 16 lanes" in link["found"]
    assert "50%" in link["advice"]
    for name in ("torch", "cupy"):
        assert ran.line(name)["status"] == "warning"
        assert "pip install" in ran.line(name)["advice"]


def test_an_nvidia_smi_that_fails_is_a_warning_with_its_words(tmp_path: pathlib.Path) -> None:
    environ = fake_nvidia_smi(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    line = doctor("--json", before=NO_IMPORT, environ=environ).line("GPUs")
    assert line["status"] == "warning"
    assert "version mismatch" in line["found"]


@pytest.mark.gpu
def test_on_a_real_gpu_cuda_starts_when_asked() -> None:
    ran = doctor("--json", "--cuda")
    assert ran.stderr == ""
    assert ran.line("GPUs")["status"] == "good"
    assert "PCIe gen" in ran.line("GPU 0")["found"]
    assert ran.line("CUDA")["status"] == "good"
