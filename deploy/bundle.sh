#!/usr/bin/env bash
# A relocatable tarball of Sluice with the CUDA backend, for GPU hosts without network or packages:
# programs, the libraries such a host lacks (ZeroMQ, msgpack, jansson, UCX with its CUDA modules),
# and the Python client with its wheels. The host brings glibc, the driver, CUDA's own libraries
# (cudart, cuBLAS) and NCCL.
#
#   deploy/bundle.sh [--out FILE] [--python 3.12] [--tests]
#
# --tests adds the unit and operation tests and the benches. There, unpack and run bin/sluice-router
# and so on; the client: python3 -m pip install --no-index --find-links wheels sluice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"

out=$root/build/sluice-bundle.tar.gz
python=3.12
tests=OFF
while [ $# -gt 0 ]; do
    case $1 in
    --out) out=$2 && shift ;;
    --python) python=$2 && shift ;;
    --tests) tests=ON ;;
    --help | -h)
        sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *) die "unknown argument $1; known are --out FILE, --python VERSION, --tests and --help" ;;
    esac
    shift
done

folder=$root/build/bundle
ucx=$root/build/ucx
stage=$root/build/bundle-stage/sluice

# UCX with CUDA support, from its wheel: Debian's has none.
fetch_ucx() {
    [ -e "$ucx/libucx/lib/libucp.so" ] && return
    say "fetching UCX with CUDA modules"
    mkdir -p "$ucx"
    quietly "$venv/bin/pip" download --no-deps -d "$ucx" libucx-cu13==1.22.0
    quietly "$venv/bin/python" -m zipfile -e "$ucx"/libucx_cu13-*.whl "$ucx"
}

host_libraries='libc|libm|libdl|librt|libpthread|libresolv|ld-linux[^/]*'
host_libraries+='|libcuda|libcudart|libcublas|libcublasLt|libnccl|libnvidia[^/]*'

# needed FILE...: the shared libraries they load that a bare host lacks. CUDA's and NCCL's are the
# host's, and so is what belongs to glibc.
needed() {
    LD_LIBRARY_PATH=$ucx/libucx/lib ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' |
        sort -u | grep -Ev "/($host_libraries)\.so"
}

copy_libraries() {
    mkdir -p "$stage/lib/ucx"
    cp -L "$ucx"/libucx/lib/lib{ucm,ucp,ucs,uct}.so.0 "$stage/lib/"
    cp -L "$ucx"/libucx/lib/ucx/*.so.0 "$stage/lib/ucx/"
    local library
    needed "$stage"/bin/* | while read -r library; do
        [ -e "$stage/lib/$(basename "$library")" ] || cp -L "$library" "$stage/lib/"
    done
}

copy_client() {
    mkdir -p "$stage/wheels"
    quietly "$venv/bin/pip" wheel --no-deps -w "$stage/wheels" "$root/router/gateway"
    quietly "$venv/bin/pip" download -d "$stage/wheels" --only-binary=:all: \
        --python-version "$python" --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        -r "$root/deploy/requirements.txt"
}

install_packages
make_venv "$root/deploy/requirements.txt"
fetch_ucx
build "$folder" -DCMAKE_BUILD_TYPE=Release "-DCMAKE_C_FLAGS_RELEASE=-O2 -DNDEBUG" \
    -DSLUICE_CUDA=ON -DSLUICE_TESTS=$tests \
    "-DSLUICE_UCX_DIR=$ucx/libucx" \
    -DSLUICE_BUNDLE=ON

say "collecting"
rm -rf "$stage"
mkdir -p "$stage/bin"
cp "$folder"/sluice-{router,prefill,decode} "$stage/bin/"
if [ "$tests" = ON ]; then
    quietly ninja -C "$folder" benches
    find "$folder/tests" -maxdepth 1 -type f -perm -u+x -exec cp {} "$stage/bin/" \;
fi
strip "$stage"/bin/*
copy_libraries
copy_client
cp "$root/LICENSE" "$root/README.md" "$stage/"
tar -C "$(dirname "$stage")" -czf "$out" "$(basename "$stage")"
say "$out: $(du -h "$out" | cut -f1)"
