#!/usr/bin/env bash
# What a group of ranks needs a machine with two GPUs or more for: installs mmcopy from a wheel, runs the gpu tests of the
# groups (NCCL with one rank and with two, a rank that dies), the benchmark of the strategies, and writes logs and figures
# into a folder.
#
#     benches/tp.sh WHEEL_FOLDER OUT_FOLDER
#
# WHEEL_FOLDER holds mmcopy's wheel (`make wheel`) and whatever wheels this machine lacks; nothing is downloaded. python3
# must have torch, cupy, pytest and its plugins timeout and benchmark. Packages go to a temporary folder, not into the
# environment.
cd "$(dirname "$0")/.." || exit 1
. benches/steps.sh
nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv | tee "$out/gpu.csv"
nvidia-smi topo -m | tee "$out/topology.txt"
gpus=$(nvidia-smi -L | wc -l)
step tests 400 python3 -m pytest tests/gpu/test_parallel_cuda.py tests/gpu/test_parallel_leases_cuda.py \
    -m gpu -q -W default -p no:cacheprovider
step cpu-tests 300 python3 -m pytest tests/group tests/tokenspeed/test_ranks.py -q -W default -p no:cacheprovider
for ((ranks = 2; ranks <= gpus; ranks *= 2)); do
    step "bench-$ranks" 240 python3 -m mmcopy bench tp --device cuda --ranks "$ranks" --threads 8 --seconds 3 --json
    step "bench-$ranks-lease" 240 python3 -m mmcopy bench tp --device cuda --ranks "$ranks" --payload lease \
        --sizes 64KiB,1MiB,16MiB,64MiB,256MiB --seconds 3 --json
    step "bench-$ranks-torchrun" 120 python3 -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        -m mmcopy bench tp --device cuda --threads 4 --sizes 64MiB,256MiB --seconds 2 --json
done
exit $status
