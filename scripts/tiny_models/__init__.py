"""Configurations and tensors of tiny models with random weights, one file a family.

Names and shapes are those of published safetensors files.
"""

from types import ModuleType

from scripts.tiny_models import gemma3, jamba, lara_mini, lfm3, qwen3_next

MODELS: dict[str, ModuleType] = {
    "gemma3": gemma3,
    "jamba": jamba,
    "lara-mini": lara_mini,
    "lfm3": lfm3,
    "qwen3-next": qwen3_next,
}
"""By name. Each has NUM_LAYERS by default, `config(num_layers)` and `tensors(config)`: by name, in the order
in which they are drawn."""
