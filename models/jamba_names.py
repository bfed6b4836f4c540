"""What Jamba's parameters are called in checkpoints. Matrices are [out, in]."""

from models.checkpoint import NameMap, Source

_LAYER = "model.layers.{i}"
_MLP = f"{_LAYER}.feed_forward"

HF_NAMES: NameMap = {
    "embedding": Source(("model.embed_tokens.weight",)),
    "head": Source(("lm_head.weight",)),
    "norm.scale": Source(("model.final_layernorm.weight",)),
    "layers.{i}.mixer_norm.scale": Source((f"{_LAYER}.input_layernorm.weight",)),
    "layers.{i}.mlp_norm.scale": Source((f"{_LAYER}.pre_ff_layernorm.weight",)),
    "layers.{i}.attention.qkv": Source(
        tuple(f"{_LAYER}.self_attn.{part}_proj.weight" for part in ("q", "k", "v"))
    ),
    "layers.{i}.attention.output": Source((f"{_LAYER}.self_attn.o_proj.weight",)),
    "layers.{i}.mamba.input": Source((f"{_LAYER}.mamba.in_proj.weight",)),
    "layers.{i}.mamba.conv": Source((f"{_LAYER}.mamba.conv1d.weight",), unit_axis=1),
    "layers.{i}.mamba.conv_bias": Source((f"{_LAYER}.mamba.conv1d.bias",)),
    "layers.{i}.mamba.selection": Source((f"{_LAYER}.mamba.x_proj.weight",)),
    "layers.{i}.mamba.time": Source((f"{_LAYER}.mamba.dt_proj.weight",)),
    "layers.{i}.mamba.time_bias": Source((f"{_LAYER}.mamba.dt_proj.bias",)),
    "layers.{i}.mamba.time_norm.scale": Source((f"{_LAYER}.mamba.dt_layernorm.weight",)),
    "layers.{i}.mamba.b_norm.scale": Source((f"{_LAYER}.mamba.b_layernorm.weight",)),
    "layers.{i}.mamba.c_norm.scale": Source((f"{_LAYER}.mamba.c_layernorm.weight",)),
    "layers.{i}.mamba.log_decay": Source((f"{_LAYER}.mamba.A_log",)),
    "layers.{i}.mamba.skip": Source((f"{_LAYER}.mamba.D",)),
    "layers.{i}.mamba.output": Source((f"{_LAYER}.mamba.out_proj.weight",)),
    "layers.{i}.mlp.gate_up": Source((f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")),
    "layers.{i}.mlp.down": Source((f"{_MLP}.down_proj.weight",)),
    "layers.{i}.mlp.router": Source((f"{_MLP}.router.weight",)),
    "layers.{i}.mlp.experts.gate_up": Source(
        (f"{_MLP}.experts.{{e}}.gate_proj.weight", f"{_MLP}.experts.{{e}}.up_proj.weight")
    ),
    "layers.{i}.mlp.experts.down": Source((f"{_MLP}.experts.{{e}}.down_proj.weight",)),
}
