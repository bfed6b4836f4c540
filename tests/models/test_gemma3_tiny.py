"""A tiny Gemma 3 with every option on (windows of 8, softcaps, scaled rotations) against transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine.loading import LoadedModel, load_model
from models.gemma3 import Gemma3ForCausalLM
from scripts.make_tiny_checkpoint import write_checkpoint
from tests.models.golden import answers
from tests.models.paged import Chunk, PagedRunner

ANSWERS = answers("gemma3_tiny.npz")
LONGEST = max(range(len(ANSWERS)), key=lambda i: len(ANSWERS[i].tokens))
TOLERANCE = 1e-4


def make_runner(loaded: LoadedModel) -> PagedRunner:
    return PagedRunner(
        loaded.model,
        loaded.cache_specs(4),
        num_sequences=len(ANSWERS),
        max_len=max(len(answer.tokens) for answer in ANSWERS),
        token_buckets=(32, 320),
    )


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint("gemma3", folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def runner(loaded) -> PagedRunner:
    return make_runner(loaded)


def largest_error(runner: PagedRunner, chunk: Chunk, hidden: np.ndarray) -> float:
    """Of the chunk's known positions; 0 where it has none."""
    answer = ANSWERS[chunk.sequence]
    positions = answer.known(chunk.start, chunk.start + len(chunk.tokens))
    if not positions:
        return 0.0
    return answer.largest_error(positions, runner.logits(hidden[np.asarray(positions) - chunk.start]))


@pytest.mark.parametrize("index", range(len(ANSWERS)))
def test_whole_sequence_gives_the_known_logits_and_greedy_tokens(runner, index):
    answer = ANSWERS[index]
    chunk = Chunk(index, 0, answer.tokens)
    (hidden,) = runner.step([chunk])
    assert largest_error(runner, chunk, hidden) < TOLERANCE
    greedy = runner.logits(hidden[answer.num_prompt - 1 : -1]).argmax(axis=-1)
    assert greedy.tolist() == answer.tokens[answer.num_prompt :]


@pytest.mark.parametrize("size", [3, 5, 16])
def test_chunks_of_any_size_give_the_known_logits(runner, size):
    tokens = ANSWERS[LONGEST].tokens
    for start in range(0, len(tokens), size):
        chunk = Chunk(LONGEST, start, tokens[start : start + size])
        (hidden,) = runner.step([chunk])
        assert largest_error(runner, chunk, hidden) < TOLERANCE


def test_decodes_and_chunks_of_four_sequences_in_one_batch(runner):
    done = [0] * len(ANSWERS)
    rng = np.random.default_rng(2)
    while live := [i for i, answer in enumerate(ANSWERS) if done[i] < len(answer.tokens)]:
        sizes = np.where(rng.random(len(live)) < 0.5, 1, rng.integers(2, 9, len(live)))
        chunks = [
            Chunk(i, done[i], ANSWERS[i].tokens[done[i] : done[i] + size])
            for i, size in zip(live, sizes, strict=True)
        ]
        for chunk, hidden in zip(chunks, runner.step(chunks), strict=True):
            assert largest_error(runner, chunk, hidden) < TOLERANCE
            done[chunk.sequence] += len(chunk.tokens)


def test_bfloat16_stays_near_the_known_logits(tmp_path):
    write_checkpoint("gemma3", tmp_path)
    loaded = load_model(tmp_path, "bfloat16")
    assert isinstance(loaded.model, Gemma3ForCausalLM)
    assert loaded.model.embedding.dtype == jnp.bfloat16
    runner = make_runner(loaded)
    chunk = Chunk(LONGEST, 0, ANSWERS[LONGEST].tokens)
    (hidden,) = runner.step([chunk])
    assert largest_error(runner, chunk, hidden) < 0.3
