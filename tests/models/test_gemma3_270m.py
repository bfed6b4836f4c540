"""Gemma 3 270M's real weights against transformers in float32 on the same file.

Logits stay within 0.02 and the greedy tokens are the same.
"""

import numpy as np
import pytest

from jaxkv.engine.loading import load_model
from models.linear import arrange
from tests.models.golden import answers
from tests.models.paged import BLOCK_SIZE, Chunk, PagedRunner

ANSWERS = answers("gemma3_270m.npz")
LONG = next(i for i, answer in enumerate(ANSWERS) if answer.num_prompt > 1000)
SHORT = [i for i in range(len(ANSWERS)) if i != LONG]
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def runner() -> PagedRunner:
    loaded = load_model("gemma3-270m", "float32")
    arrange(loaded.model, "cpu")
    max_len = max(len(answer.tokens) for answer in ANSWERS)
    return PagedRunner(
        loaded.model,
        loaded.cache_specs(BLOCK_SIZE),
        num_sequences=len(ANSWERS),
        max_len=max_len,
        token_buckets=(8, 512),
    )


def checked_step(runner: PagedRunner, chunks: list[Chunk]) -> list[int]:
    """Runs the chunks, compares all logits that are known, and returns the best next token of each chunk."""
    best = []
    for chunk, hidden in zip(chunks, runner.step(chunks), strict=True):
        last = chunk.start + len(chunk.tokens) - 1
        positions = ANSWERS[chunk.sequence].known(chunk.start, last + 1)
        if last not in positions:  # the middle of a prompt
            positions.append(last)
        logits = runner.logits(hidden[np.asarray(positions) - chunk.start])
        known = ANSWERS[chunk.sequence].known(chunk.start, last + 1)
        assert ANSWERS[chunk.sequence].largest_error(known, logits[: len(known)]) < TOLERANCE
        best.append(int(logits[-1].argmax()))
    return best


def decode(runner: PagedRunner, sequences: list[int], first: list[int]) -> list[list[int]]:
    """The greedy answers of `sequences`, which begin with the tokens `first`, decoded together."""
    generated = [[token] for token in first]
    starts = [ANSWERS[i].num_prompt for i in sequences]
    while len(generated[0]) < len(ANSWERS[sequences[0]].tokens) - starts[0]:
        done = len(generated[0]) - 1
        chunks = [
            Chunk(i, start + done, answer[-1:])
            for i, start, answer in zip(sequences, starts, generated, strict=True)
        ]
        for answer, token in zip(generated, checked_step(runner, chunks), strict=True):
            answer.append(token)
    return generated


def test_short_prompts_whole_then_decoded_together(runner):
    first = checked_step(runner, [Chunk(i, 0, ANSWERS[i].prompt) for i in SHORT])
    generated = decode(runner, SHORT, first)
    assert generated == [ANSWERS[i].tokens[ANSWERS[i].num_prompt :] for i in SHORT]


def test_long_prompt_in_chunks_then_decoded(runner):
    prompt = ANSWERS[LONG].prompt
    first: list[int] = []
    for start in range(0, len(prompt), 512):
        first = checked_step(runner, [Chunk(LONG, start, prompt[start : start + 512])])
    assert decode(runner, [LONG], first) == [ANSWERS[LONG].tokens[ANSWERS[LONG].num_prompt :]]
