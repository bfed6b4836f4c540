"""Tiny models with recurrent layers against transformers, whose every answer is one pass without a cache."""

import numpy as np
import pytest

from jaxkv.engine.loading import load_model
from models.linear import arrange
from scripts.make_tiny_checkpoint import write_checkpoint
from tests.models.golden import Answer, answers
from tests.models.paged import BLOCK_SIZE, COMPILE_FAST, Chunk, PagedRunner

FAMILIES = ("jamba", "lara-mini", "lfm3", "qwen3-next")
TOLERANCE = 2e-4


class Case:
    """A family's tiny model, ready to run, and what transformers answers."""

    def __init__(self, runner: PagedRunner, answers: list[Answer]):
        self.runner, self.answers = runner, answers

    def relative_error(self, chunk: Chunk, hidden: np.ndarray) -> float:
        """Of the chunk's known positions, against the largest logit; 0 where it has none."""
        answer = self.answers[chunk.sequence]
        positions = answer.known(chunk.start, chunk.start + len(chunk.tokens))
        if not positions:
            return 0.0
        logits = self.runner.logits(hidden[np.asarray(positions) - chunk.start])
        return answer.largest_error(positions, logits) / float(np.abs(answer.top_logits).max())


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> Case:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(request.param, folder)
    loaded = load_model(folder)
    arrange(loaded.model, "cpu")
    known = answers(f"{request.param.replace('-', '_')}_tiny.npz")
    runner = PagedRunner(
        loaded.model,
        loaded.cache_specs(BLOCK_SIZE),
        num_sequences=len(known),
        max_len=max(len(answer.tokens) for answer in known),
        token_buckets=(32, 320),
        compiler_options=COMPILE_FAST,
    )
    return Case(runner, known)


def test_whole_prompts_give_the_known_logits_and_greedy_tokens(case):
    assert [answer.num_prompt for answer in case.answers] == [1, 20, 77, 300]
    for index, answer in enumerate(case.answers):
        chunk = Chunk(index, 0, answer.tokens)
        (hidden,) = case.runner.step([chunk])
        assert case.relative_error(chunk, hidden) < TOLERANCE
        greedy = case.runner.logits(hidden[answer.num_prompt - 1 : -1]).argmax(axis=-1)
        assert greedy.tolist() == answer.tokens[answer.num_prompt :]


@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_chunks_of_all_prompts_in_one_batch_give_the_known_logits(case, size):
    longest = max(len(answer.tokens) for answer in case.answers)
    for start in range(0, longest, size):
        chunks = [
            Chunk(index, start, answer.tokens[start : start + size])
            for index, answer in enumerate(case.answers)
            if start < len(answer.tokens)
        ]
        for chunk, hidden in zip(chunks, case.runner.step(chunks), strict=True):
            assert case.relative_error(chunk, hidden) < TOLERANCE
