"""What Qwen3-Next's parameters are called in checkpoints. Matrices are [out, in].

Norms are stored as w for a factor 1 + w, except the one inside gated DeltaNet. Draft modules ("mtp.") are not
read.
"""

from models.checkpoint import NameMap, Source

_LAYER = "model.layers.{i}"
_ATTENTION, _DELTA_NET, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.linear_attn", f"{_LAYER}.mlp"

HF_NAMES: NameMap = {
    "embedding": Source(("model.embed_tokens.weight",)),
    "head": Source(("lm_head.weight",)),
    "norm.scale": Source(("model.norm.weight",), plus=1.0),
    "layers.{i}.mixer_norm.scale": Source((f"{_LAYER}.input_layernorm.weight",), plus=1.0),
    "layers.{i}.mlp_norm.scale": Source((f"{_LAYER}.post_attention_layernorm.weight",), plus=1.0),
    "layers.{i}.attention.qkv": Source(tuple(f"{_ATTENTION}.{part}_proj.weight" for part in ("q", "k", "v"))),
    "layers.{i}.attention.output": Source((f"{_ATTENTION}.o_proj.weight",)),
    "layers.{i}.attention.q_norm.scale": Source((f"{_ATTENTION}.q_norm.weight",), plus=1.0),
    "layers.{i}.attention.k_norm.scale": Source((f"{_ATTENTION}.k_norm.weight",), plus=1.0),
    "layers.{i}.delta_net.qkv_and_gate": Source((f"{_DELTA_NET}.in_proj_qkvz.weight",)),
    "layers.{i}.delta_net.beta_and_decay": Source((f"{_DELTA_NET}.in_proj_ba.weight",)),
    "layers.{i}.delta_net.conv": Source((f"{_DELTA_NET}.conv1d.weight",), unit_axis=1),
    "layers.{i}.delta_net.decay_bias": Source((f"{_DELTA_NET}.dt_bias",)),
    "layers.{i}.delta_net.log_decay": Source((f"{_DELTA_NET}.A_log",)),
    "layers.{i}.delta_net.norm.scale": Source((f"{_DELTA_NET}.norm.weight",)),
    "layers.{i}.delta_net.output": Source((f"{_DELTA_NET}.out_proj.weight",)),
    "layers.{i}.mlp.gate_up": Source((f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")),
    "layers.{i}.mlp.down": Source((f"{_MLP}.down_proj.weight",)),
    "layers.{i}.mlp.router": Source((f"{_MLP}.gate.weight",)),
    "layers.{i}.mlp.experts.gate_up": Source(
        (f"{_MLP}.experts.{{e}}.gate_proj.weight", f"{_MLP}.experts.{{e}}.up_proj.weight")
    ),
    "layers.{i}.mlp.experts.down": Source((f"{_MLP}.experts.{{e}}.down_proj.weight",)),
    "layers.{i}.mlp.shared.gate_up": Source(
        (f"{_MLP}.shared_expert.gate_proj.weight", f"{_MLP}.shared_expert.up_proj.weight")
    ),
    "layers.{i}.mlp.shared.down": Source((f"{_MLP}.shared_expert.down_proj.weight",)),
    "layers.{i}.mlp.shared_gate": Source((f"{_MLP}.shared_expert_gate.weight",)),
}
