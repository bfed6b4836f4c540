"""FLOPs of tokens: against sums written out, and against published counts of active parameters."""

import json
from pathlib import Path

import pytest

from jaxkv.lab.flops import ModelCost, _Reads, model_cost
from jaxkv.model_config.model_cache import ModelCache, model_cache_from_config

CONFIGS = Path(__file__).parents[1] / "model_config" / "data" / "configs"


def model(name: str) -> ModelCache:
    return model_cache_from_config(json.loads((CONFIGS / f"{name}.json").read_text()), name)


def test_a_token_reads_those_before_it_and_itself() -> None:
    cost = ModelCost(100, (_Reads(2, None), _Reads(3, 4)))

    def written_out(start: int, stop: int) -> int:
        return sum(100 + 2 * (place + 1) + 3 * min(place + 1, 4) for place in range(start, stop))

    for start, stop in ((0, 1), (0, 3), (0, 4), (0, 9), (2, 7), (6, 6), (5, 30)):
        assert cost.of_tokens(start, stop) == written_out(start, stop)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        # Model cards: active parameters in all, embeddings included.
        ("gemma-3-27b", 27e9),
        ("jamba-1.5-mini", 12e9),
        ("qwen3-next-80b-a3b", 3e9),
        ("gpt-oss-120b", 5.1e9),
    ],
)
def test_a_token_passes_the_published_number_of_active_parameters(name: str, active: float) -> None:
    cost = model_cost(model(name))
    assert cost is not None
    # Where the context is empty, attention adds next to nothing.
    assert cost.of_tokens(0, 1) / 2 == pytest.approx(active, rel=0.25)


def test_a_config_without_sizes_has_no_cost() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    assert model_cost(model_cache_from_config(config)) is None
