"""What LFM3's parameters are called in checkpoints. Matrices are [out, in]."""

from models.checkpoint import NameMap, Source

_LAYER = "model.layers.{i}"
_ATTENTION, _CONV, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.conv", f"{_LAYER}.feed_forward"

HF_NAMES: NameMap = {
    "embedding": Source(("model.embed_tokens.weight",)),
    "head": Source(("lm_head.weight",)),
    "norm.scale": Source(("model.embedding_norm.weight",)),
    "layers.{i}.mixer_norm.scale": Source((f"{_LAYER}.operator_norm.weight",)),
    "layers.{i}.mixer_output_norm.scale": Source((f"{_LAYER}.post_operator_norm.weight",)),
    "layers.{i}.mlp_norm.scale": Source((f"{_LAYER}.ffn_norm.weight",)),
    "layers.{i}.mlp_output_norm.scale": Source((f"{_LAYER}.post_ffn_norm.weight",)),
    "layers.{i}.attention.qkv": Source(tuple(f"{_ATTENTION}.{part}_proj.weight" for part in ("q", "k", "v"))),
    "layers.{i}.attention.output": Source((f"{_ATTENTION}.o_proj.weight",)),
    "layers.{i}.attention.gate": Source((f"{_ATTENTION}.gate_proj.weight",)),
    "layers.{i}.attention.q_norm.scale": Source((f"{_ATTENTION}.q_norm.weight",)),
    "layers.{i}.attention.k_norm.scale": Source((f"{_ATTENTION}.k_norm.weight",)),
    "layers.{i}.conv.input": Source((f"{_CONV}.in_proj.weight",)),
    "layers.{i}.conv.kernel": Source((f"{_CONV}.conv.weight",), unit_axis=1),
    "layers.{i}.conv.output": Source((f"{_CONV}.out_proj.weight",)),
    "layers.{i}.mlp.gate_up": Source((f"{_MLP}.w1.weight", f"{_MLP}.w3.weight")),
    "layers.{i}.mlp.down": Source((f"{_MLP}.w2.weight",)),
}
