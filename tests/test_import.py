"""``import mmcopy`` needs numpy alone and does nothing: no thread, no file, no word."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import subprocess
import sys
import textwrap
import tomllib
from typing import Any

import mmcopy

ROOT = pathlib.Path(__file__).resolve().parent.parent

# After numpy, which starts threads and opens files of its own.
WATCH = """
import json, os, sys
import numpy

OPTIONAL = ("torch", "cupy", "grpc", "grpc_health", "google", "rich", "smg", "smg_grpc_proto", "smg_grpc_servicer",
            "ml_dtypes", "PIL", "tokenizers", "transformers")

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"import mmcopy asked for {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
sys.dont_write_bytecode = True
opened = []
watching = True

def hook(event, args):
    if watching and event == "open" and not str(args[0]).endswith((".py", ".pyc")):
        opened.append(str(args[0]))

sys.addaudithook(hook)
descriptors, tasks = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
import mmcopy
watching = False
print(json.dumps({
    "optional": sorted(set(OPTIONAL) & set(sys.modules)),
    "opened": opened,
    "descriptors": len(os.listdir("/proc/self/fd")) - descriptors,
    "threads": len(os.listdir("/proc/self/task")) - tasks,
    "sent": mmcopy.Sender(mmcopy.TransportConfig()).send(numpy.arange(6)).nbytes,
}))
"""


def in_a_process(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_with_numpy_alone_it_imports_quietly_and_works() -> None:
    done = in_a_process(WATCH, "-W", "error")
    assert done.stderr == ""
    assert done.returncode == 0
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen == {"optional": [], "opened": [], "descriptors": 0, "threads": 0, "sent": 48}


def test_the_version_lives_in_cargo_toml() -> None:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]["version"]
    assert mmcopy.__version__ == version
    assert importlib.metadata.version("mmcopy") == version


def test_a_debug_build_says_so_when_imported() -> None:
    script = """
    import importlib.util, sys, types, warnings
    path = {path!r}
    spec = importlib.util.spec_from_file_location("mmcopy._native", path)
    real = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(real)
    debug = types.ModuleType("mmcopy._native")
    debug.__dict__.update(real.__dict__, DEBUG_BUILD={debug})
    sys.modules["mmcopy._native"] = debug
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import mmcopy
    print([(w.category.__name__, str(w.message)) for w in caught if "mmcopy" in str(w.message)])
    """
    path = mmcopy._native.__file__
    quiet = in_a_process(script.format(path=path, debug=False))
    assert (quiet.stderr, quiet.stdout) == ("", "[]\n")
    loud = in_a_process(script.format(path=path, debug=True))
    assert loud.stderr == ""
    assert "RuntimeWarning" in loud.stdout
    assert "debug build" in loud.stdout
