"""The lints on the repository, and on planted violations that they must find."""
import subprocess
import sys
from pathlib import Path

import pytest

import layering
import tidy

ROOT = Path(__file__).resolve().parents[2]


def test_repository_keeps_the_layers():
    lines, count = layering.check_tree(ROOT)
    assert lines == []
    assert count > 50


def test_repository_is_tidy():
    lines, count = tidy.check_tree(ROOT)
    assert lines == []
    assert count > 50


@pytest.mark.parametrize("file, include", [
    ("common/base/log.c", '"common/wire/messages.h"'),
    ("common/wire/scan.c", '"common/net/server.h"'),
    ("common/model/config.c", '"common/wire/messages.h"'),
    ("common/kv/pages.c", '"common/transfer/transfer.h"'),
    ("common/net/node.c", '"kernels/ops.h"'),
    ("common/net/node.c", '"common/transfer/transfer.h"'),
    ("kernels/ops.h", '"kernels/cpu/cpu.h"'),
    ("kernels/ref/ops.c", '"common/wire/messages.h"'),
    ("kernels/cpu/moe.c", '"common/transfer/group.h"'),
    ("kernels/cpu/moe.c", '"kernels/layers/model.h"'),
    ("kernels/cpu/moe.c", '"kernels/ref/ref.h"'),
    ("kernels/layers/moe.c", '"prefill_node/prefill.h"'),
    ("node/engine.c", '"decode_node/decode.h"'),
    ("prefill_node/main.c", '"decode_node/decode.h"'),
    ("decode_node/main.c", '"prefill_node/prefill.h"'),
    ("decode_node/main.c", '"router/router.h"'),
    ("router/router.c", '"kernels/ops.h"'),
    ("router/router.c", "<kernels/ops.h>"),
    ("router/router.c", '"router.h"'),
    ("router/router.c", '"../kernels/ops.h"'),
    ("router/router.c", "<msgpack.h>"),
    ("router/router.c", "<zmq.h>"),
    ("common/net/node.c", "<msgpack/pack.h>"),
    ("common/wire/scan.c", "<zmq.h>"),
    ("kernels/cpu/collectives.c", "<ucp/api/ucp.h>"),
    ("kernels/layers/moe.c", "<cuda_runtime.h>"),
    ("common/transfer/ucx.c", "<nccl.h>"),
    ("kernels/ref/ops.c", "<cblas.h>"),
    ("router/router.c", "<jansson.h>"),
    ("common/extra/thing.c", '"common/base/log.h"'),
])
def test_planted_include_is_found(file, include):
    text = f'#include <stdio.h>\n#include "common/base/log.h"\n\n  #  include {include} /* why */\n'
    assert [number for number, _ in layering.check_text(file, text) if number == 4] == [4]


@pytest.mark.parametrize("file, include", [
    ("common/wire/scan.c", "<msgpack.h>"), ("common/net/node.c", "<zmq.h>"),
    ("common/transfer/ucx.c", "<ucp/api/ucp.h>"), ("kernels/cuda/gemm.cu", "<cublas_v2.h>"),
    ("kernels/cpu/gemm.c", "<cblas.h>"), ("kernels/cpu/gemm.c", '"kernels/ops.h"'),
    ("kernels/ref/sample.c", '"common/wire/sampling.h"'),
    ("decode_node/main.c", '"node/engine.h"'), ("kernels/registry.c", '"kernels/cpu/cpu.h"'),
    ("node/engine.c", '"kernels/layers/model.h"'), ("router/main.c", '"common/net/server.h"'),
])
def test_permitted_include_passes(file, include):
    assert layering.check_text(file, f"#include {include}\n") == []


def run_lint(script, root):
    return subprocess.run([sys.executable, str(ROOT / "tests/lint" / script), str(root)],
                          capture_output=True, text=True, timeout=60)


def test_the_program_fails_on_a_planted_file(tmp_path):
    planted = tmp_path / "router" / "placed.c"
    planted.parent.mkdir()
    planted.write_text('#include "common/net/server.h"\n#include "decode_node/decode.h"\n')
    done = run_lint("layering.py", tmp_path)
    assert done.returncode == 1
    assert 'router/placed.c:2: router may not include "decode_node/decode.h"' in done.stdout
    planted.write_text('#include "common/net/server.h"\n')
    assert run_lint("layering.py", tmp_path).returncode == 0


@pytest.mark.parametrize("file, text, message", [
    ("a.c", "int x;\n" * 801, "801 lines"),
    ("a.py", "x = 1  # " + "TO" + "DO later\n", "left-over mark"),
    ("a.md", "see /" + "home/somebody/data\n", "path of one machine"),
    ("a.sh", "cd /" + "work/main && make\n", "path of one machine"),
    ("a.h", "/* " + "x" * 100 + " */\n", "106 columns"),
])
def test_planted_untidiness_is_found(file, text, message):
    assert any(message in found for _, found in tidy.check_text(file, text))


def test_tidy_lets_ordinary_text_pass():
    text = "the work/home page, $HOME/x, ./work/x, https://example.org/home/x\n"
    assert tidy.check_text("a.md", text) == []
