#!/usr/bin/env python3
"""Who may include whom: the folder rules of the design, checked on #include lines.

    python3 tests/lint/layering.py [REPOSITORY]

Prints each violation as FILE:LINE: text, and exits 1 if there is any. A project header is named by
its path from the repository's root; a folder may include itself and what ALLOWED lists. A library's
headers stay in the folders that OWNERS lists.
"""
import re
import sys
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]')

BASE, WIRE, MODEL, KV = "common/base", "common/wire", "common/model", "common/kv"
NET, TRANSFER, LAYERS = "common/net", "common/transfer", "kernels/layers"
COMMON = [BASE, WIRE, MODEL, KV, NET, TRANSFER]
# What a backend may know: plain data and status codes, never messages, pages or sockets.
OPS = [BASE, MODEL, "common/wire/sampling.h", "kernels"]

# Folder -> folders (or single headers) it may include, itself always among them. The seam "kernels"
# is the files directly in kernels/. The longest matching folder counts.
ALLOWED = {
    BASE: [],
    WIRE: [BASE],
    MODEL: [BASE],
    KV: [BASE],
    NET: [BASE, WIRE, MODEL, KV],
    TRANSFER: [BASE, WIRE, MODEL, KV],
    "kernels": [BASE, MODEL, "common/wire/sampling.h"],
    "kernels/ref": OPS,
    "kernels/cpu": OPS,
    "kernels/cuda": OPS,
    LAYERS: COMMON + ["kernels"],
    "node": COMMON + ["kernels", LAYERS],
    "prefill_node": COMMON + ["kernels", LAYERS, "node"],
    "decode_node": COMMON + ["kernels", LAYERS, "node"],
    "router": COMMON,
}
# Single files with more: the collectives' table stands on the transfer layer's group, and one file
# alone knows every backend.
EXCEPTIONS = {
    "kernels/collectives.h": [TRANSFER],
    "kernels/cpu/collectives.c": [TRANSFER],
    "kernels/registry.c": ["kernels/ref", "kernels/cpu", "kernels/cuda"],
}
# Headers of a library -> folders they may appear in.
OWNERS = [
    (re.compile(r"^(msgpack\.h|msgpack/)"), [WIRE]),
    (re.compile(r"^z(mq|mq_utils|sock|czmq)\.h"), [NET]),
    (re.compile(r"^(ucp|ucs|uct|ucm)/"), [TRANSFER]),
    (re.compile(r"^(cuda|nccl|cublas|curand|cupti|nvml|nvtx)"), ["kernels/cuda"]),
    (re.compile(r"^(cblas|lapacke|openblas|f77blas)"), ["kernels/cpu"]),
    (re.compile(r"^jansson"), [MODEL]),
]
SUFFIXES = {".c", ".h", ".cu", ".cuh"}
ROOTS = ("common", "kernels", "node", "prefill_node", "decode_node", "router")


def folder_of(path, known):
    """The longest known folder that holds `path`, or None."""
    parents = [str(p) for p in Path(path).parents]
    return next((p for p in parents if p in known), None)


def owner_violation(file, header):
    for pattern, folders in OWNERS:
        if pattern.match(header) and not any(file.startswith(f + "/") for f in folders):
            return f"<{header}> belongs to {', '.join(folders)} alone"
    return None


def project_violation(file, header):
    """`header` is a path from the root; a name without one is a header beside the file."""
    source = folder_of(file, ALLOWED)
    if source is None:
        return f"{file} is in no folder the lint knows: add it to ALLOWED in tests/lint/layering.py"
    if "/" not in header:
        return f'"{header}" has no folder: name headers from the repository\'s root'
    target = folder_of(header, ALLOWED)
    if target is None:
        return f'"{header}" is in no folder of the design'
    permitted = ALLOWED[source] + EXCEPTIONS.get(file, [])
    if target == source or target in permitted or header in permitted:
        return None
    return f'{source} may not include "{header}" ({", ".join(ALLOWED[source]) or "nothing"} only)'


def check_text(file, text):
    """Violations of one file as (line number, message)."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match is None:
            continue
        bracket, header = match.groups()
        message = owner_violation(file, header)
        is_project = bracket == '"' or header.split("/")[0] in ROOTS
        if message is None and is_project:
            message = project_violation(file, header)
        if message is not None:
            found.append((number, message))
    return found


def source_files(root):
    for top in ROOTS:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


def check_tree(root):
    """All violations below `root`, as printable lines; and how many files were read."""
    lines, count = [], 0
    for path in source_files(root):
        file = path.relative_to(root).as_posix()
        count += 1
        for number, message in check_text(file, path.read_text(encoding="utf-8")):
            lines.append(f"{file}:{number}: {message}")
    return lines, count


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[2])
    lines, count = check_tree(root)
    print("\n".join(lines + [f"layering: {count} files, {len(lines)} violations"]))
    return 1 if lines or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
