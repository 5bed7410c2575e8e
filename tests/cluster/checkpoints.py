"""Copies of a tiny checkpoint with one thing wrong."""
import json
import shutil
import struct

import goldens

SOURCE = goldens.GOLDEN / "lite"
SHARDED = goldens.GOLDEN / "v2"
NORM = "model.layers.1.self_attn.kv_a_layernorm.weight"


def copy(folder, source=SOURCE):
    folder.mkdir()
    for file in source.iterdir():
        if not file.name.startswith("golden"):
            shutil.copy(file, folder)
    return folder


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def read_tensors(path):
    """(header, data) of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8:8 + length]), raw[8 + length:]


def write_tensors(path, header, data):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_header(folder, change, file="model.safetensors"):
    """Rewrites the header by change(header), the data stays."""
    header, data = read_tensors(folder / file)
    change(header)
    write_tensors(folder / file, header, data)
    return folder


def drop_tensor(folder, name=NORM, file="model.safetensors"):
    """Leaves a tensor and its bytes out; everything after it moves up, so the file stays valid."""
    header, data = read_tensors(folder / file)
    begin, end = header.pop(name)["data_offsets"]
    for tensor in header.values():
        offsets = tensor.get("data_offsets")
        if offsets and offsets[0] >= end:
            tensor["data_offsets"] = [offset - (end - begin) for offset in offsets]
    write_tensors(folder / file, header, data[:begin] + data[end:])
    return folder


def reshape(folder):
    def change(header):
        (size,) = header[NORM]["shape"]
        header[NORM]["shape"] = [2, size // 2]
    return change_header(folder, change)


def retype(folder):
    """As many bytes in a type that holds no weights."""
    def change(header):
        header[NORM]["dtype"] = "I32"
    return change_header(folder, change)


def overlap(folder):
    def change(header):
        by_begin = sorted((t["data_offsets"], n) for n, t in header.items() if n != "__metadata__")
        (begin, end), name = by_begin[3]
        header[name]["data_offsets"] = [begin - 4, end - 4]
    return change_header(folder, change)


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def truncate_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    return folder


def absent_shard(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder
