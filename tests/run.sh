#!/usr/bin/env bash
# Everything, from a fresh clone: installs, builds with sanitizers and runs all tests.
#
#   tests/run.sh [--quick]
#
#   1. address and undefined-behaviour sanitizers: unit tests, operations, fuzz corpora, then the
#      cluster tests on real programs, the lints and the goldens' own checks
#   2. where there is nvcc, programs, tests and benches are built with the CUDA backend (nothing of
#      it runs)
#   3. thread sanitizer: the unit tests and one cluster test
#
# --quick leaves out the third. The last line is the total. Exits 1 if anything failed, hung or did
# not build.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib/setup.sh"

quick=no
case ${1:-} in
"") ;;
--quick) quick=yes ;;
*) die "unknown argument $1; the only one is --quick" ;;
esac

# $root/build/test-address and -thread, unless told otherwise.
builds=${SLUICE_TEST_BUILDS:-$root/build/test}
reports=$(mktemp -d "${TMPDIR:-/tmp}/sluice-reports.XXXXXX")
trap 'rm -rf "$reports"' EXIT
supp=$root/tests/sanitizers

export UCX_WARN_UNUSED_ENV_VARS=n UCX_MEM_EVENTS=n
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export LSAN_OPTIONS=suppressions=$supp/leak.supp:print_suppressions=0
export TSAN_OPTIONS=suppressions=$supp/thread.supp:second_deadlock_stack=1

# step NAME SECONDS COMMAND...: the command writes a JUnit report to $reports/NAME.xml. A step that
# fails without writing one (it hung, crashed or never started) counts as one failed test.
step() {
    local name=$1 seconds=$2
    shift 2
    say "$name (at most $seconds s)"
    timeout --kill-after=20 "$seconds" "$@"
    local code=$?
    [ "$code" -ne 124 ] && [ "$code" -ne 137 ] || say "$name did not end within $seconds s"
    printf '%s' "$code" >"$reports/$name.code"
}

run_ctest() {
    step "$1" "$2" ctest --test-dir "$3" -j "$jobs" --output-on-failure --timeout 240 \
        --output-junit "$reports/$1.xml"
}

run_pytest() {
    local name=$1 seconds=$2 folder=$3
    shift 3
    SLUICE_BUILD_DIR=$folder step "$name" "$seconds" "$venv/bin/python" -m pytest -q \
        -c "$root/tests/pytest.ini" --rootdir "$root/tests" -p no:cacheprovider \
        --junitxml "$reports/$name.xml" "$@"
}

# A build that fails is a failed test too; the rest still runs.
build_or_count() {
    local name=$1
    shift
    (build "$@")
    printf '%s' "$?" >"$reports/$name.code"
}

cd "$root" || exit 1
(install_packages && make_venv "$root/deploy/requirements-test.txt") || die "cannot install"

build_or_count build-address "$builds-address" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DSLUICE_SANITIZE=address,undefined -DSLUICE_CUDA=OFF
run_ctest unit-address 400 "$builds-address"
run_pytest cluster-address 1500 "$builds-address"
if command -v nvcc >/dev/null; then
    build_targets="all benches" build_or_count build-cuda "$builds-cuda" \
        -DCMAKE_BUILD_TYPE=Release -DSLUICE_CUDA=ON
else
    say "no nvcc here: the CUDA backend is not compiled"
fi
if [ "$quick" = no ]; then
    # GCC 12 warns wrongly of these when it also instruments for threads.
    build_or_count build-thread "$builds-thread" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DSLUICE_SANITIZE=thread -DSLUICE_CUDA=OFF \
        -DCMAKE_C_FLAGS="-Wno-error=dangling-pointer -Wno-error=stringop-overread"
    run_ctest unit-thread 500 "$builds-thread"
    run_pytest cluster-thread 300 "$builds-thread" -m tsan
fi
"$venv/bin/python" "$root/tests/totals.py" "$reports"
