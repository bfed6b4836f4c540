"""Qwen3-Next: gated DeltaNet and attention take turns; layer 1 has a dense MLP, the others experts."""

from typing import Any

from scripts.tiny_models.drawn import Drawn, convolution, gated_mlp, log_decay, norm, step_bias
from scripts.tiny_models.vocabulary import CONFIG

NUM_LAYERS = 4


def config(num_layers: int) -> dict[str, Any]:
    return CONFIG | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "full_attention_interval": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10_000_000,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    }


def tensors(config: dict[str, Any]) -> dict[str, Drawn]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    drawn = {
        "model.embed_tokens.weight": Drawn((vocabulary, hidden), deviation=1.0),
        "model.norm.weight": Drawn((hidden,)),
        "lm_head.weight": Drawn((vocabulary, hidden)),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attends = (index + 1) % config["full_attention_interval"] == 0
        drawn |= {
            f"{layer}.input_layernorm.weight": Drawn((hidden,)),
            f"{layer}.post_attention_layernorm.weight": Drawn((hidden,)),
            **(_attention if attends else _delta_net)(layer, config),
        }
        if index in config["mlp_only_layers"]:
            drawn |= gated_mlp(f"{layer}.mlp", hidden, config["intermediate_size"])
        else:
            drawn |= _experts(f"{layer}.mlp", config)
    return drawn


def _attention(layer: str, config: dict[str, Any]) -> dict[str, Drawn]:
    hidden, head = config["hidden_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{layer}.self_attn.q_proj.weight": Drawn((2 * q_size, hidden)),
        f"{layer}.self_attn.k_proj.weight": Drawn((kv_size, hidden)),
        f"{layer}.self_attn.v_proj.weight": Drawn((kv_size, hidden)),
        f"{layer}.self_attn.o_proj.weight": Drawn((hidden, q_size)),
        f"{layer}.self_attn.q_norm.weight": Drawn((head,)),
        f"{layer}.self_attn.k_norm.weight": Drawn((head,)),
    }


def _delta_net(layer: str, config: dict[str, Any]) -> dict[str, Drawn]:
    hidden, num_heads = config["hidden_size"], config["linear_num_value_heads"]
    k_size = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    v_size = num_heads * config["linear_value_head_dim"]
    return {
        f"{layer}.linear_attn.in_proj_qkvz.weight": Drawn((2 * k_size + 2 * v_size, hidden)),
        f"{layer}.linear_attn.in_proj_ba.weight": Drawn((2 * num_heads, hidden)),
        f"{layer}.linear_attn.conv1d.weight": convolution(
            2 * k_size + v_size, config["linear_conv_kernel_dim"]
        ),
        f"{layer}.linear_attn.dt_bias": step_bias(num_heads),
        f"{layer}.linear_attn.A_log": log_decay(num_heads),
        f"{layer}.linear_attn.norm.weight": norm(config["linear_value_head_dim"]),
        f"{layer}.linear_attn.out_proj.weight": Drawn((hidden, v_size)),
    }


def _experts(name: str, config: dict[str, Any]) -> dict[str, Drawn]:
    hidden = config["hidden_size"]
    drawn = {
        f"{name}.gate.weight": Drawn((config["num_experts"], hidden)),
        f"{name}.shared_expert_gate.weight": Drawn((1, hidden)),
        **gated_mlp(f"{name}.shared_expert", hidden, config["shared_expert_intermediate_size"]),
    }
    for expert in range(config["num_experts"]):
        drawn |= gated_mlp(f"{name}.experts.{expert}", hidden, config["moe_intermediate_size"])
    return drawn
