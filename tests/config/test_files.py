"""YAML files, plain mappings and JSON, and options of a command line: strict, and each error names the place."""

from __future__ import annotations

import argparse
import builtins
import json
import pathlib
import re
from dataclasses import asdict

import pytest

from mmcopy import TransportConfig, TransportMode, WorkerSpec
from mmcopy.config import (
    ResolvedDtype,
    ResolvedTransport,
    Role,
    RouterConfig,
    add_transport_args,
    load_config,
    transport_from_args,
    transport_from_dict,
    worker_from_dict,
)
from mmcopy.errors import ConfigError, MissingDependencyError

FILE = """\
# the router
multimodal_tensor_transport: auto
multimodal-shm-min-bytes: 64KiB
probe_max_age_s: 2.5
workers:
  - &first
    url: grpc://10.0.0.1:9000
    role: encode
    engine: tokenspeed
    multimodal_shm_min_bytes: 1MiB
    labels: {supports_vision: true, shm_namespace_id: "x:27"}
  - url: grpc://10.0.0.2:9000
    worker_type: regular
    runtime_type: vllm
    multimodal_tensor_transport:
"""


@pytest.fixture
def write(tmp_path: pathlib.Path):  # type: ignore[no-untyped-def]
    def write(text: str | bytes) -> pathlib.Path:
        path = tmp_path / "router.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_a_file(write) -> None:  # type: ignore[no-untyped-def]
    path = write(FILE)
    config = load_config(path)
    assert config.transport == TransportConfig(mode="auto", shm_min_bytes=65536, probe_max_age_s=2.5)
    assert config.workers == (
        WorkerSpec(
            "grpc://10.0.0.1:9000",
            role="encode",
            engine="tokenspeed",
            multimodal_shm_min_bytes=1 << 20,
            labels={"supports_vision": "true", "shm_namespace_id": "x:27"},
        ),
        WorkerSpec("grpc://10.0.0.2:9000", role=Role.AGGREGATED, engine="vllm"),
    )
    resolved = config.transport.resolve(config.workers[0], environ={})
    assert resolved == ResolvedTransport(TransportMode.AUTO, f"config ({path}:2)", 1 << 20, "worker")
    assert config.transport.resolve(environ={}).shm_min_bytes_source == f"config ({path}:3)"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "workers: []\n", "workers:\n"])
def test_a_file_that_sets_nothing(write, text: str) -> None:  # type: ignore[no-untyped-def]
    assert load_config(write(text)) == RouterConfig()


def test_the_file_that_the_variable_names(write) -> None:  # type: ignore[no-untyped-def]
    path = write("mode: shm\n")
    assert load_config(environ={"MMCOPY_CONFIG": str(path)}).transport.mode == "shm"
    assert load_config(environ={}) == RouterConfig()
    assert load_config(path, environ={"MMCOPY_CONFIG": "/nonexistent"}).transport.mode == "shm"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mode: shm\nmultimodal_tensor_transprt: shm", r":2: multimodal_tensor_transprt is no setting, .*did you mean "
         "'multimodal_tensor_transport'"),
        ("\n\nmode: shmm", r":3: mode is 'shmm', want one of inline, shm, auto; did you mean 'shm'"),
        ("mode: no", r":1: mode is 'no', want one of"),
        ("shm_min_bytes: 1_000", r":1: shm_min_bytes is '1_000', want a number of bytes"),
        ("shm_min_bytes: 1:30", r":1: shm_min_bytes is '1:30'"),
        ("shm_min_bytes: 64KB", r":1: shm_min_bytes is '64KB'"),
        ("shm_min_bytes: [1]", r":1: shm_min_bytes is \('1',\)"),
        ("mode: shm\nmultimodal_tensor_transport: auto", r":2: multimodal_tensor_transport is 'auto', but mode "
         r"\(.*:1\), which is the same setting, is 'shm'"),
        ("mode: shm\nmode: shm", r":2: mode is given twice, first at .*:1"),
        ("workers: {url: a}", r":1: workers: want a list of workers"),
        ("workers: [a]", r"workers\[0\]: want a mapping"),
        ("workers:\n - role: encode", r":2: a worker needs a url"),
        ("workers:\n - url: a\n   rol: encode", r":3: rol is no setting, .*did you mean 'role'"),
        ("workers:\n - url: a\n   role: encoder", r":3: role is 'encoder', .*did you mean 'encode'"),
        ("workers:\n - url: a\n   engine: vlm", r":3: engine is 'vlm', .*did you mean 'vllm'"),
        ("workers:\n - url: a\n   multimodal_tensor_transport: Shm", r":3: .*did you mean 'shm'"),
        ("workers:\n - url: a\n   labels: {x: [1]}", r":3: labels: 'x' is \('1',\), want text"),
        ("workers:\n - url: a\n - url: a", r"worker a is listed twice"),
        ("- a", r":1: want a mapping"),
        ("a: b: c", r":1: not YAML: mapping values are not allowed here"),
        ("a: \x07", r": not YAML"),
        ("a: !!python/object/apply:os.system ['id']", r":1: the tag .*python.* is not taken"),
        ("? [a]\n: b", r":1: a name must be text"),
        ("workers: &a [*a]", r":1: more than 20000 values, or deeper than 8 levels"),
        ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b]\n"
         "d: &d [*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d]", "more than 20000 values"),
    ],
)  # fmt: skip
def test_what_a_file_may_not_say(write, text: str, why: str) -> None:  # type: ignore[no-untyped-def]
    path = write(text)
    with pytest.raises(ConfigError, match=why) as caught:
        load_config(path)
    assert str(path) in str(caught.value) or "listed twice" in why


def test_files_that_cannot_be_read(write, tmp_path: pathlib.Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"cannot read .*missing.yaml: .*No such file"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match=r"cannot read .*router.yaml: .*codec can't decode"):
        load_config(write(b"mode: \xff"))
    with pytest.raises(ConfigError, match=r"router.yaml has 1048577 bytes, want 1048576 at most"):
        load_config(write("#" * ((1 << 20) + 1)))


def test_without_pyyaml_the_extra_is_named(write, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    real = builtins.__import__

    def without_yaml(name: str, *args, **options):  # type: ignore[no-untyped-def]
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_yaml)
    with pytest.raises(MissingDependencyError, match=r"mmcopy\[yaml\]"):
        load_config(write("mode: shm"))


def test_everything_goes_through_json_and_comes_back(write) -> None:  # type: ignore[no-untyped-def]
    config = load_config(write(FILE))
    back = RouterConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert back == config
    assert back.transport.origins == config.transport.origins
    for value in (
        config.transport,
        config.workers[0],
        config.transport.resolve(config.workers[0], environ={"SMG_MM_SHM_MIN_BYTES": "x"}),
        ResolvedDtype("float16", "default", ("a",)),
    ):
        assert type(value)(**json.loads(json.dumps(asdict(value)))) == value  # type: ignore[operator]


def test_plain_mappings_are_as_strict() -> None:
    assert transport_from_dict({"mode": "shm", "multimodal_tensor_transport": "shm"}) == TransportConfig(mode="shm")
    assert transport_from_dict({"shm_min_bytes": 65536, "multimodal-shm-min-bytes": "64k"}).shm_min_bytes == 65536
    assert worker_from_dict({"url": "w", "worker_type": "prefill"}) == WorkerSpec("w", role="prefill")
    with pytest.raises(ConfigError, match=r"the request: shm_min_byte is no setting.*'shm_min_bytes'"):
        transport_from_dict({"shm_min_byte": 1}, place="the request")
    with pytest.raises(ConfigError, match=r"role is 'encode', but worker_type .* is 'prefill'"):
        worker_from_dict({"url": "w", "worker_type": "prefill", "role": "encode"})
    with pytest.raises(ConfigError, match="the name 1 is no text"):
        transport_from_dict({1: 2})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"config: workers\[0\]: labels: 'a' is 1, want text"):
        RouterConfig.from_dict({"workers": [{"url": "w", "labels": {"a": 1}}]})


# ---- the command line ------------------------------------------------------


def parsed(*arguments: str, prefix: str = "") -> TransportConfig:
    parser = argparse.ArgumentParser()
    add_transport_args(parser.add_argument_group("transport"), prefix)
    return transport_from_args(parser.parse_args(arguments), prefix)


def test_options() -> None:
    assert parsed() == TransportConfig()
    config = parsed("--multimodal-tensor-transport", "auto", "--multimodal-shm-min-bytes=1MiB")
    assert config == TransportConfig(mode="auto", shm_min_bytes=1 << 20)
    resolved = config.resolve(environ={})
    assert resolved.mode_source == "config (--multimodal-tensor-transport)"
    assert resolved.shm_min_bytes_source == "config (--multimodal-shm-min-bytes)"
    prefixed = parsed("--router-multimodal-tensor-transport", "shm", prefix="router-")
    assert prefixed == TransportConfig(mode="shm")
    assert prefixed.resolve(environ={}).mode_source == "config (--router-multimodal-tensor-transport)"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--multimodal-tensor-transport", "shmm"], "argument --multimodal-tensor-transport: .*did you mean 'shm'"),
        (["--multimodal-tensor-transport", "SHM"], "want one of inline, shm, auto; did you mean 'shm'"),
        (["--multimodal-tensor-transport", "rdma"], "want one of inline, shm, auto"),
        (["--multimodal-shm-min-bytes", "1_000"], "argument --multimodal-shm-min-bytes: .*'1_000', want a number"),
        (["--multimodal-shm-min-bytes=-1"], "'-1', want a number of bytes, 0 or more"),
    ],
)
def test_bad_options_end_the_program_with_2(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(*arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert re.search(why, error), error
