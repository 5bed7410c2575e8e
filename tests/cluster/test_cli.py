"""The `sluice` command as a user runs it, against a running cluster."""
import json
import re
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import build
import checkpoints
import goldens
from sluice.detokenize import byte_alphabet

PLAIN = ["--temperature", "0", "--max-tokens", "24", "--ignore-eos"]


@pytest.fixture(scope="session")
def text_model(tmp_path_factory):
    """The tiny checkpoint with a tokenizer of its size: token b is byte b."""
    folder = checkpoints.copy(tmp_path_factory.mktemp("text") / "lite-text")
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def cluster(start_cluster, text_model):
    return start_cluster(text_model, prefill=[1], decode=[1])


def run(*argv, stdin=None, code=0):
    done = subprocess.run([sys.executable, "-m", "sluice", *map(str, argv)], input=stdin,
                          capture_output=True, timeout=60 * build.patience())
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


def generate(cluster, *argv, **options):
    return run("generate", "--router", cluster.client_address, *argv, **options)


def test_text_in_text_out(cluster):
    prompt = "for x in 'é€🙂':\n"
    out, err = generate(cluster, "--prompt", prompt, *PLAIN)
    result = cluster.client.generate(list(prompt.encode()), temperature=0.0, max_tokens=24,
                                     ignore_eos=True).result()
    assert out == bytes(result.tokens).decode("utf-8", errors="replace") + "\n"
    assert re.search(r"TTFT \d+\.\d ms  TPOT \d+\.\d ms  \d+\.\d tok/s  \(24 tokens\)", err)


def test_file_and_stdin(cluster, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("import os\n")
    by_file, _ = generate(cluster, "--file", file, *PLAIN)
    by_stdin, _ = generate(cluster, "--file", "-", *PLAIN, stdin=b"import os\n")
    by_prompt, _ = generate(cluster, "--prompt", "import os\n", *PLAIN)
    assert by_file == by_stdin == by_prompt


def test_token_ids_and_json(cluster):
    case = goldens.load(goldens.GOLDEN / "lite")[1]
    ids = ",".join(map(str, case.prompt))
    out, _ = generate(cluster, "--token-ids", ids, *PLAIN, "--json", "--logprobs", "2",
                      "--prompt-logprobs", "0")
    answer = json.loads(out)
    assert answer["tokens"] == case.tokens
    assert answer["prompt_tokens"] == case.prompt
    assert answer["finish_reason"] == "length"
    assert answer["text"] == bytes(case.tokens).decode("utf-8", errors="replace")
    assert [len(e["top"]) for e in answer["logprobs"]] == [2] * 24
    assert answer["prompt_logprobs"][0]["logprob"] is None
    assert answer["ttft_s"] > 0 and answer["tokens_per_s"] > 0


def test_logprob_lines(cluster):
    _, err = generate(cluster, "--prompt", "a", *PLAIN[:2], "--max-tokens", "2", "--ignore-eos",
                      "--logprobs", "3")
    lines = err.split("logprobs:\n")[1].splitlines()
    assert re.fullmatch(r"  \d+ '.*'  -\d+\.\d{4}  \| (\d+ '.*' -\d+\.\d{4}(  )?){3}", lines[0])


def test_checkpoint_without_tokenizer(start_cluster):
    """Ids work, as ids; text does not, and the message says what to do."""
    cluster = start_cluster(goldens.GOLDEN / "lite", prefill=[1], decode=[1])
    case = goldens.load(goldens.GOLDEN / "lite")[1]
    ids = ",".join(map(str, case.prompt))
    out, _ = generate(cluster, "--token-ids", ids, *PLAIN)
    assert [int(t) for t in out.split()] == case.tokens
    _, err = generate(cluster, "--prompt", "x", code=2)
    assert "tokenizer" in err and "--token-ids" in err


def test_named_tokenizer(start_cluster, text_model):
    cluster = start_cluster(goldens.GOLDEN / "lite", prefill=[1], decode=[1])
    out, _ = generate(cluster, "--prompt", "x", "--tokenizer", text_model, *PLAIN)
    assert out.endswith("\n")
    _, err = generate(cluster, "--prompt", "x", "--tokenizer", "nowhere", code=2)
    assert "nowhere" in err


def test_refused_request(cluster):
    _, err = generate(cluster, "--token-ids", "1,999", code=1)
    assert "invalid" in err and "999" in err and "vocabulary" in err
    _, err = generate(cluster, "--prompt", "x", "--temperature", "nan", code=1)
    assert "temperature" in err
    _, err = generate(cluster, "--prompt", "x", "--max-tokens", "0", code=1)
    assert "max_tokens" in err
    _, err = generate(cluster, "--prompt", "", code=1)
    assert "tokens" in err


def test_wrong_usage():
    _, err = run("generate", "--promt", "x", code=2)
    assert "unknown flag --promt, did you mean --prompt?" in err
    _, err = run("generate", "--token-ids", "1,b", code=2)
    assert "1,b" in err
    _, err = run("generate", code=2)
    assert "--prompt" in err
    _, err = run("generate", "--prompt", "x", "--router", "tcp://127.0.0.1:1",
                 "--connect-timeout", "0.2", code=1)
    assert "no router answered at tcp://127.0.0.1:1" in err
    _, err = run("status", "--router", "nonsense", code=2)
    assert "nonsense" in err


def test_status_table(start_cluster):
    cluster = start_cluster(goldens.GOLDEN / "lite", prefill=[2], decode=[1, 1])
    cluster.wait_idle()
    out, _ = run("status", "--router", cluster.client_address)
    lines = out.splitlines()
    assert re.fullmatch(r"model +deepseek_v2-[0-9a-f]{16}", lines[0])
    assert "prefill pool  1 of 1 groups ready, 2 ranks, 512 of 512 pages free" in out
    assert "decode pool   2 of 2 groups ready, 2 ranks, 512 of 512 pages free" in out
    header = next(i for i, line in enumerate(lines) if line.startswith("POOL"))
    rows = [line.split() for line in lines[header + 1:]]
    assert [r[:4] for r in rows] == [
        ["prefill", "0", "0/2", "ready"], ["prefill", "0", "1/2", "ready"],
        ["decode", "0", "0/1", "ready"], ["decode", "1", "0/1", "ready"]]
    # Right-aligned columns end where their titles do.
    end = lines[header].index("PAGES FREE/TOTAL") + len("PAGES FREE/TOTAL")
    assert all(line[:end].endswith("256/256") for line in lines[header + 1:])


def test_status_json(cluster):
    out, _ = run("status", "--router", cluster.client_address, "--json")
    status = json.loads(out)
    assert {r["pool"] for r in status["ranks"]} == {"prefill", "decode"}
    assert all(r["state"] == "ready" and r["pages_total"] == 256 for r in status["ranks"])


def test_status_until_ready(cluster):
    out, _ = run("status", "--router", cluster.client_address, "--until-ready", "2")
    assert "1 of 1 groups ready" in out
    _, err = run("status", "--router", cluster.client_address, "--until-ready", "3", "--timeout",
                 "0.2", code=1)
    assert "2 of 3 ranks are ready after 0.2 s" in err


def test_status_watch_repeats(cluster):
    """It prints until it is interrupted; the reader's going away ends it too."""
    process = subprocess.Popen([sys.executable, "-m", "sluice", "status", "--json", "--watch",
                                "0.05", "--router", cluster.client_address],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = [json.loads(process.stdout.readline()) for _ in range(3)]
    assert lines[0]["uptime_ms"] < lines[2]["uptime_ms"]
    process.send_signal(2)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == b""
