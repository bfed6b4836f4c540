"""Gemma 3: every second layer full, windows of 8 tokens, and every option of the family switched on."""

from typing import Any

from scripts.tiny_models.drawn import Drawn, gated_mlp
from scripts.tiny_models.vocabulary import CONFIG

NUM_LAYERS = 4


def config(num_layers: int) -> dict[str, Any]:
    return CONFIG | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
        "max_position_embeddings": 4096,
    }


def tensors(config: dict[str, Any]) -> dict[str, Drawn]:
    hidden, head = config["hidden_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    drawn = {
        "model.embed_tokens.weight": Drawn((config["vocab_size"], hidden)),
        "model.norm.weight": Drawn((hidden,)),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn |= {
            f"{layer}.input_layernorm.weight": Drawn((hidden,)),
            f"{layer}.post_attention_layernorm.weight": Drawn((hidden,)),
            f"{layer}.pre_feedforward_layernorm.weight": Drawn((hidden,)),
            f"{layer}.post_feedforward_layernorm.weight": Drawn((hidden,)),
            f"{layer}.self_attn.q_proj.weight": Drawn((q_size, hidden)),
            f"{layer}.self_attn.k_proj.weight": Drawn((kv_size, hidden)),
            f"{layer}.self_attn.v_proj.weight": Drawn((kv_size, hidden)),
            f"{layer}.self_attn.o_proj.weight": Drawn((hidden, q_size)),
            f"{layer}.self_attn.q_norm.weight": Drawn((head,)),
            f"{layer}.self_attn.k_norm.weight": Drawn((head,)),
            **gated_mlp(f"{layer}.mlp", hidden, config["intermediate_size"]),
        }
    return drawn
