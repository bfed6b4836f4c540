"""Parameters counted from configurations, against the sizes that the models' authors publish (in
billions).
"""

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.model_config.model_cache import model_cache_from_config
from jaxkv.model_config.parameters import count_parameters
from tests.model_config.published import read

# Published totals; text model only where a vision tower belongs to the published figure.
BILLIONS = {
    "bamba-9b": 9.78,
    "command-a": 111.0,
    "command-r7b": 8.03,
    "deepseek-v3": 671.0,
    "exaone-4.0-32b": 32.0,
    "gemma-2-2b": 2.61,
    "gemma-2-9b": 9.24,
    "gemma-2-27b": 27.2,
    "gemma-3-270m": 0.268,
    "gemma-3-1b": 1.0,
    "gemma-3-27b": 27.0,
    "glm-5": 744.0,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "jamba-1.5-large": 398.0,
    "jamba-v0.1": 51.6,
    "jamba-reasoning-3b": 3.0,
    "lfm2-8b-a1b": 8.3,
    "llama-4-scout": 107.8,
    "llama-4-maverick": 400.0,
    "mamba-codestral-7b": 7.29,
    "mimo-v2-flash": 309.0,
    "minimax-text-01": 456.0,
    "mistral-7b-v0.1": 7.24,
    "nemotron-3-nano-30b-a3b": 31.6,
    "nemotron-3-super-120b-a12b": 120.6,
    "nemotron-h-8b": 8.1,
    "nemotron-h-56b": 56.3,
    "nemotron-nano-9b-v2": 8.89,
    "olmo-3-7b": 7.3,
    "qwen3-next-80b-a3b": 79.7,
    "qwen3.5-27b": 27.0,
    "qwen3.5-397b-a17b": 397.0,
    "recurrentgemma-2b": 2.68,
    "step-3.7-flash": 196.0,
    "zamba2-7b": 7.36,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_within_two_percent_of_the_published_size(name: str) -> None:
    counted = count_parameters(model_cache_from_config(read(name))).total
    assert counted / 1e9 == pytest.approx(BILLIONS[name], rel=0.02)


def test_a_size_that_the_config_lacks_is_named() -> None:
    with pytest.raises(JaxkvError, match="none of the keys vocab_size"):
        count_parameters(model_cache_from_config(read("falcon-h1-7b")))
    with pytest.raises(JaxkvError, match="intermediate_size"):
        count_parameters(model_cache_from_config(read("lfm2-1.2b")))


def test_a_model_type_that_is_no_name_is_passed_over() -> None:
    config = read("gemma-3-270m") | {"architectures": ["Gemma3ForCausalLM"], "model_type": ["gemma3_text"]}
    untied = count_parameters(model_cache_from_config(config))
    tied = count_parameters(model_cache_from_config(config | {"tie_word_embeddings": True}))
    assert untied.embedding == 2 * tied.embedding == 2 * 262144 * 640
