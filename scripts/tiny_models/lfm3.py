"""LFM3: short convolutions, full and sliding layers by turns."""

from typing import Any

from scripts.tiny_models.drawn import Drawn, convolution, norm
from scripts.tiny_models.vocabulary import CONFIG

NUM_LAYERS = 6
PATTERN = ("conv", "full_attention", "sliding_attention")


def config(num_layers: int) -> dict[str, Any]:
    return CONFIG | {
        "architectures": ["Lfm3ForCausalLM"],
        "model_type": "lfm3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "layer_types": [PATTERN[i % len(PATTERN)] for i in range(num_layers)],
        "sliding_window": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "conv_L_cache": 7,
        "conv_bias": False,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "norm_eps": 1e-5,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }


def tensors(config: dict[str, Any]) -> dict[str, Drawn]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    drawn = {
        "model.embed_tokens.weight": Drawn((config["vocab_size"], hidden)),
        "model.embedding_norm.weight": norm(hidden),
    }
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        norms = ("operator_norm", "ffn_norm", "post_operator_norm", "post_ffn_norm")
        drawn |= {
            **{f"{layer}.{name}.weight": norm(hidden) for name in norms},
            **(_short_conv if kind == "conv" else _attention)(layer, config),
            f"{layer}.feed_forward.w1.weight": Drawn((inner, hidden)),
            f"{layer}.feed_forward.w3.weight": Drawn((inner, hidden)),
            f"{layer}.feed_forward.w2.weight": Drawn((hidden, inner)),
        }
    return drawn


def _attention(layer: str, config: dict[str, Any]) -> dict[str, Drawn]:
    hidden, head, num_heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    q_size, kv_size = num_heads * head, config["num_key_value_heads"] * head
    return {
        f"{layer}.self_attn.q_proj.weight": Drawn((q_size, hidden)),
        f"{layer}.self_attn.k_proj.weight": Drawn((kv_size, hidden)),
        f"{layer}.self_attn.v_proj.weight": Drawn((kv_size, hidden)),
        f"{layer}.self_attn.o_proj.weight": Drawn((hidden, q_size)),
        f"{layer}.self_attn.q_norm.weight": norm(head),
        f"{layer}.self_attn.k_norm.weight": norm(head),
        f"{layer}.self_attn.gate_proj.weight": Drawn((num_heads, hidden)),
    }


def _short_conv(layer: str, config: dict[str, Any]) -> dict[str, Drawn]:
    hidden = config["hidden_size"]
    return {
        f"{layer}.conv.in_proj.weight": Drawn((3 * hidden, hidden)),
        f"{layer}.conv.conv.weight": convolution(hidden, config["conv_L_cache"]),
        f"{layer}.conv.out_proj.weight": Drawn((hidden, hidden)),
    }
