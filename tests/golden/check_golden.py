#!/usr/bin/env python3
"""Check the committed goldens against the published maths of DeepSeek-V2 and V3.

An independent second opinion on `golden*.json`: the checkpoint is read byte by byte and run through
a plain float64 forward pass (unabsorbed attention, no cache) that shares no code with transformers
or with Sluice. It needs numpy only. It fails when a golden, a weight or a config is altered, when a
prompt comes too near a tie, or when a checkpoint holds a tensor nobody expects.

    python3 check_golden.py [--tolerance 1e-4] [DIR ...]        (default: every checkpoint here)

Exit status 0 when all agree, 1 when something differs, 2 when a file cannot be read.
"""
import argparse
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
FORMAT = "sluice-golden-1"
TOP2_GAP_MIN = 1e-3
ROUTE_MARGIN_MIN = 1e-5
NORM_EPS_LATENT = 1e-6  # the published code never passes rms_norm_eps to the two latent norms


# ---------------------------------------------------------------------------------- safetensors
def decode(raw, dtype):
    """Widen the little-endian bytes of one tensor to a flat float64 array."""
    if dtype == "BF16":
        wide = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    kinds = {"F16": "<f2", "F32": "<f4"}
    if dtype not in kinds:
        raise ValueError(f"dtype {dtype}: expected one of BF16, F16, F32")
    return np.frombuffer(raw, dtype=kinds[dtype]).astype(np.float64)


def read_safetensors(path):
    """Return {name: float64 array} of one file; the byte ranges must tile the data exactly."""
    data = Path(path).read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + header_bytes])
    header.pop("__metadata__", None)
    body = data[8 + header_bytes:]
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        if first != end:
            raise ValueError(f"{path}: {name} starts at byte {first}, expected {end}")
        end = last
        tensors[name] = decode(body[first:last], entry["dtype"]).reshape(entry["shape"])
    if end != len(body):
        raise ValueError(f"{path}: {len(body)} data bytes, expected {end}")
    return tensors


def read_checkpoint(folder):
    """Return {name: float64 array} of a checkpoint in one file or in shards with an index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_safetensors(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    tensors = {}
    for shard in sorted(set(weight_map.values())):
        here = read_safetensors(folder / shard)
        mapped = {name for name, file in weight_map.items() if file == shard}
        if set(here) != mapped:
            raise ValueError(f"{shard}: index disagrees on {sorted(set(here) ^ mapped)[:4]}")
        tensors.update(here)
    return tensors


# -------------------------------------------------------------------------------- forward pass
def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def log_sum_exp(x):
    top = x.max(axis=-1, keepdims=True)
    return (top + np.log(np.exp(x - top).sum(axis=-1, keepdims=True)))[..., 0]


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def yarn_mscale(factor, mscale):
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def kept_gap(scores, keep):
    """Distance between the last score kept and the first one dropped, per row."""
    order = -np.sort(-scores, axis=-1)
    if keep >= scores.shape[-1]:
        return np.full(scores.shape[0], np.inf)
    return order[:, keep - 1] - order[:, keep]


class Reference:
    """The published forward pass in float64. Each step is a method so that a test can break it."""

    def __init__(self, config, tensors):
        self.c, self.w = config, tensors
        self.used = set()
        self.route_margin = math.inf
        self.heads = config["num_attention_heads"]
        self.nope, self.rope_dim = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.v_dim, self.rank = config["v_head_dim"], config["kv_lora_rank"]

    def weight(self, name):
        self.used.add(name)
        return self.w[name]

    def linear(self, x, name):
        return x @ self.weight(name + ".weight").T

    # ---- positions
    def inv_freq(self):
        """Rotary frequencies [rope/2]; YaRN blends each with its 1/factor by how often it turns."""
        dim, base = self.rope_dim, self.c["rope_theta"]
        freq = 1.0 / base ** (np.arange(0, dim, 2) / dim)
        scaling = self.c.get("rope_scaling")
        if not scaling:
            return freq
        original = scaling["original_max_position_embeddings"]

        def turning_dim(turns):
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(turning_dim(scaling["beta_fast"])), 0)
        high = min(math.ceil(turning_dim(scaling["beta_slow"])), dim - 1)
        span = (high - low) or 0.001
        ramp = np.clip((np.arange(dim // 2) - low) / span, 0, 1)
        return freq / scaling["factor"] * ramp + freq * (1 - ramp)

    def rope_amplitude(self):
        """What cos and sin are multiplied by: 1 whenever mscale equals mscale_all_dim."""
        s = self.c.get("rope_scaling")
        if not s:
            return 1.0
        over = yarn_mscale(s["factor"], s.get("mscale", 1))
        return over / yarn_mscale(s["factor"], s.get("mscale_all_dim", 0))

    def softmax_scale(self):
        s = self.c.get("rope_scaling")
        scale = (self.nope + self.rope_dim) ** -0.5
        if s and s.get("mscale_all_dim"):
            scale *= yarn_mscale(s["factor"], s["mscale_all_dim"]) ** 2
        return scale

    def rotate(self, x):
        """Rotate neighbouring pairs (2j, 2j+1) of x [tokens, ..., rope] by the token's position."""
        angle = np.arange(x.shape[0])[:, None] * self.inv_freq()
        angle = angle.reshape(x.shape[0], *([1] * (x.ndim - 2)), -1)
        cos, sin = np.cos(angle) * self.rope_amplitude(), np.sin(angle) * self.rope_amplitude()
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2], out[..., 1::2] = even * cos - odd * sin, odd * cos + even * sin
        return out

    # ---- attention
    def query_latent(self, x, prefix):
        low = self.linear(x, prefix + "q_a_proj")
        return rms_norm(low, self.weight(prefix + "q_a_layernorm.weight"), NORM_EPS_LATENT)

    def query_heads(self, x, prefix):
        if self.c.get("q_lora_rank"):
            q = self.linear(self.query_latent(x, prefix), prefix + "q_b_proj")
        else:
            q = self.linear(x, prefix + "q_proj")
        return q.reshape(len(x), self.heads, self.nope + self.rope_dim)

    def queries(self, x, prefix):
        q = self.query_heads(x, prefix)
        return q[..., :self.nope], self.rotate(q[..., self.nope:])

    def latents(self, x, prefix):
        """What a cache holds per token: the normalised latent and the rotated shared key."""
        both = self.linear(x, prefix + "kv_a_proj_with_mqa")
        norm = self.weight(prefix + "kv_a_layernorm.weight")
        latent = rms_norm(both[:, :self.rank], norm, NORM_EPS_LATENT)
        return latent, self.rotate(both[:, self.rank:])

    def expand(self, latent, prefix):
        kv = self.linear(latent, prefix + "kv_b_proj")
        kv = kv.reshape(len(latent), self.heads, self.nope + self.v_dim)
        return kv[..., :self.nope], kv[..., self.nope:]

    def attention(self, x, prefix):
        q_nope, q_rope = self.queries(x, prefix)
        latent, k_rope = self.latents(x, prefix)
        k_nope, v = self.expand(latent, prefix)
        scores = np.einsum("qhd,khd->hqk", q_nope, k_nope)
        scores += np.einsum("qhd,kd->hqk", q_rope, k_rope)
        scores *= self.softmax_scale()
        scores[:, np.triu(np.ones((len(x), len(x)), dtype=bool), 1)] = -np.inf
        out = np.einsum("hqk,khd->qhd", softmax(scores), v)
        return self.linear(out.reshape(len(x), -1), prefix + "o_proj")

    # ---- experts
    def correction_bias(self, prefix):
        return self.weight(prefix + "gate.e_score_correction_bias")

    def group_scores(self, grouped):
        if self.c["topk_method"] == "noaux_tc":
            return np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
        return grouped.max(axis=-1)

    def mask_groups(self, choice):
        """Drop the experts of all but the best topk_group groups. choice: [tokens, experts]."""
        groups = self.c["n_group"]
        grouped = choice.reshape(len(choice), groups, -1)
        scores = self.group_scores(grouped)
        self.note_margin(kept_gap(scores, self.c["topk_group"]))
        keep = np.argsort(-scores, axis=-1, kind="stable")[:, :self.c["topk_group"]]
        mask = np.zeros(scores.shape, dtype=bool)
        np.put_along_axis(mask, keep, True, axis=-1)
        return np.where(mask[:, :, None], grouped, self.losing_score()).reshape(choice.shape)

    def losing_score(self):
        return -np.inf

    def note_margin(self, gaps):
        self.route_margin = min(self.route_margin, float(gaps.min()))

    def route(self, x, prefix):
        """Return (experts [tokens, k], weights [tokens, k])."""
        logits = self.linear(x, prefix + "gate")
        sigmoid = self.c["scoring_func"] == "sigmoid"
        scores = 1 / (1 + np.exp(-logits)) if sigmoid else softmax(logits)
        method = self.c["topk_method"]
        choice = scores + self.correction_bias(prefix) if method == "noaux_tc" else scores
        if method != "greedy":
            choice = self.mask_groups(choice)
        k = self.c["num_experts_per_tok"]
        self.note_margin(kept_gap(choice, k))
        experts = np.argsort(-choice, axis=-1, kind="stable")[:, :k]
        weights = np.take_along_axis(scores, experts, axis=-1)
        return experts, self.scale_weights(weights)

    def scale_weights(self, weights):
        """V2 scales only what it does not normalise; V3 does both."""
        factor = self.c["routed_scaling_factor"]
        if self.c["norm_topk_prob"]:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
            return weights * factor if self.c["topk_method"] == "noaux_tc" else weights
        return weights * factor

    def mlp(self, x, prefix):
        gate = self.linear(x, prefix + "gate_proj")
        return self.linear(gate / (1 + np.exp(-gate)) * self.linear(x, prefix + "up_proj"),
                           prefix + "down_proj")

    def shared(self, x, prefix):
        return self.mlp(x, prefix + "shared_experts.") if self.c.get("n_shared_experts") else 0

    def moe(self, x, prefix):
        experts, weights = self.route(x, prefix)
        out = np.zeros_like(x)
        for e in range(self.c["n_routed_experts"]):
            rows, slots = np.nonzero(experts == e)
            out[rows] += self.mlp(x[rows], f"{prefix}experts.{e}.") * weights[rows, slots][:, None]
        return out + self.shared(x, prefix)

    def is_moe(self, layer):
        return (layer >= self.c["first_k_dense_replace"]
                and layer % self.c.get("moe_layer_freq", 1) == 0)

    # ---- whole model
    def forward(self, ids):
        """ids [tokens] -> logits [tokens, vocab], each row given the tokens up to and with it."""
        eps = self.c["rms_norm_eps"]
        x = self.weight("model.embed_tokens.weight")[np.asarray(ids)]
        for layer in range(self.c["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            h = rms_norm(x, self.weight(at + "input_layernorm.weight"), eps)
            x = x + self.attention(h, at + "self_attn.")
            h = rms_norm(x, self.weight(at + "post_attention_layernorm.weight"), eps)
            x = x + (self.moe(h, at + "mlp.") if self.is_moe(layer) else self.mlp(h, at + "mlp."))
        x = rms_norm(x, self.weight("model.norm.weight"), eps)
        tied = self.c.get("tie_word_embeddings")
        return self.linear(x, "model.embed_tokens" if tied else "lm_head")


# ------------------------------------------------------------------------------------- checking
class Report:
    """Collects differences and the largest error seen."""

    def __init__(self, tolerance):
        self.tolerance, self.errors, self.worst = tolerance, [], 0.0

    def close(self, what, found, golden):
        found, golden = np.asarray(found), np.asarray(golden, dtype=np.float64)
        if found.shape != golden.shape:
            self.errors.append(f"{what}: shape {golden.shape}, expected {found.shape}")
            return
        error = float(np.abs(found - golden).max())
        if not error <= self.tolerance:
            self.errors.append(f"{what}: off by {error:.3g}, allowed {self.tolerance:g}")
        self.worst = max(self.worst, error)

    def equal(self, what, found, golden):
        if found != golden:
            self.errors.append(f"{what}: {golden}, expected {found}")

    def at_least(self, what, value, floor):
        if not value >= floor:
            self.errors.append(f"{what}: {value:.3g}, at least {floor:g} is wanted")


def check_prompt(model, case, report):
    """Compare every number stored for one prompt; returns its smallest top-2 gap."""
    name, prompt, tokens = case["name"], case["prompt"], case["tokens"]
    model.route_margin = math.inf
    logits = model.forward(prompt + tokens[:-1])
    steps = logits[len(prompt) - 1:]
    report.equal(f"{name} tokens", [int(t) for t in steps.argmax(axis=-1)], tokens)
    report.close(f"{name} logits_first", steps[0], case["logits_first"])
    report.close(f"{name} logits_last", steps[-1], case["logits_last"])
    report.close(f"{name} logsumexp", log_sum_exp(steps), case["logsumexp"])
    top = np.asarray(case["top_ids"])
    report.close(f"{name} top_logits", np.take_along_axis(steps, top, axis=-1), case["top_logits"])
    order = np.argsort(-steps, axis=-1, kind="stable")[:, :top.shape[1]]
    eighth = np.take_along_axis(steps, order[:, -1:], axis=-1)
    report.at_least(f"{name} top_ids", (np.take_along_axis(steps, top, axis=-1) - eighth).min(),
                    -report.tolerance)
    if "prompt_logprobs" in case:
        picked = np.take_along_axis(logits[:len(prompt) - 1], np.asarray(prompt[1:])[:, None], 1)
        found = picked[:, 0] - log_sum_exp(logits[:len(prompt) - 1])
        report.equal(f"{name} prompt_logprobs[0]", None, case["prompt_logprobs"][0])
        report.close(f"{name} prompt_logprobs", found, case["prompt_logprobs"][1:])
    gap = float(kept_gap(steps, 1).min())
    report.at_least(f"{name} top-2 gap", gap, TOP2_GAP_MIN)
    report.at_least(f"{name} routing margin", model.route_margin, ROUTE_MARGIN_MIN)
    return gap


def unexpected(model, tensors):
    """Names that no layer used, beyond those of the multi-token-prediction layers."""
    layers = model.c["num_hidden_layers"]
    extra = range(layers, layers + model.c.get("num_nextn_predict_layers", 0))
    skip = tuple(f"model.layers.{n}." for n in extra)
    return sorted(n for n in set(tensors) - model.used if not n.startswith(skip))


def golden_files(folder):
    return sorted(folder.glob("golden*.json"))


def load(folder, golden_path):
    """Return (golden, Reference) with the golden's config overrides applied."""
    golden = json.loads(golden_path.read_text())
    if golden.get("format") != FORMAT:
        raise ValueError(f"{golden_path}: format {golden.get('format')}, expected {FORMAT}")
    config = json.loads((folder / "config.json").read_text()) | golden["config_overrides"]
    return golden, Reference(config, read_checkpoint(folder))


def check_folder(folder, tolerance=1e-4, say=print):
    """Check each golden file of one checkpoint; returns the list of differences."""
    folder, errors = Path(folder), []
    files = golden_files(folder)
    if not files:
        return [f"{folder}: no golden*.json"]
    for path in files:
        golden, model = load(folder, path)
        report, gap = Report(tolerance), math.inf
        margin = math.inf
        for case in golden["cases"]:
            gap = min(gap, check_prompt(model, case, report))
            margin = min(margin, model.route_margin)
        report.equal("tensors that nothing uses", [], unexpected(model, model.w))
        label = f"{folder.name}/{path.name}"
        say(f"{label}: {len(golden['cases'])} prompts, largest error {report.worst:.2g}, "
            f"top-2 gap {gap:.2g}, routing margin {margin:.2g}, {len(report.errors)} differences")
        errors += [f"{label}: {e}" for e in report.errors]
    return errors


def checkpoints():
    return sorted(path.parent for path in HERE.glob("*/golden.json"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dirs", nargs="*", type=Path, help="checkpoint folders")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="absolute, on logits")
    args = parser.parse_args()
    errors = []
    try:
        for folder in args.dirs or checkpoints():
            errors += check_folder(folder, args.tolerance)
    except (OSError, ValueError, KeyError, struct.error) as error:
        print(f"cannot check: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for error in errors:
        print("DIFFERS", error)
    print("goldens agree" if not errors else f"{len(errors)} differences")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
