#!/usr/bin/env python3
"""Cheap rules on every text file of the repository: length, left-over marks, machine paths.

    python3 tests/lint/tidy.py [REPOSITORY]
"""
import re
import subprocess
import sys
from pathlib import Path

LINES_MAX = 800
COLUMNS_MAX = 100
CODE = {".c", ".h", ".cu", ".cuh", ".py", ".sh"}
TEXT = CODE | {".md", ".txt", ".toml", ".ini", ".cmake", ".yml", ".yaml", ".supp"}
# Spelled in two halves, so that this file passes its own rule.
MARKS = re.compile(r"\b(" + "|".join(("TO" "DO", "FIX" "ME", "XX" "X", "HA" "CK")) + r")\b")
# Paths that exist on one machine only. System folders and examples such as /path/to are fine.
MACHINE_PATH = re.compile(r"(?<![\w.}$/])/(?:ho" r"me|ro" r"ot|wo" r"rk|Us" r"ers|mnt|media)/"
                          r"[\w.-]+")


def check_text(file, text):
    """Violations of one file as (line number, message)."""
    found, lines = [], text.splitlines()
    code = Path(file).suffix in CODE
    if code and len(lines) > LINES_MAX:
        found.append((len(lines), f"{len(lines)} lines, at most {LINES_MAX}: split the file"))
    for number, line in enumerate(lines, 1):
        if MARKS.search(line):
            found.append((number, f"left-over mark {MARKS.search(line).group()}"))
        if MACHINE_PATH.search(line):
            found.append((number, f"path of one machine {MACHINE_PATH.search(line).group()}"))
        if code and len(line) > COLUMNS_MAX:
            found.append((number, f"{len(line)} columns, at most {COLUMNS_MAX}"))
    return found


def tracked_files(root):
    """What git tracks, or would once it is added; ignored files are none of ours."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others",
               "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True).stdout.decode().split("\0")
    return sorted(name for name in names if Path(name).suffix in TEXT and (root / name).is_file())


def check_tree(root):
    lines, files = [], tracked_files(root)
    for file in files:
        for number, message in check_text(file, (root / file).read_text(encoding="utf-8")):
            lines.append(f"{file}:{number}: {message}")
    return lines, len(files)


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[2])
    lines, count = check_tree(root)
    print("\n".join(lines + [f"tidy: {count} files, {len(lines)} violations"]))
    return 1 if lines or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
