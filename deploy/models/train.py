#!/usr/bin/env python3
"""The whole recipe of tiny-coder, a DeepSeek-V2 model of about 11 M parameters on Python source.

    python3 train.py --data DIR --out tiny-coder           # corpus, tokenizer, training, card
    python3 train.py --smoke --data DIR --out DIR          # the same in two minutes on a CPU
    python3 train.py --stage prepare|train|card ...        # one stage of it

Needs torch, transformers, tokenizers, safetensors, matplotlib and tqdm. The model is
transformers' own DeepseekV2ForCausalLM; this file adds the load-balance loss that it lacks, an
optimizer (Muon for matrices, AdamW for the rest) and the schedule. Weights live in fp32 inside
the optimizer; what runs forward is always their bf16 rounding, which is what gets shipped.
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import time

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import corpus
import evaluation

SEED = 20240607
SMOKE_FILES = 4  # held-out files that a smoke run looks at
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
    "vocab_size": corpus.VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "hidden_act": "silu", "max_position_embeddings": 2048, "initializer_range": 0.02,
    "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
    "q_lora_rank": 192, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_theta": 10000.0, "rope_scaling": None,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_intermediate_size": 128,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 2.0,
    "tie_word_embeddings": True, "use_cache": True,
    "bos_token_id": corpus.BOS_ID, "eos_token_id": corpus.EOS_ID,
    "pad_token_id": corpus.PAD_ID, "torch_dtype": "bfloat16",
}


def write_config(out):
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps({
        "bos_token_id": corpus.BOS_ID, "eos_token_id": corpus.EOS_ID,
        "pad_token_id": corpus.PAD_ID}, indent=2) + "\n")


def build_model(out, device, dtype):
    from transformers import AutoConfig, DeepseekV2ForCausalLM
    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(out)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm" if device == "cuda" else "eager"
    return DeepseekV2ForCausalLM(config).to(device=device, dtype=dtype)


def balance_loss(outputs):
    """Mean over layers of E * sum(share of choices * mean probability); 1 when balanced."""
    total = 0.0
    for logits, _, chosen in outputs:
        experts = logits.shape[-1]
        ids = torch.arange(experts, device=chosen.device)
        share = (chosen[..., None] == ids).float().mean((0, 1))
        total = total + experts * (share * logits.softmax(-1).mean(0)).sum()
    return total / len(outputs)


def token_loss(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), targets.flatten())


def orthogonalise(g, steps=5):
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix, batched over dim 0."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Muon for the matrices of the layers, AdamW for embeddings, gates and norms.

    Holds fp32 masters; after each step the model's own weights are their rounding to its dtype.
    Muon's update is scaled to Adam's usual size (0.2 * sqrt(longer side)), so that one learning
    rate serves both. The rate and the step count are tensors on the device: a captured graph
    reads them anew each time.
    """

    def __init__(self, model, decay=0.1, betas=(0.9, 0.95), momentum=0.95):
        self.decay, self.betas, self.momentum = decay, betas, momentum
        self.count = torch.zeros((), device=model.device)
        self.matrices, self.others = {}, []
        for name, weight in model.named_parameters():
            state = {"weight": weight, "master": weight.detach().float().clone()}
            matrix = weight.ndim >= 2 and "embed" not in name and "mlp.gate.weight" not in name
            if matrix:
                state["m"] = torch.zeros_like(state["master"])
                self.matrices.setdefault(self.view(name, weight).shape[-2:], []).append(
                    (name, state))
            else:
                state["m"] = torch.zeros_like(state["master"])
                state["v"] = torch.zeros_like(state["master"])
                state["decay"] = decay if weight.ndim >= 2 else 0.0
                self.others.append(state)

    @staticmethod
    def view(name, tensor):
        """A stack of the matrices that the tensor holds: each expert's gate and up on its own."""
        if name.endswith("gate_up_proj"):
            return tensor.reshape(-1, tensor.shape[1] // 2, tensor.shape[2])
        return tensor.reshape(-1, *tensor.shape[-2:])

    @torch.no_grad()
    def step(self, rate):
        self.count += 1
        for shape, entries in self.matrices.items():
            stacked = []
            for name, s in entries:
                grad = s["weight"].grad.float()
                s["m"].lerp_(grad, 1 - self.momentum)
                stacked.append(self.view(name, grad.lerp(s["m"], self.momentum)))
            sizes = [len(x) for x in stacked]
            update = orthogonalise(torch.cat(stacked)) * (0.2 * math.sqrt(max(shape)))
            for (name, s), part in zip(entries, update.split(sizes)):
                s["master"].mul_(1 - rate * self.decay)
                self.view(name, s["master"]).sub_(part * rate)
        self.step_adam(rate)
        for s in self.states():
            s["weight"].copy_(s["master"])
            s["weight"].grad = None

    def step_adam(self, rate):
        b1, b2 = self.betas
        norm = torch.stack([s["weight"].grad.float().norm() for s in self.others]).norm()
        scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for s in self.others:
            grad = s["weight"].grad.float() * scale
            s["m"].lerp_(grad, 1 - b1)
            s["v"].lerp_(grad * grad, 1 - b2)
            mean, var = s["m"] / (1 - b1 ** self.count), s["v"] / (1 - b2 ** self.count)
            s["master"].mul_(1 - rate * s["decay"]).sub_(rate * mean / (var.sqrt() + 1e-8))

    def states(self):
        return [s for entries in self.matrices.values() for _, s in entries] + self.others


class Batches:
    """Shuffled windows of the packed token stream, on the device; a new shift each epoch."""

    def __init__(self, tokens, length, batch, device):
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self.length, self.batch, self.device = length, batch, device
        self.span = torch.arange(length + 1, device=device)
        self.random = torch.Generator().manual_seed(SEED)
        self.epochs, self.starts = 0, torch.empty(0)

    def next(self):
        if len(self.starts) < self.batch:
            shift = int(torch.randint(self.length, (1,), generator=self.random))
            count = (len(self.tokens) - 1 - shift) // self.length
            order = torch.randperm(count, generator=self.random)
            self.starts = (order * self.length + shift).to(self.device)
            self.epochs += 1
        starts, self.starts = self.starts[:self.batch], self.starts[self.batch:]
        window = self.tokens[starts[:, None] + self.span].long()
        return window[:, :-1], window[:, 1:]


class Step:
    """One training step. On CUDA the first few run eagerly and the rest replay their graph:
    the model is so small that launching its kernels takes longer than running them."""

    EAGER_STEPS = 4

    def __init__(self, model, args):
        self.model, self.balance_weight = model, args.balance
        self.tap, self.optimizer = evaluation.RouterTap(model), Optimizer(model)
        self.rate = torch.zeros((), device=model.device)
        self.use_graph, self.graph, self.done = model.device.type == "cuda", None, 0
        self.loss_fn, self.balance_fn = token_loss, balance_loss
        if args.compile:
            compile_parts(model)
            self.loss_fn, self.balance_fn = map(torch.compile, (token_loss, balance_loss))

    def compute(self):
        hidden = self.model.model(input_ids=self.x, use_cache=False).last_hidden_state
        loss = self.loss_fn(hidden, self.model.lm_head.weight, self.y)
        balance = self.balance_fn(self.tap.drain())
        (loss + self.balance_weight * balance).backward()
        self.optimizer.step(self.rate)
        self.loss, self.balance = loss.detach(), balance.detach()

    def __call__(self, x, y, rate):
        if self.done == 0:
            self.x, self.y = x.clone(), y.clone()
        self.x.copy_(x)
        self.y.copy_(y)
        self.rate.fill_(rate)
        if not self.use_graph:
            self.compute()
        elif self.done < self.EAGER_STEPS:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.compute()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.compute()
            self.graph.replay()
        self.done += 1


def rate_at(step, total, peak, warmup, decay_share):
    """Warm up, hold, then fall to nothing over the last decay_share of the steps."""
    decay = max(1, int(total * decay_share))
    left = total - step
    return peak * min(1.0, (step + 1) / warmup, left / decay if left < decay else 1.0)


def compile_parts(model):
    """Compiles the layers' parts; of the gates only forward(), so that hooks stay outside."""
    torch._dynamo.config.cache_size_limit = 64
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm):
            part.compile()
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.compile()
            layer.mlp.shared_experts.compile()
            layer.mlp.gate.forward = torch.compile(layer.mlp.gate.forward)
        else:
            layer.mlp.compile()


@torch.no_grad()
def quick_loss(model, tokens, length, batch, device, batches=8):
    """Loss on the first packed windows of the held-out stream, for the curve alone."""
    data, total, count = torch.from_numpy(tokens.astype(np.int64)), 0.0, 0
    for i in range(batches):
        start = i * batch * length
        window = data[start:start + batch * length + 1].to(device)
        if len(window) < batch * length + 1:
            break
        hidden = model.model(input_ids=window[:-1].view(batch, length), use_cache=False)
        total += float(token_loss(hidden.last_hidden_state, model.lm_head.weight, window[1:]))
        count += 1
    return total / max(count, 1)


def plain_causal():
    """Training windows have no padding: with no mask at all, attention is simply causal, and
    building the mask needs no look at the device (which a captured graph forbids)."""
    from transformers.models.deepseek_v2 import modeling_deepseek_v2
    modeling_deepseek_v2.create_causal_mask = lambda **_: None


def planned_steps(args, step, total, began, timed):
    """How many steps to do in all, by the pace since timed = (step, clock) and the time left."""
    if timed is None or not timed[0] < step < total:
        return total
    pace = (time.monotonic() - timed[1]) / (step - timed[0])
    left = args.max_seconds - (time.monotonic() - began)
    return min(args.steps, step + max(int(left / pace), 1))


def train(args, out):
    """Trains and returns the model and its log; keeps to args.max_seconds by fewer steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_config(out)
    plain_causal()
    model = build_model(out, device, torch.bfloat16 if device == "cuda" else torch.float32)
    step_fn = Step(model, args)
    stream = np.load(args.data / "train.npz")["tokens"]
    held_out = np.load(args.data / "held_out.npz")["tokens"]
    batches = Batches(stream, args.length, args.batch, device)
    log, total, began = {"steps": [], "held_out": []}, args.steps, time.monotonic()
    bar, step, timed = tqdm(total=total, desc="train", mininterval=args.log_seconds), 0, None
    while step < total:
        step_fn(*batches.next(), rate_at(step, total, args.rate, args.warmup, args.decay_share))
        step += 1
        if step % 20 == 0 or step == total:
            loss, balance = step_fn.loss.item(), step_fn.balance.item()
            log["steps"].append((step, loss, balance))
            bar.set_postfix(loss=f"{loss:.3f}", balance=f"{balance:.2f}", refresh=False)
            timed = timed or (step, time.monotonic())
        if step % args.eval_every == 0 or step == total:
            total = planned_steps(args, step, total, began, timed)
            bar.total = total
            value = quick_loss(model, held_out, args.length, args.batch, device)
            step_fn.tap.drain()
            log["held_out"].append((step, value))
            timed = (step, time.monotonic())
        bar.update(1)
    bar.close()
    log.update(seconds=time.monotonic() - began, steps_done=step, epochs=batches.epochs,
               tokens_seen=step * args.batch * args.length, train_tokens=len(stream),
               batch=args.batch, length=args.length, rate=args.rate,
               device=torch.cuda.get_device_name() if device == "cuda" else "CPU")
    shipped = build_model(out, device, torch.bfloat16)
    shipped.load_state_dict(model.state_dict())
    return shipped.float(), log


def hf_state(model):
    """The weights under the names of published checkpoints: one tensor a projection of each
    expert, tied output head left out."""
    state = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().to("cpu", torch.bfloat16)
        if name == "lm_head.weight":
            continue
        stem = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for j, both in enumerate(tensor):
                gate, up = both.chunk(2)
                state[f"{stem}.{j}.gate_proj.weight"] = gate.contiguous()
                state[f"{stem}.{j}.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for j, down in enumerate(tensor):
                state[f"{stem}.{j}.down_proj.weight"] = down.contiguous()
        else:
            state[name] = tensor.contiguous()
    return state


def save(model, out, log, max_shard_bytes):
    """model.safetensors, or parts of it (joined by --stage card) where files must stay small."""
    from safetensors.torch import save_file
    state, shards, size = hf_state(model), [{}], 0
    for name in sorted(state):
        size += state[name].nbytes
        if max_shard_bytes and size > max_shard_bytes:
            shards.append({})
            size = state[name].nbytes
        shards[-1][name] = state[name]
    for i, shard in enumerate(shards):
        stem = "model" if len(shards) == 1 else f"part-{i}"
        save_file(shard, out / f"{stem}.safetensors", metadata={"format": "pt"})
    (out / "log.json").write_text(json.dumps(log) + "\n")


def join_parts(out):
    from safetensors.torch import load_file, save_file
    parts = sorted(out.glob("part-*.safetensors"))
    if parts:
        state = {k: v for part in parts for k, v in load_file(part).items()}
        save_file(state, out / "model.safetensors", metadata={"format": "pt"})
        for part in parts:
            part.unlink()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=pathlib.Path, required=True, help="corpus folder")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the model's folder")
    parser.add_argument("--stage", choices=("all", "prepare", "train", "card"), default="all")
    parser.add_argument("--smoke", action="store_true", help="a two-minute run on a CPU")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--max-seconds", type=float, default=1e9, help="fewer steps if need be")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--decay-share", type=float, default=0.6)
    parser.add_argument("--balance", type=float, default=0.01, help="load-balance loss's weight")
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--log-seconds", type=float, default=0.5)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction,
                        default=torch.cuda.is_available())
    parser.add_argument("--max-shard-bytes", type=int, default=0)
    parser.add_argument("--hardware", default=None, help="line for the card")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.batch, args.length, args.warmup, args.eval_every = 8, 2, 256, 2, 4
        args.max_seconds, args.compile = 60, False
    return args


def main():
    args = parse_args()
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage in ("all", "prepare"):
        corpus.prepare(args.data, args.out, stdlib_only=args.smoke,
                       limit_bytes=2_000_000 if args.smoke else None)
        shutil.copy(args.data / "sources.json", args.out / "sources.json")
    if args.stage in ("all", "train"):
        model, log = train(args, args.out)
        save(model, args.out, log, args.max_shard_bytes)
        for stem in ("held_out", "unseen"):
            if (args.data / f"{stem}.npz").exists():
                log[f"{stem}_result"] = evaluation.held_out(
                    model, args.data / f"{stem}.npz", limit=SMOKE_FILES if args.smoke else None)
        save(model, args.out, log, args.max_shard_bytes)
        print(f"{log['steps_done']} steps, {log['tokens_seen'] / 1e6:.0f} M tokens in "
              f"{log['seconds']:.0f} s; held-out nats a token {log['held_out'][-1][1]:.4f}")
    if args.stage in ("all", "card"):
        import card
        join_parts(args.out)
        card.write(args.data, args.out, limit=SMOKE_FILES if args.smoke else None,
                   hardware=args.hardware)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
