# Sourced, from the project's root, by the scripts beside it that run on a GPU machine; not a program of its own. They are
# called with WHEEL_FOLDER OUT_FOLDER.
#
# Installs the wheels of WHEEL_FOLDER (mmcopy's, from `make wheel`, and whatever wheels this machine lacks; nothing is
# downloaded) into a temporary folder, not into the environment, and defines `step`. Sets $out, and $status to exit with.
set -u -o pipefail
wheels=$1 out=$2
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || exit 1
# The package under test is the wheel: python/ of the checkout must not be on the path.
export PYTHONPATH=$site PATH=$site/bin:$PATH PYTHONUNBUFFERED=1
mkdir -p "$out"
status=0
step() { # NAME SECONDS COMMAND...: its output to OUT_FOLDER/NAME.log and the end of it to the screen
    local name=$1 limit=$2 t0=$SECONDS
    shift 2
    [[ " ${STEPS:-$name} " == *" $name "* ]] || return 0
    echo "== $name: $*"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.log" | tail -n 60
    local rc=${PIPESTATUS[0]}
    echo "== $name: exit $rc after $((SECONDS - t0)) s"
    [ "$rc" -eq 0 ] || status=1
}
