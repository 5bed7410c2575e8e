"""The tiny checkpoints of make_golden.py: configs in the keys of the published ones, and gains.

Sizes are tiny, divisible by tp 4, and unequal wherever two could be mistaken for one another
(nope, rope, v, ranks, widths). `gains` scale the random weights: a matrix has standard deviation
gain / sqrt(inputs), so that attention is far from uniform and every part moves the logits.
"""


def yarn(original, mscale):
    return {"type": "yarn", "factor": 40, "original_max_position_embeddings": original,
            "beta_fast": 32, "beta_slow": 1, "mscale": mscale, "mscale_all_dim": mscale}


COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1,
    "hidden_act": "silu", "initializer_range": 0.02, "num_attention_heads": 4,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000, "use_cache": True,
    "vocab_size": 256, "ep_size": 1, "moe_layer_freq": 1, "tie_word_embeddings": False,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_experts_per_tok": 4,
}
V2 = COMMON | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
               "scoring_func": "softmax", "aux_loss_alpha": 0.001, "seq_aux": True}
V3 = COMMON | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
               "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

LITE = V2 | {
    "torch_dtype": "float32", "max_position_embeddings": 5120, "rope_scaling": yarn(128, 0.707),
    "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 16,
    "q_lora_rank": None, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "n_routed_experts": 12, "n_shared_experts": 2, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}
V2_FULL = V2 | {
    "torch_dtype": "bfloat16", "max_position_embeddings": 10240, "rope_scaling": yarn(256, 1.0),
    "hidden_size": 64, "intermediate_size": 40, "moe_intermediate_size": 24,
    "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 16, "n_shared_experts": 2, "topk_method": "group_limited_greedy",
    "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 16.0,
}
V3_FULL = V3 | {
    "torch_dtype": "float16", "max_position_embeddings": 20480, "rope_scaling": yarn(512, 1.0),
    "hidden_size": 32, "intermediate_size": 72, "moe_intermediate_size": 16,
    "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "n_routed_experts": 16, "n_shared_experts": 1,
    "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": True,
}
# Fields that no released model sets, all in one: plain RoPE with its own base, no dense layer
# first, every second layer dense, V2 weights normalised and therefore not scaled, no query rank.
ODD = V2 | {
    "torch_dtype": "bfloat16", "max_position_embeddings": 2048, "rope_scaling": None,
    "rope_theta": 1000, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "q_lora_rank": None, "kv_lora_rank": 24,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "n_shared_experts": 1, "topk_method": "group_limited_greedy",
    "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 3.0,
    "num_hidden_layers": 4, "first_k_dense_replace": 0, "moe_layer_freq": 2,
    "num_experts_per_tok": 3,
}

GAINS = {"embed_tokens": 1.0, "lm_head": 1.5, "q_proj": 1.1, "q_a_proj": 1.0, "q_b_proj": 1.1,
         "kv_a_proj_with_mqa": 1.0, "kv_b_proj": 1.1, "o_proj": 1.5, "gate_proj": 1.2,
         "up_proj": 1.0, "down_proj": 1.5, "gate": 1.5, "eh_proj": 1.0, "head": 1.5}

LENGTHS = (1, 63, 64, 65, 200, 1000)
CHECKPOINTS = {
    "lite": {"config": LITE, "seed": 11, "gains": GAINS, "shards": 1, "lengths": LENGTHS},
    "v2": {"config": V2_FULL, "seed": 22, "gains": GAINS | {"expert_down_proj": 0.4},
           "shards": 2, "lengths": LENGTHS},
    "v3": {"config": V3_FULL, "seed": 33, "gains": GAINS | {"embed_tokens": 1.1},
           "shards": 1, "lengths": LENGTHS},
    "odd": {"config": ODD, "seed": 44, "gains": GAINS, "shards": 1, "lengths": (1, 65, 200)},
}

# More goldens on the same weights: (checkpoint, file suffix, config overrides, lengths).
VARIANTS = [
    # cos and sin are scaled only when the two mscales differ, which no released model has.
    ("lite", "mscale", {"rope_scaling": yarn(128, 0.707) | {"mscale": 1.4}}, (65, 200)),
]
