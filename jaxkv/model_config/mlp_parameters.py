"""The parameters of a model's MLPs and experts, by the spellings of config files."""

from jaxkv.model_config.text_config import TextConfig

EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
SHARED_SIZE_KEYS = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
EXPERTS_PER_TOKEN_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
)
NO_MLP = frozenset({"mamba2"})
"""Families whose layers are a mixer and nothing else."""

UNGATED = frozenset({"nemotron_h"})
"""Families whose MLPs have an up and a down matrix, no gate."""


def mlp_parameters(text: TextConfig, num_layers: int) -> int:
    """All MLPs, experts and routers of the model. Raises JaxkvError that names a size that is missing."""
    if text.model_type in NO_MLP:
        return 0
    return sum(_layer(text, kind) for kind in _kinds(text, num_layers))


def idle_parameters(text: TextConfig, num_layers: int) -> int:
    """Parameters of the routed experts that a token does not pass. Raises JaxkvError as above."""
    num_layers_with_experts = (
        _kinds(text, num_layers).count("experts") if text.model_type not in NO_MLP else 0
    )
    if not num_layers_with_experts:
        return 0
    idle = text.integer(*EXPERT_KEYS) - text.integer(*EXPERTS_PER_TOKEN_KEYS)
    return num_layers_with_experts * idle * _expert(text)


def _kinds(text: TextConfig, num_layers: int) -> list[str]:
    """ "dense", "experts" or "none" for every layer."""
    letters = text.get("hybrid_override_pattern")
    if isinstance(letters, str):
        return [{"-": "dense", "E": "experts"}.get(letter, "none") for letter in letters]
    if text.model_type == "zamba2":
        return ["dense"] * text.integer("num_mem_blocks")
    experts = text.optional_integer(*EXPERT_KEYS, at_least=0) or 0
    if experts <= 1:
        return ["dense"] * num_layers
    return ["experts" if _has_experts(text, i) else "dense" for i in range(num_layers)]


def _has_experts(text: TextConfig, index: int) -> bool:
    for key in ("moe_layer_freq", "mlp_layer_types"):
        listed = text.get(key)
        if isinstance(listed, list):
            return listed[index] in (1, "sparse")
    if text.get("expert_layer_period") is not None:
        return index % text.integer("expert_layer_period") == text.integer("expert_layer_offset", at_least=0)
    if text.get("interleave_moe_layer_step") is not None:
        return (index + 1) % text.integer("interleave_moe_layer_step") == 0
    dense_first = text.optional_integer("first_k_dense_replace", "num_dense_layers", at_least=0) or 0
    return index >= dense_first


def _layer(text: TextConfig, kind: str) -> int:
    if kind == "none":
        return 0
    hidden = text.integer("hidden_size")
    matrices = 2 if text.model_type in UNGATED else 3
    if kind == "dense":
        keys = ("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size")
        if text.optional_integer("num_local_experts", at_least=0) == 0:
            keys = ("shared_intermediate_size", *keys)
        size = text.integer(*keys)
        # RecurrentGemma's files count gate and up together.
        return matrices * hidden * (size // 2 if text.model_type == "recurrent_gemma" else size)
    experts = text.integer(*EXPERT_KEYS)
    size = text.integer("moe_intermediate_size", "intermediate_size")
    inner = text.optional_integer("moe_latent_size", "routed_expert_hidden_size")
    into_latent = 2 * hidden * inner if inner else 0
    routed = experts * _expert(text) + experts * hidden + into_latent
    dense_beside = text.integer("intermediate_size") if text.get("enable_moe_block") is True else 0
    return routed + matrices * hidden * (_shared_size(text, size) + dense_beside)


def _expert(text: TextConfig) -> int:
    """One routed expert."""
    matrices = 2 if text.model_type in UNGATED else 3
    size = text.integer("moe_intermediate_size", "intermediate_size")
    inner = text.optional_integer("moe_latent_size", "routed_expert_hidden_size")
    return matrices * (inner or text.integer("hidden_size")) * size


def _shared_size(text: TextConfig, expert_size: int) -> int:
    """Width of the experts that every token passes."""
    named = text.optional_integer(*SHARED_SIZE_KEYS, at_least=0)
    if named is not None:
        return named
    if text.get("interleave_moe_layer_step") is not None:
        return expert_size  # Llama 4 has one, and no key for it
    return expert_size * (text.optional_integer("n_shared_experts", "num_shared_experts", at_least=0) or 0)
