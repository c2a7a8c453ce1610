#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one go: installs mmcopy from a wheel, runs the gpu tests, the demo onto cuda:0
# and the receive benchmarks, and writes logs, figures and a plot into a folder.
#
#     benches/gpu.sh WHEEL_FOLDER OUT_FOLDER [WHEEL_FOLDER_BEFORE]
#
# With WHEEL_FOLDER_BEFORE, which holds the wheel of another version, both are timed in turn. STEPS picks some of the steps
# (STEPS="tests versus"); those that benches/RESULTS.md has figures of are h2d, flat, e2e, versus, calls, writers and rest.
# WHEEL_FOLDER holds mmcopy's wheel (`make wheel`) and whatever wheels this machine lacks; nothing is downloaded. python3
# must have torch, cupy, matplotlib, pytest and its plugins timeout and benchmark. Packages go to a temporary folder, not
# into the environment.
cd "$(dirname "$0")/.." || exit 1
. benches/steps.sh
nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv | tee "$out/gpu.csv"
step doctor 60 python3 -m mmcopy doctor
step tests 400 python3 -m pytest tests/gpu tests/receive/test_walk.py tests/tools/doctor tests/tools/bench -m gpu -q -W default -p no:cacheprovider
for engine in tokenspeed vllm; do
    step "demo-$engine" 90 python3 -m mmcopy demo --engine "$engine" --device cuda:0 --requests 6 --json
done
step demo-epd 90 python3 -m mmcopy demo --topology epd --device cuda:0 --json
step demo-arena 90 python3 -m mmcopy demo --gateway mmcopy --device cuda:0 --json
step h2d 180 python3 -m mmcopy bench h2d --device cuda:0 --threads 8 --json
step flat 120 python3 -m mmcopy bench h2d --device cuda:0 --threads 8 --sizes 64MiB,256MiB,1GiB,4GiB --batches none --no-baselines
step e2e 360 python3 -m mmcopy bench e2e --device cuda:0 --json
for bench in h2d e2e; do
    step "plot-$bench" 60 python3 benches/plot.py "$out/$bench.log" "$out/$bench.png"
done
if [ $# -gt 2 ]; then
    before=$(mktemp -d)
    trap 'rm -rf "$site" "$before"' EXIT
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$before" "$3"/*.whl || exit 1
    step versus 480 python3 benches/versus.py "$before" "$site" --device cuda:0 --rounds 7
fi
step calls 60 python3 benches/calls.py --device cuda:0
step writers 60 python3 benches/writers.py --threads 4,8,12,16
step rest 90 python3 benches/rest.py --device cuda:0
step sweep 120 python3 -m mmcopy bench copy --device cuda:0
exit $status
