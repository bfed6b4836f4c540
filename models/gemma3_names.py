"""What Gemma 3's parameters are called in checkpoints. Matrices are [out, in] in all of them."""

from models.checkpoint import NameMap, Source

HF_NAMES: NameMap = {
    "embedding": Source(("model.embed_tokens.weight",)),
    "norm.scale": Source(("model.norm.weight",), plus=1.0),
    "layers.{i}.attention.qkv": Source(
        (
            "model.layers.{i}.self_attn.q_proj.weight",
            "model.layers.{i}.self_attn.k_proj.weight",
            "model.layers.{i}.self_attn.v_proj.weight",
        )
    ),
    "layers.{i}.attention.output": Source(("model.layers.{i}.self_attn.o_proj.weight",)),
    "layers.{i}.attention.q_norm.scale": Source(("model.layers.{i}.self_attn.q_norm.weight",), plus=1.0),
    "layers.{i}.attention.k_norm.scale": Source(("model.layers.{i}.self_attn.k_norm.weight",), plus=1.0),
    "layers.{i}.mlp.gate_up": Source(
        ("model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight")
    ),
    "layers.{i}.mlp.down": Source(("model.layers.{i}.mlp.down_proj.weight",)),
    "layers.{i}.pre_attention_norm.scale": Source(("model.layers.{i}.input_layernorm.weight",), plus=1.0),
    "layers.{i}.post_attention_norm.scale": Source(
        ("model.layers.{i}.post_attention_layernorm.weight",), plus=1.0
    ),
    "layers.{i}.pre_mlp_norm.scale": Source(("model.layers.{i}.pre_feedforward_layernorm.weight",), plus=1.0),
    "layers.{i}.post_mlp_norm.scale": Source(
        ("model.layers.{i}.post_feedforward_layernorm.weight",), plus=1.0
    ),
}

# GGUF stores norm weights as 1 + w already.
GGUF_NAMES: NameMap = {
    "embedding": Source(("token_embd.weight",)),
    "norm.scale": Source(("output_norm.weight",)),
    "layers.{i}.attention.qkv": Source(
        ("blk.{i}.attn_q.weight", "blk.{i}.attn_k.weight", "blk.{i}.attn_v.weight")
    ),
    "layers.{i}.attention.output": Source(("blk.{i}.attn_output.weight",)),
    "layers.{i}.attention.q_norm.scale": Source(("blk.{i}.attn_q_norm.weight",)),
    "layers.{i}.attention.k_norm.scale": Source(("blk.{i}.attn_k_norm.weight",)),
    "layers.{i}.mlp.gate_up": Source(("blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight")),
    "layers.{i}.mlp.down": Source(("blk.{i}.ffn_down.weight",)),
    "layers.{i}.pre_attention_norm.scale": Source(("blk.{i}.attn_norm.weight",)),
    "layers.{i}.post_attention_norm.scale": Source(("blk.{i}.post_attention_norm.weight",)),
    "layers.{i}.pre_mlp_norm.scale": Source(("blk.{i}.ffn_norm.weight",)),
    "layers.{i}.post_mlp_norm.scale": Source(("blk.{i}.post_ffw_norm.weight",)),
}

# The hub's multimodal checkpoints put the text model under one of these instead of "model.".
HF_TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
