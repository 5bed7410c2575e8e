"""Where the programs under test are, how they were built, and the environment they run in."""
import functools
import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPRESSIONS = ROOT / "tests" / "sanitizers"


@functools.cache
def build_dir():
    """$SLUICE_BUILD_DIR, or the newest folder under build/ that holds the programs."""
    named = os.environ.get("SLUICE_BUILD_DIR")
    if named:
        return Path(named).resolve()
    found = sorted(ROOT.glob("build/*/sluice-router"), key=lambda p: p.stat().st_mtime)
    return found[-1].parent if found else ROOT / "build" / "missing"


def program(name):
    return build_dir() / name


def programs_exist():
    return all(program(n).exists() for n in ("sluice-router", "sluice-prefill", "sluice-decode"))


@functools.cache
def sanitizers():
    """"address,undefined", "thread", or "" for an ordinary build."""
    cache = build_dir() / "CMakeCache.txt"
    match = re.search(r"^SLUICE_SANITIZE:\w+=(.*)$", cache.read_text(), re.M) if cache.exists() \
        else None
    return match.group(1) if match else ""


def patience():
    """How much longer than an ordinary build this one may take."""
    return 10 if "thread" in sanitizers() else 4 if sanitizers() else 1


def environment():
    env = dict(os.environ)
    env["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    if sanitizers():
        env["UCX_MEM_EVENTS"] = "n"  # UCX's hooks on mmap and the sanitizers' own do not mix
    # A small quarantine: the test of flat memory must not measure it.
    env["ASAN_OPTIONS"] = "exitcode=99:detect_leaks=1:quarantine_size_mb=4"
    env["UBSAN_OPTIONS"] = "print_stacktrace=1:halt_on_error=1"
    env["LSAN_OPTIONS"] = f"suppressions={SUPPRESSIONS / 'leak.supp'}:print_suppressions=0"
    env["TSAN_OPTIONS"] = (f"suppressions={SUPPRESSIONS / 'thread.supp'}:exitcode=66:"
                           "second_deadlock_stack=1:history_size=4")
    return env
