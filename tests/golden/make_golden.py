#!/usr/bin/env python3
"""Make the tiny checkpoints and their goldens with Hugging Face transformers, in fp32.

    python3 make_golden.py [NAME ...]         (needs torch 2.11, transformers 5.17, safetensors)

Weights come from a seeded generator and are rounded to the stored dtype; transformers then loads
the files as anybody would, in fp32. Prompts are drawn until every greedy step and every expert
choice is clear of a tie, so that another correct fp32 implementation cannot decide differently.
Where transformers departs from the published model code it is patched here, see README.md.
"""
import argparse
import json
import math
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as hf_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf_v3

import specs
from check_golden import FORMAT, Reference, read_checkpoint

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 24
TOP = 8
LOGPROBS_LENGTH = 200
GAP_MIN = 3e-3           # between the two best logits of every greedy step
ERROR_MAX = 2.5e-5       # of fp32 against float64: leaves room for another fp32 under 1e-4
MARGIN_MIN = 2e-5        # between the last expert (or group) chosen and the first one not
DISTINCT_MIN = 10        # different tokens among the 24, so that no golden is one token repeated
BIAS_RANGE = (-1.1, -0.1)  # many biased scores are negative: -inf and 0.0 masks then differ
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


# ----------------------------------------------------------------------------------- checkpoints
def mlp_shapes(prefix, hidden, width):
    return {prefix + "gate_proj.weight": (width, hidden),
            prefix + "up_proj.weight": (width, hidden),
            prefix + "down_proj.weight": (hidden, width)}


def attention_shapes(c, at):
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    qk = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    rank, low = c["kv_lora_rank"], c["q_lora_rank"]
    shapes = {at + "kv_a_proj_with_mqa.weight": (rank + c["qk_rope_head_dim"], hidden),
              at + "kv_a_layernorm.weight": (rank,),
              at + "kv_b_proj.weight": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank),
              at + "o_proj.weight": (hidden, heads * c["v_head_dim"])}
    if low is None:
        return shapes | {at + "q_proj.weight": (heads * qk, hidden)}
    return shapes | {at + "q_a_proj.weight": (low, hidden), at + "q_a_layernorm.weight": (low,),
                     at + "q_b_proj.weight": (heads * qk, low)}


def layer_shapes(c, layer):
    hidden, at = c["hidden_size"], f"model.layers.{layer}."
    shapes = {at + "input_layernorm.weight": (hidden,),
              at + "post_attention_layernorm.weight": (hidden,)}
    shapes |= attention_shapes(c, at + "self_attn.")
    if layer < c["first_k_dense_replace"] or layer % c["moe_layer_freq"]:
        return shapes | mlp_shapes(at + "mlp.", hidden, c["intermediate_size"])
    width, experts = c["moe_intermediate_size"], c["n_routed_experts"]
    shapes[at + "mlp.gate.weight"] = (experts, hidden)
    if c["topk_method"] == "noaux_tc":
        shapes[at + "mlp.gate.e_score_correction_bias"] = (experts,)
    for e in range(experts):
        shapes |= mlp_shapes(f"{at}mlp.experts.{e}.", hidden, width)
    return shapes | mlp_shapes(at + "mlp.shared_experts.", hidden, width * c["n_shared_experts"])


def mtp_shapes(c, layer):
    """A multi-token-prediction layer as V3's own checkpoint stores it, after the last real one."""
    hidden, at = c["hidden_size"], f"model.layers.{layer}."
    table = (c["vocab_size"], hidden)
    return layer_shapes(c, layer) | {
        at + "embed_tokens.weight": table, at + "enorm.weight": (hidden,),
        at + "hnorm.weight": (hidden,), at + "eh_proj.weight": (hidden, 2 * hidden),
        at + "shared_head.norm.weight": (hidden,), at + "shared_head.head.weight": table}


def all_shapes(c):
    table = (c["vocab_size"], c["hidden_size"])
    shapes = {"model.embed_tokens.weight": table}
    for layer in range(c["num_hidden_layers"]):
        shapes |= layer_shapes(c, layer)
    for extra in range(c.get("num_nextn_predict_layers", 0)):
        shapes |= mtp_shapes(c, c["num_hidden_layers"] + extra)
    shapes["model.norm.weight"] = (c["hidden_size"],)
    return shapes if c["tie_word_embeddings"] else shapes | {"lm_head.weight": table}


def random_tensor(name, shape, seed, gains):
    """Each tensor has its own stream, so that adding one leaves the others as they are."""
    stream = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("e_score_correction_bias"):
        return stream.uniform(*BIAS_RANGE, shape)
    if len(shape) == 1:
        return 1 + 0.25 * stream.standard_normal(shape)
    kind = name.split(".")[-2]
    gain = gains.get("expert_" + kind, gains[kind]) if ".experts." in name else gains[kind]
    scale = gain / math.sqrt(shape[1]) if kind != "embed_tokens" else gain / math.sqrt(shape[1] / 2)
    return scale * stream.standard_normal(shape)


def make_tensors(spec):
    """The correction bias stays fp32 in every checkpoint, as V3's own does."""
    config, tensors = spec["config"], {}
    for name, shape in all_shapes(config).items():
        value = torch.from_numpy(random_tensor(name, shape, spec["seed"], spec["gains"]))
        keep = name.endswith("e_score_correction_bias")
        tensors[name] = value.to(torch.float32 if keep else DTYPES[config["torch_dtype"]])
    return tensors


def save(tensors, path):
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)   # safetensors makes it private


def write_checkpoint(folder, spec):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(spec["config"], indent=2) + "\n")
    tensors = make_tensors(spec)
    if spec["shards"] == 1:
        save(tensors, folder / "model.safetensors")
        return
    names, count = list(tensors), spec["shards"]
    weight_map = {}
    for shard in range(count):   # a cut by count falls amid a layer's experts, as real ones do
        part = names[len(names) * shard // count:len(names) * (shard + 1) // count]
        file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


# --------------------------------------------------------------------------------------- patches
def patch_v2_normalisation():
    """Published V2: weights are normalised or scaled. transformers ignores norm_topk_prob."""
    stock = hf_v2.DeepseekV2TopkRouter.forward
    stock_init = hf_v2.DeepseekV2TopkRouter.__init__

    def init(self, config):
        stock_init(self, config)
        self.norm_topk_prob = config.norm_topk_prob

    def forward(self, hidden_states):
        logits, weights, experts = stock(self, hidden_states)
        if self.norm_topk_prob and self.top_k > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights, experts

    hf_v2.DeepseekV2TopkRouter.__init__, hf_v2.DeepseekV2TopkRouter.forward = init, forward


def patch_layer_frequency(layer_class, mlp_class):
    """Published code: a layer off moe_layer_freq is dense. transformers ignores the field."""
    stock = layer_class.__init__

    def init(self, config, layer_idx):
        stock(self, config, layer_idx)
        if layer_idx % getattr(config, "moe_layer_freq", 1):
            self.mlp = mlp_class(config)

    layer_class.__init__ = init


def apply_patches():
    patch_v2_normalisation()
    patch_layer_frequency(hf_v2.DeepseekV2DecoderLayer, hf_v2.DeepseekV2MLP)
    patch_layer_frequency(hf_v3.DeepseekV3DecoderLayer, hf_v3.DeepseekV3MLP)


# --------------------------------------------------------------------------------------- margins
class Margins:
    """Watches every router: the least distance between what was chosen and what was not."""

    def __init__(self, model, config):
        self.c = config
        self.reset()
        for module in model.modules():
            if isinstance(module, (hf_v2.DeepseekV2TopkRouter, hf_v3.DeepseekV3TopkRouter)):
                module.register_forward_hook(self.watch)

    def reset(self):
        self.least, self.zero_mask_differs, self.choices = math.inf, 0, 0

    def zero_mask(self):
        return f"masking with 0.0 would differ {self.zero_mask_differs} of {self.choices} times"

    def note(self, scores, keep):
        best = scores.topk(min(keep + 1, scores.shape[-1]), dim=-1).values
        if best.shape[-1] > keep:
            self.least = min(self.least, float((best[:, keep - 1] - best[:, keep]).min()))

    def watch(self, router, _inputs, output):
        logits = output[0]
        if self.c["scoring_func"] == "sigmoid":
            choice = logits.sigmoid() + router.e_score_correction_bias
        else:
            choice = logits.softmax(dim=-1)
        if self.c["topk_method"] != "greedy":
            choice = self.mask(choice)
        self.note(choice, self.c["num_experts_per_tok"])

    def mask(self, choice):
        grouped = choice.view(len(choice), self.c["n_group"], -1)
        noaux = self.c["topk_method"] == "noaux_tc"
        scores = grouped.topk(2, dim=-1).values.sum(dim=-1) if noaux else grouped.amax(dim=-1)
        self.note(scores, self.c["topk_group"])
        lost = torch.ones_like(scores, dtype=torch.bool)
        lost.scatter_(1, scores.topk(self.c["topk_group"], dim=-1).indices, False)
        masked = grouped.masked_fill(lost[..., None], -math.inf).flatten(1)
        zeroed = grouped.masked_fill(lost[..., None], 0.0).flatten(1)
        k = self.c["num_experts_per_tok"]
        same = masked.topk(k).indices.sort().values == zeroed.topk(k).indices.sort().values
        self.zero_mask_differs += int((~same.all(dim=-1)).sum())
        self.choices += len(choice)
        return masked


# --------------------------------------------------------------------------------------- goldens
def load_model(folder, config):
    """Load as a user would; anything missing, or unexpected beyond the MTP layers, is fatal."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True)
    first_extra = config["num_hidden_layers"]
    skip = tuple(f"model.layers.{first_extra + n}."
                 for n in range(config.get("num_nextn_predict_layers", 0)))
    bad = [k for k in info["unexpected_keys"] if not skip or not k.startswith(skip)]
    if bad or info["missing_keys"] or info["mismatched_keys"]:
        raise SystemExit(f"{folder}: missing {info['missing_keys']}, unexpected {bad}")
    return model.eval()


@torch.no_grad()
def greedy(model, prompt):
    """Greedy decoding over transformers' own cache. Returns (tokens, logits per step, prefill)."""
    out = model(input_ids=torch.tensor([prompt]), use_cache=True)
    prefill, steps, tokens = out.logits[0], [out.logits[0, -1]], []
    while True:
        tokens.append(int(steps[-1].argmax()))
        if len(tokens) == NEW_TOKENS:
            return tokens, torch.stack(steps), prefill
        out = model(input_ids=torch.tensor([[tokens[-1]]]), use_cache=True,
                    past_key_values=out.past_key_values)
        steps.append(out.logits[0, -1])


def rounded(values):
    """Eight significant digits: an fp32 value to within its own rounding."""
    return [float(f"{v:.8g}") for v in values.tolist()]


def describe(prompt, seed, tokens, steps, prefill):
    top = steps.topk(TOP, dim=-1)
    case = {"name": f"prompt-{len(prompt)}", "prompt_seed": seed, "prompt": prompt,
            "tokens": tokens, "logits_first": rounded(steps[0]), "logits_last": rounded(steps[-1]),
            "logsumexp": rounded(steps.double().logsumexp(dim=-1)),
            "top_ids": top.indices.tolist(), "top_logits": [rounded(row) for row in top.values]}
    if len(prompt) == LOGPROBS_LENGTH:
        logprobs = prefill[:-1].log_softmax(dim=-1)
        picked = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        case["prompt_logprobs"] = [None] + rounded(picked)
    return case


def float64_error(reference, prompt, tokens, steps, prefill):
    """How far fp32 rounding moved a logit that is kept; large where a prompt is ill-conditioned."""
    exact = torch.from_numpy(reference.forward(prompt + tokens[:-1]))
    error = float((exact[len(prompt) - 1:] - steps).abs().max())
    if len(prompt) != LOGPROBS_LENGTH:
        return error
    return max(error, float((exact[:len(prompt)] - prefill).abs().max()))


def find_case(model, margins, reference, length, seed):
    """Draw prompts until one is well-conditioned and has no near tie; returns its golden."""
    for attempt in range(400):
        stream = np.random.default_rng([seed, length, attempt])
        prompt = [int(t) for t in stream.integers(0, model.config.vocab_size, length)]
        margins.reset()
        tokens, steps, prefill = greedy(model, prompt)
        best = steps.topk(2, dim=-1).values
        gap = float((best[:, 0] - best[:, 1]).min())
        clear = gap >= GAP_MIN and margins.least >= MARGIN_MIN
        if not clear or len(set(tokens)) < DISTINCT_MIN:
            continue
        error = float64_error(reference, prompt, tokens, steps, prefill)
        if error <= ERROR_MAX:
            print(f"  {length:5} tokens: attempt {attempt}, gap {gap:.2g}, routing margin "
                  f"{margins.least:.2g}, fp32 error {error:.2g}, {len(set(tokens))} distinct, "
                  f"logits std {steps.std():.2g}, {margins.zero_mask()}")
            return describe(prompt, attempt, tokens, steps, prefill)
    raise SystemExit(f"no clear prompt of {length} tokens in 400 attempts: try another seed")


def dump(path, golden):
    """One line per field of a case: small, and a changed number shows in a diff."""
    head = {k: v for k, v in golden.items() if k != "cases"}
    lines = [f" {json.dumps(k)}: {json.dumps(v)}," for k, v in head.items()]
    cases = []
    for case in golden["cases"]:
        fields = ",\n".join(f"   {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}"
                            for k, v in case.items())
        cases.append("  {\n" + fields + "\n  }")
    text = "{\n" + "\n".join(lines) + '\n "cases": [\n' + ",\n".join(cases) + "\n ]\n}\n"
    json.loads(text)
    path.write_text(text)


def make_goldens(folder, spec, path, overrides, lengths):
    config = spec["config"] | overrides
    with tempfile.TemporaryDirectory() as scratch:
        for file in folder.glob("model*"):
            (Path(scratch) / file.name).symlink_to(file)
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        model = load_model(scratch, config)
    margins, reference = Margins(model, config), Reference(config, read_checkpoint(folder))
    cases = [find_case(model, margins, reference, n, spec["seed"]) for n in lengths]
    dump(path, {"format": FORMAT, "checkpoint": folder.name, "weight_seed": spec["seed"],
                "made_with": {"transformers": transformers.__version__,
                              "torch": torch.__version__.split("+")[0], "dtype": "float32"},
                "config_overrides": overrides, "cases": cases})
    print(f"  {path.name}: {path.stat().st_size} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="checkpoints to make (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    apply_patches()
    for name in args.names or specs.CHECKPOINTS:
        spec, folder = specs.CHECKPOINTS[name], HERE / name
        print(name)
        write_checkpoint(folder, spec)
        make_goldens(folder, spec, folder / "golden.json", {}, spec["lengths"])
        for owner, suffix, overrides, lengths in specs.VARIANTS:
            if owner == name:
                make_goldens(folder, spec, folder / f"golden-{suffix}.json", overrides, lengths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
