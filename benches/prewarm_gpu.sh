#!/usr/bin/env bash
# First encodes of the published Qwen2.5-VL and Qwen3-VL towers on one GPU, eager and compiled, cold and after a prewarm.
# Random weights, bfloat16; an image of 1024 x 1024, a second one, a short video; and sizes that the prewarm did not use.
#
#     benches/prewarm_gpu.sh WHEEL_FOLDER OUT_FOLDER [DEVICE]
#
# WHEEL_FOLDER holds mmcopy's wheel (`make wheel`); nothing is downloaded. python3 must have torch and transformers 5.
# OUT_FOLDER gets a folder a run (prewarm.json, prewarm.md, log) and prewarm.md with all tables. Exit code 1 when a run failed
# or was left out.
# MODELS and MODES choose: eager, or compiled as tower or blocks; each with -no-cudnn keeps torch from cuDNN's attention and has
# no cold process. Compiled ones take the longest and come last. ROUNDS is the number of steady encodes. LIMIT_S bounds each
# run and TOTAL_S all of them: what does not begin in time is left out, and what runs then is ended.
cd "$(dirname "$0")/.." || exit 1
. benches/steps.sh
export HF_HUB_OFFLINE=1
device=${3:-cuda:0}
for mode in ${MODES:-eager eager-no-cudnn tower}; do
    options=() how=${mode%-no-cudnn}
    [ "$how" = "$mode" ] || options+=(--no-cudnn-attention --no-cold)
    case $how in
    eager) ;;
    tower | blocks) options+=(--compile "$how") ;;
    *) echo "MODES has '$mode', want eager, tower or blocks, each with or without -no-cudnn" >&2 && exit 2 ;;
    esac
    for model in ${MODELS:-qwen3_vl qwen2_5_vl}; do
        name=$model-$mode
        t0=$SECONDS
        left=$((${TOTAL_S:-420} - SECONDS))
        limit=${LIMIT_S:-300}
        [ "$limit" -le "$left" ] || limit=$left
        if [ "$limit" -lt 20 ]; then
            echo "== $name: left out, $left s are left of ${TOTAL_S:-420}"
            status=1
            continue
        fi
        echo "== $name"
        mkdir -p "$out/$name"
        timeout "$limit" python3 -m mmcopy prewarm --model "${CONFIGS:-benches/encoders}/$model.json" \
            --device "$device" ${options[@]+"${options[@]}"} ${BACKEND:+--backend "$BACKEND"} \
            --image ${IMAGES:-1024x1024 768x1280} --video ${VIDEOS:-8x448x448 8x336x560} \
            --check-image ${CHECK_IMAGES:-896x640} --check-video ${CHECK_VIDEOS:-8x392x336} \
            --recompile-limit 64 --rounds "${ROUNDS:-10}" --deadline-s 180 --out "$out/$name" >"$out/$name/log" 2>&1
        rc=$?
        tail -n 12 "$out/$name/log"
        echo "== $name: exit $rc after $((SECONDS - t0)) s"
        [ "$rc" -eq 0 ] || status=1
    done
done
for folder in "$out"/*/; do
    [ -f "$folder/prewarm.md" ] && { echo "### $(basename "$folder")"; echo; cat "$folder/prewarm.md"; }
done >"$out/prewarm.md"
exit $status
