# Installing and building, for deploy/quickstart.sh and tests/run.sh. Source it; `root` is the
# repository. Every function is quick when its work is done already.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
packages=(gcc cmake ninja-build ccache pkg-config python3-venv libucx-dev ucx-utils libzmq3-dev
          libmsgpack-dev libjansson-dev libcmocka-dev)
venv=${SLUICE_VENV:-$root/.venv}
jobs=${SLUICE_JOBS:-$(nproc)}

say() {
    printf '== %s\n' "$*"
}

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Runs a command silently; shows the end of what it said if it fails.
quietly() {
    local log
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        rm -f "$log"
        die "failed: $*"
    fi
    rm -f "$log"
}

missing_packages() {
    local name
    for name in "${packages[@]}"; do
        dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q '^install ok installed$' ||
            printf '%s\n' "$name"
    done
}

# Debian's packages, only those that are not there.
install_packages() {
    command -v dpkg-query >/dev/null || {
        say "no dpkg here: taking for granted what these Debian packages hold: ${packages[*]}"
        return
    }
    local missing as_root=()
    mapfile -t missing < <(missing_packages)
    [ ${#missing[@]} -eq 0 ] && return
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || die "need root or sudo to install: ${missing[*]}"
        as_root=(sudo)
    fi
    say "installing ${missing[*]}"
    quietly "${as_root[@]}" apt-get update
    quietly "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends "${missing[@]}"
}

# make_venv REQUIREMENTS: a virtual environment with these and the sluice package (editable).
# Does nothing while the files that decide its contents are the same.
make_venv() {
    local requirements=$1 stamp wanted
    stamp=$venv/.sluice-stamp-$(basename "$requirements")
    wanted=$(cat "$root"/deploy/requirements*.txt "$root/router/gateway/pyproject.toml" |
        sha256sum | cut -d" " -f1)-$root
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    say "making the Python environment $venv"
    [ -x "$venv/bin/python" ] || quietly python3 -m venv "$venv"
    quietly "$venv/bin/python" -m pip install -q --disable-pip-version-check \
        -r "$requirements" -e "$root/router/gateway"
    printf '%s' "$wanted" >"$stamp"
}

# build FOLDER [CMAKE ARGUMENT...]: configures and builds $build_targets, or all; a failed build
# shows its end.
build() {
    local folder=$1
    shift
    say "building $folder"
    quietly cmake -S "$root" -B "$folder" -G Ninja -DCMAKE_C_COMPILER_LAUNCHER=ccache \
        -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache "$@"
    # shellcheck disable=SC2086 # a list
    quietly ninja -C "$folder" -j "$jobs" ${build_targets:-all}
}
