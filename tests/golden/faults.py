#!/usr/bin/env python3
"""Mistakes that implementations of these models have made, each as a broken Reference.

The goldens are worth something only if such a mistake shows in them. Run as a program, this prints
per checkpoint how far each mistake moves the logits and how many greedy tokens it changes.
"""
import sys

import numpy as np

import check_golden as cg
from check_golden import Reference, yarn_mscale


def has_yarn(c):
    return bool(c.get("rope_scaling"))


def noaux(c):
    return c["topk_method"] == "noaux_tc"


def grouped(c):
    return c["topk_method"] != "greedy"


def scales(c):
    return c["routed_scaling_factor"] != 1 and (noaux(c) or not c["norm_topk_prob"])


def always(_config):
    return True


class HalfSplitRope(Reference):
    """Pairs (j, j + rope/2) instead of (2j, 2j + 1)."""

    def rotate(self, x):
        half = x.shape[-1] // 2
        order = np.arange(x.shape[-1]).reshape(2, half).T.reshape(-1)
        return super().rotate(x[..., order])


class PlainRope(Reference):
    """YaRN's frequencies left out."""

    def inv_freq(self):
        return 1.0 / self.c["rope_theta"] ** (np.arange(0, self.rope_dim, 2) / self.rope_dim)


class NoSoftmaxMscale(Reference):
    """YaRN's mscale squared left out of the softmax scale."""

    def softmax_scale(self):
        return (self.nope + self.rope_dim) ** -0.5


class OneSoftmaxMscale(Reference):
    """YaRN's mscale applied once, not squared."""

    def softmax_scale(self):
        s = self.c["rope_scaling"]
        return super().softmax_scale() / yarn_mscale(s["factor"], s["mscale_all_dim"])


class MscaleOnRope(Reference):
    """mscale put on cos and sin without dividing by that of mscale_all_dim."""

    def rope_amplitude(self):
        s = self.c["rope_scaling"]
        return yarn_mscale(s["factor"], s["mscale"])


class PositionsRestart(Reference):
    """Positions start again at every 64-token page."""

    def rotate(self, x):
        parts = [super(PositionsRestart, self).rotate(x[at:at + 64]) for at in range(0, len(x), 64)]
        return np.concatenate(parts)


class LatentNotNormalised(Reference):
    """The latent is cached before its RMSNorm."""

    def latents(self, x, prefix):
        _, k_rope = super().latents(x, prefix)
        return self.linear(x, prefix + "kv_a_proj_with_mqa")[:, :self.rank], k_rope


class KeyNotRotated(Reference):
    """The shared key is cached before RoPE."""

    def latents(self, x, prefix):
        latent, _ = super().latents(x, prefix)
        return latent, self.linear(x, prefix + "kv_a_proj_with_mqa")[:, self.rank:]


class ValueBeforeKey(Reference):
    """kv_b_proj's rows per head read as [v | k_nope]."""

    def expand(self, latent, prefix):
        kv = self.linear(latent, prefix + "kv_b_proj").reshape(len(latent), self.heads, -1)
        return kv[..., self.v_dim:], kv[..., :self.v_dim]


class RopeBeforeNope(Reference):
    """The query's columns per head read as [rope | nope]."""

    def queries(self, x, prefix):
        q = self.query_heads(x, prefix)
        return q[..., self.rope_dim:], self.rotate(q[..., :self.rope_dim])


class LastKeyLost(Reference):
    """The token that fills a page is not seen by later ones."""

    def latents(self, x, prefix):
        latent, k_rope = super().latents(x, prefix)
        latent, k_rope = latent.copy(), k_rope.copy()
        latent[63::64], k_rope[63::64] = 0, 0
        return latent, k_rope


class NoSharedExperts(Reference):
    """Shared experts left out."""

    def shared(self, x, prefix):
        return 0


class NotScaled(Reference):
    """routed_scaling_factor left out."""

    def scale_weights(self, weights):
        return super().scale_weights(weights) / self.c["routed_scaling_factor"]


class ScaledAndNormalised(Reference):
    """V2 weights both normalised and scaled."""

    def scale_weights(self, weights):
        return super().scale_weights(weights) * self.c["routed_scaling_factor"]


class NormalisationIgnored(Reference):
    """norm_topk_prob ignored, weights only scaled: what transformers does to V2."""

    def scale_weights(self, weights):
        return weights * self.c["routed_scaling_factor"]


class AlwaysNormalised(Reference):
    """Weights normalised although norm_topk_prob is false."""

    def scale_weights(self, weights):
        return super().scale_weights(weights / weights.sum(axis=-1, keepdims=True))


class NoGroups(Reference):
    """Experts chosen from all groups."""

    def mask_groups(self, choice):
        return choice


class OtherGroupScore(Reference):
    """V3's group score (sum of the two best) used for V2, and V2's (the best) for V3."""

    def group_scores(self, scores):
        if noaux(self.c):
            return scores.max(axis=-1)
        return np.sort(scores, axis=-1)[..., -2:].sum(axis=-1)


class ZeroMask(Reference):
    """Experts of losing groups masked with 0.0, not -inf: they beat a negative biased score."""

    def losing_score(self):
        return 0.0


class BiasIgnored(Reference):
    """e_score_correction_bias left out of the choice."""

    def correction_bias(self, prefix):
        return 0 * super().correction_bias(prefix)


class BiasInWeights(Reference):
    """The biased score used as the weight too."""

    def route(self, x, prefix):
        experts, _ = super().route(x, prefix)
        scores = 1 / (1 + np.exp(-self.linear(x, prefix + "gate"))) + self.correction_bias(prefix)
        return experts, self.scale_weights(np.take_along_axis(scores, experts, axis=-1))


class OtherScoring(Reference):
    """Softmax where sigmoid is meant, and the reverse."""

    def __init__(self, config, tensors):
        other = "softmax" if config["scoring_func"] == "sigmoid" else "sigmoid"
        super().__init__(config | {"scoring_func": other}, tensors)


class MtpLayerRun(Reference):
    """The multi-token-prediction layer run as one more layer."""

    def __init__(self, config, tensors):
        super().__init__(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}, tensors)


class Bf16Gate(Reference):
    """Router logits rounded to bf16 before the choice."""

    def linear(self, x, name):
        y = super().linear(x, name)
        if not name.endswith("mlp.gate"):
            return y
        bits = y.astype(np.float32).view(np.uint32) + np.uint32(0x8000)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


class QueryLatentNotNormalised(Reference):
    """q_a_layernorm left out."""

    def query_latent(self, x, prefix):
        return self.linear(x, prefix + "q_a_proj")


# (the mistake, the configs on which it is one)
FAULTS = [
    (HalfSplitRope, always), (PlainRope, has_yarn), (NoSoftmaxMscale, has_yarn),
    (OneSoftmaxMscale, has_yarn), (MscaleOnRope, has_yarn), (PositionsRestart, always),
    (LatentNotNormalised, always), (KeyNotRotated, always), (ValueBeforeKey, always),
    (RopeBeforeNope, always), (LastKeyLost, always), (NoSharedExperts, always),
    (QueryLatentNotNormalised, lambda c: bool(c["q_lora_rank"])),
    (NotScaled, scales),
    (ScaledAndNormalised, lambda c: c["norm_topk_prob"] and not noaux(c)),
    (NormalisationIgnored, lambda c: c["norm_topk_prob"]),
    (AlwaysNormalised, lambda c: not c["norm_topk_prob"]),
    (NoGroups, grouped), (OtherGroupScore, grouped), (ZeroMask, noaux), (BiasIgnored, noaux),
    (BiasInWeights, noaux), (OtherScoring, always), (Bf16Gate, always),
    (MtpLayerRun, lambda c: c.get("num_nextn_predict_layers", 0) > 0),
]


def effect(fault, good, case):
    """Return (largest change of a logit, greedy tokens changed) on one prompt."""
    ids = case["prompt"] + case["tokens"][:-1]
    steps = fault(good.c, good.w).forward(ids)[len(case["prompt"]) - 1:]
    exact = good.forward(ids)[len(case["prompt"]) - 1:]
    changed = int((steps.argmax(axis=-1) != np.asarray(case["tokens"])).sum())
    return float(np.abs(steps - exact).max()), changed


def faults_of(config):
    return [fault for fault, applies in FAULTS if applies(config)]


def main():
    for folder in cg.checkpoints():
        golden, good = cg.load(folder, folder / "golden.json")
        case = next(c for c in golden["cases"] if len(c["prompt"]) == 200)
        print(f"{folder.name}: 200-token prompt, largest change of a logit, tokens changed of 24")
        for fault in faults_of(good.c):
            delta, changed = effect(fault, good, case)
            print(f"  {fault.__name__:26}{delta:8.3f}{changed:4}  {fault.__doc__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
