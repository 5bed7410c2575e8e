#!/usr/bin/env bash
# From a fresh clone to a readable completion: installs what is missing, builds, starts a router
# with two prefill and two decode ranks (tp 2 in both pools) on this machine, streams a completion
# by the small model that comes with Sluice, and stops everything.
#
#   deploy/quickstart.sh [--keep] [--prompt TEXT]
#
# --keep leaves the cluster running and says how to talk to it and how to stop it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"

keep=no
prompt=$'import json\n\ndef read_config(path):\n'
while [ $# -gt 0 ]; do
    case $1 in
    --keep) keep=yes ;;
    --prompt)
        [ $# -ge 2 ] || die "--prompt: a text is expected"
        prompt=$2
        shift
        ;;
    --help | -h)
        sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *) die "unknown argument $1; known are --keep, --prompt TEXT and --help" ;;
    esac
    shift
done

model=$root/deploy/models/tiny-coder
folder=${SLUICE_BUILD_DIR:-$root/build/quickstart}
run=$(mktemp -d "${TMPDIR:-/tmp}/sluice-quickstart.XXXXXX")
names=() pids=() router_pid=

# start NAME PROGRAM ARGUMENT...: in the background, its log in $run/NAME.log.
start() {
    local name=$1 program=$2
    shift 2
    UCX_WARN_UNUSED_ENV_VARS=n nohup "$folder/$program" "$@" \
        >"$run/$name.log" 2>&1 </dev/null &
    names+=("$name")
    pids+=("$!")
}

show_logs() {
    local log
    for log in "$run"/*.log; do
        printf -- '---- %s ----\n' "$log" >&2
        tail -n 15 "$log" >&2
    done
}

# Ranks first, so that they can say goodbye to the router. Every one must exit with 0.
stop_all() {
    local i failed=0
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
        [ "$i" -eq 0 ] || kill -TERM "${pids[$i]}" 2>/dev/null || true
    done
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
        [ "$i" -ne 0 ] || kill -TERM "${pids[0]}" 2>/dev/null || true
        if ! wait "${pids[$i]}"; then
            printf '%s did not end well\n' "${names[$i]}" >&2
            failed=1
        fi
    done
    pids=() names=()
    return $failed
}

# On the way out after an error: nothing of ours stays behind.
abandon() {
    local code=$?
    if [ ${#pids[@]} -gt 0 ]; then
        show_logs
        kill -KILL "${pids[@]}" 2>/dev/null || true
        wait "${pids[@]}" 2>/dev/null || true
    fi
    rm -rf "$run"
    exit "$code"
}
trap abandon EXIT

# wait_file PATH PID: until the file is there; fails when the process ends first.
wait_file() {
    local tries
    for ((tries = 0; tries < 600; tries++)); do
        [ -e "$1" ] && return
        kill -0 "$2" 2>/dev/null || die "the router ended before it was ready"
        read -r -t 0.05 <> <(:) || true # a pause of 50 ms between looks
    done
    die "the router was not ready within 30 s"
}

install_packages
make_venv "$root/deploy/requirements.txt"
build "$folder" -DCMAKE_BUILD_TYPE=Release -DSLUICE_TESTS=OFF -DSLUICE_CUDA=OFF

say "starting a router, 2 prefill ranks and 2 decode ranks (logs in $run)"
start router sluice-router --client-bind tcp://127.0.0.1:0 --node-bind tcp://127.0.0.1:0 \
    --ready-file "$run/ready"
wait_file "$run/ready" "${pids[0]}"
client=$(sed -n 's/^client //p' "$run/ready")
node=$(sed -n 's/^node //p' "$run/ready")
for rank in 0 1; do
    start "prefill-$rank" sluice-prefill --router "$node" --model "$model" --tp 2 --rank "$rank" \
        --token-budget 2048 --pages 256
    start "decode-$rank" sluice-decode --router "$node" --model "$model" --tp 2 --rank "$rank" \
        --max-batch 64 --pages 256
done
sluice=$venv/bin/sluice
"$sluice" status --router "$client" --until-ready 4 --timeout 60

say "completion"
printf '%s' "$prompt"
"$sluice" generate --router "$client" --prompt "$prompt" --temperature 0 --max-tokens 96 \
    --timeout 120

if [ "$keep" = yes ]; then
    trap - EXIT
    say "the cluster goes on; logs are in $run"
    printf 'talk to it:  %s generate --router %s --prompt "def main():"\n' "$sluice" "$client"
    printf 'look at it:  %s status --router %s\n' "$sluice" "$client"
    printf 'stop it:     kill %s && kill %s\n' "${pids[*]:1}" "${pids[0]}"
    exit 0
fi
say "stopping"
stop_all || die "not everything ended with exit code 0"
say "done"
