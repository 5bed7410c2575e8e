"""The goldens agree with the published maths, and would show it if they, or a model, did not."""
import json
import shutil

import numpy as np
import pytest

import check_golden as cg
import faults

FOLDERS = cg.checkpoints()
NAMES = [folder.name for folder in FOLDERS]
VISIBLE = 1e-3  # ten times the tolerance on logits


def fault_cases():
    for folder in FOLDERS:
        config = json.loads((folder / "config.json").read_text())
        for fault in faults.faults_of(config):
            yield pytest.param(folder, fault, id=f"{folder.name}-{fault.__name__}")


@pytest.fixture
def copy(tmp_path):
    """A private copy of the V3-like checkpoint with only its 65-token prompt, free to spoil."""
    folder = tmp_path / "v3"
    shutil.copytree(cg.HERE / "v3", folder)
    golden = json.loads((folder / "golden.json").read_text())
    golden["cases"] = [c for c in golden["cases"] if len(c["prompt"]) == 65]
    (folder / "golden.json").write_text(json.dumps(golden))
    return folder


def test_every_checkpoint_is_here():
    assert {"lite", "v2", "v3", "odd"} <= set(NAMES)


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_goldens_agree(folder):
    assert cg.check_folder(folder) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_sizes(folder):
    config = json.loads((folder / "config.json").read_text())
    for field in ("num_attention_heads", "intermediate_size", "moe_intermediate_size",
                  "hidden_size", "vocab_size"):
        assert config[field] % 4 == 0, f"{field} does not divide over four ranks"
    assert config["max_position_embeddings"] >= 2048
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_prompts_and_tokens(folder):
    config = json.loads((folder / "config.json").read_text())
    for path in cg.golden_files(folder):
        for case in json.loads(path.read_text())["cases"]:
            ids = case["prompt"] + case["tokens"]
            assert min(ids) >= 0 and max(ids) < config["vocab_size"]
            assert len(case["tokens"]) == 24


def test_all_stored_types_are_covered():
    kinds = {json.loads((f / "config.json").read_text())["torch_dtype"] for f in FOLDERS}
    assert kinds == {"float32", "float16", "bfloat16"}


def test_spoilt_weight_is_noticed(copy):
    assert cg.check_folder(copy) == []
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:8 + size])["model.layers.1.self_attn.kv_b_proj.weight"]
    data[8 + size + entry["data_offsets"][0] + 1] ^= 0x80  # the sign of one fp16 weight
    path.write_bytes(data)
    assert cg.check_folder(copy) != []


def test_spoilt_mtp_layer_changes_nothing(copy):
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8:8 + size])["model.layers.3.eh_proj.weight"]["data_offsets"]
    data[8 + size + first:8 + size + last] = b"\xff" * (last - first)  # not a number
    path.write_bytes(data)
    assert cg.check_folder(copy) == []


@pytest.mark.parametrize("field", ["tokens", "logits_first", "logits_last", "logsumexp"])
def test_spoilt_golden_is_noticed(copy, field):
    path = copy / "golden.json"
    golden = json.loads(path.read_text())
    golden["cases"][0][field][3] += 1
    path.write_text(json.dumps(golden))
    assert cg.check_folder(copy) != []


def test_spoilt_config_is_noticed(copy):
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"routed_scaling_factor": 2.4}))
    assert cg.check_folder(copy) != []


@pytest.mark.parametrize("folder,fault", list(fault_cases()))
def test_mistake_would_show(folder, fault):
    golden, good = cg.load(folder, folder / "golden.json")
    case = next(c for c in golden["cases"] if len(c["prompt"]) == 65)
    delta, _ = faults.effect(fault, good, case)
    assert np.isfinite(delta) and delta > VISIBLE, f"{fault.__doc__} moves a logit by {delta:.2g}"
