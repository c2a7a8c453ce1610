"""First encodes of a model's encoders, cold and after a prewarm. Each is measured in a process of its own.

    python -m mmcopy.tools.bench.encoder cold|warm SPEC_AS_JSON

prints one line of JSON at the end. A process can be cold once; ``mmcopy prewarm`` starts two.

The steady state of a shape is measured right behind its first encode, before the next shape's. A host changes its pace
for seconds at a time (beside an H200 the same encode took 17 or 31 ms), and an encoder that waits for its host follows
it: steady encodes of all shapes, long behind the first ones of all, made ratios of two paces, which showed the host and
not the encoder (benches/RESULTS.md).
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from mmcopy import prewarm
from mmcopy.encoders import encoder_dtypes, explain_encoder_dtypes
from mmcopy.errors import ConfigError, MmcopyError
from mmcopy.prewarm import PrewarmOptions, parse_shapes
from mmcopy.prewarm.build import build_encoders, has_weights, load_encoders, read_config
from mmcopy.prewarm.compiles import count_graphs
from mmcopy.prewarm.feed import make_tensors
from mmcopy.prewarm.inputs import Shape, as_config, family_for
from mmcopy.prewarm.target import parse_device
from mmcopy.receive.receiver import Receiver

__all__ = ["Spec", "measure_cold", "measure_warm"]


@dataclass(frozen=True)
class Spec:
    """What is measured; every field is of JSON's types.

    ``sizes`` are those that the prewarm uses (the family's own where a modality has none), ``checks`` further ones to
    encode afterwards. ``compile``: none, blocks or tower; torch gives up a function after
    ``recompile_limit`` compilations (None: torch's own, 8). ``rounds``: encodes of the steady state, each shape.
    ``cudnn_attention``: False keeps torch from cuDNN's attention, for all of the process.
    """

    model: str
    device: str = "cpu"
    dtype: str = "bfloat16"
    attention: str | None = None
    cudnn_attention: bool = True
    compile: str = "none"
    backend: str = "inductor"
    role: str = "aggregated"
    sizes: dict[str, list[list[list[int]]]] = field(default_factory=dict)
    checks: dict[str, list[list[list[int]]]] = field(default_factory=dict)
    modalities: list[str] | None = None
    max_pixels: int | None = None
    recompile_limit: int | None = None
    deadline_s: float = 300.0
    rounds: int = 10


class Bench:
    """The encoders of a spec, and encodes that are timed until the device is done."""

    def __init__(self, spec: Spec) -> None:
        import torch

        self.spec = spec
        if not spec.cudnn_attention:
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.device = parse_device(spec.device)
        config = read_config(spec.model)
        build = load_encoders if has_weights(spec.model) else build_encoders
        source = {"path": spec.model} if has_weights(spec.model) else {"config": config}
        started = time.perf_counter()
        self.model = build(**source, device=self.device, dtype=spec.dtype, attention=spec.attention)
        self.synchronize()
        self.build_seconds = time.perf_counter() - started
        self.weights = "those of the directory" if has_weights(spec.model) else "random"
        self.config = as_config(self.model.config)
        self.family = family_for(self.config)
        self.dtypes = encoder_dtypes(self.model)
        self.parameters = self._compile(torch)

    def _compile(self, torch: Any) -> int:
        """Compile in place what the spec says; how many parameters the encoders have."""
        if self.spec.recompile_limit is not None:
            torch._dynamo.config.recompile_limit = self.spec.recompile_limit
        paths = {each.path for each in explain_encoder_dtypes(self.model).values() if each.dtype}
        parameters = 0
        for tower in map(self.model.get_submodule, paths):
            parameters += sum(each.numel() for each in tower.parameters())
            if self.spec.compile == "tower":
                tower.compile(backend=self.spec.backend)
            elif self.spec.compile == "blocks":
                lists = [each for each in tower.modules() if isinstance(each, torch.nn.ModuleList)]
                for block in max(lists, key=len, default=[]):
                    block.compile(backend=self.spec.backend)
        return parameters

    def synchronize(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def modalities(self) -> list[str]:
        """Those of the spec, or all that the prewarm would warm: what has an encoder, and inputs for it."""
        if self.spec.modalities is not None:
            return self.spec.modalities
        return [name for name in self.dtypes if name in self.family.modalities]

    def shape(self, modality: str, items: Any = None) -> Shape:
        """The fitted shape of a spec's entry; None: the family's first.

        Raises :class:`ConfigError` for a modality that is not encoded.
        """
        if modality not in self.dtypes or modality not in self.family.modalities:
            raise ConfigError(
                f"{self.config['model_type']} cannot be measured with {modality}: it has encoders for "
                f"{', '.join(self.dtypes)}, {type(self.family).__name__} inputs for {', '.join(self.family.modalities)}"
            )
        if items is None:
            items = self.family.shapes(self.config, modality, self.spec.max_pixels)[0].items
        return self.family.fit(self.config, Shape(modality, tuple(map(tuple, items))))

    def encode(self, shape: Shape) -> float:
        """Seconds of one encode of inputs that are on the device already."""
        import torch

        inputs = self.family.inputs(self.config, shape)
        tensors = make_tensors(inputs, dtype=self.dtypes[shape.modality], device=self.device)
        with torch.inference_mode():
            self.synchronize()
            started = time.perf_counter()
            self.family.encode(self.model, shape.modality, tensors)
            self.synchronize()
            return time.perf_counter() - started

    def steady(self, shape: Shape) -> dict[str, float]:
        """Median and interquartile range of further encodes."""
        seconds = [self.encode(shape) for _ in range(self.spec.rounds)]
        low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
        return {"steady_s": statistics.median(seconds), "steady_iqr_s": high - low}

    def about(self) -> dict[str, Any]:
        """What was measured on and with."""
        import torch
        import transformers

        from .machine import describe

        return {
            "machine": describe(self.spec.device),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "model_type": self.config["model_type"],
            "encoder_parameters": self.parameters,
            "weights": self.weights,
            "build_s": self.build_seconds,
        }


def measure_cold(spec: Spec) -> dict[str, Any]:
    """The process's first encode, of the first size of each modality, and the steady state after it."""
    bench = Bench(spec)
    rows = []
    for modality in bench.modalities:
        given = spec.sizes.get(modality) or spec.checks.get(modality)
        shape = bench.shape(modality, given[0] if given else None)
        before = count_graphs()
        seconds = bench.encode(shape)
        rows.append({"shape": str(shape), "first_s": seconds, "graphs": count_graphs() - before, **bench.steady(shape)})
    return {"about": bench.about(), "rows": rows}


def measure_warm(spec: Spec) -> dict[str, Any]:
    """A prewarm, then each of its shapes and of the checks: the first encode, and right behind it the steady state."""
    bench = Bench(spec)
    with Receiver(spec.device) as receiver:
        report = prewarm(
            bench.model,
            role=spec.role,
            device=spec.device,
            options=PrewarmOptions(
                modalities=spec.modalities,
                sizes=parse_shapes(spec.sizes),
                max_pixels=spec.max_pixels,
                deadline_s=spec.deadline_s,
            ),
            receiver=receiver,
        )
    shapes = list(report.warmed)
    for modality, entries in spec.checks.items():
        shapes += [bench.shape(modality, items) for items in entries]
    rows: list[dict[str, Any]] = []
    for shape in dict.fromkeys(shapes):
        before = count_graphs()
        seconds = bench.encode(shape)
        rows.append({"shape": str(shape), "warmed": shape in report.warmed, "first_s": seconds,
                     "graphs": count_graphs() - before, **bench.steady(shape)})  # fmt: skip
        rows[-1]["ratio"] = seconds / rows[-1]["steady_s"]
        if report.family is not None:
            forecast = report.forecast(shape.modality, *shape.items)
            rows[-1] |= {"forecast_compiles": forecast.compiles, "forecast_plans": forecast.plans,
                         "forecast": str(forecast)}  # fmt: skip
    return {"about": bench.about(), "report": report.as_dict(), "rows": rows}


def main(argv: list[str]) -> int:
    """One measurement; JSON on stdout."""
    kind, text = argv
    spec = Spec(**json.loads(text))
    if kind not in ("cold", "warm"):
        raise ConfigError(f"{kind!r}: want cold or warm")
    try:
        result = measure_cold(spec) if kind == "cold" else measure_warm(spec)
    except MmcopyError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"spec": dataclasses.asdict(spec), **result}), flush=True)
    if any(each["outcome"] == "hung" for each in result.get("report", {}).get("shapes", ())):
        os._exit(0)  # torch's threads under the encode that was left behind would abort an orderly end
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
