"""Nothing compiles after warm-up."""

import jax
import pytest

from jaxkv import JaxkvError
from jaxkv.engine.buckets import Bucket
from jaxkv.engine.engine import Prompt
from jaxkv.engine.sampling_params import SamplingParams
from jaxkv.engine.step import CompiledSteps
from jaxkv.engine.step_inputs import StepShape
from tests.engine.serving import answers, run_to_end


@pytest.fixture
def compilations():
    """The events of JAX that mean a compilation, while the test runs."""
    seen: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "compile" in event or "trace" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seen
    jax.monitoring.unregister_event_duration_listener(note)


def test_the_listener_notices_a_compilation(compilations):
    jax.jit(lambda x: x * 3 + len(compilations))(1.5)
    assert compilations


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_compiles_while_serving_whatever_the_mix(bench, compilations, overlap):
    answers(bench.engine(overlap=overlap), [[7, 8, 9]], SamplingParams(temperature=0, max_tokens=2))
    compilations.clear()
    engine = bench.engine(overlap=overlap)
    for i, params in enumerate(
        [
            SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
            SamplingParams(temperature=0.8, top_k=5, top_p=0.9, seed=1, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=1.2, max_tokens=3, logprobs=4),
            SamplingParams(temperature=0, max_tokens=5, logprobs=0),
            SamplingParams(temperature=1, top_p=0.5, max_tokens=7),
        ]
    ):
        engine.add_request(Prompt(token_ids=range(20, 23 + 13 * i)), params)
        engine.step()
    run_to_end(engine)
    assert compilations == []


def test_a_step_of_a_shape_that_was_not_compiled_is_refused(bench):
    steps = CompiledSteps(bench.runner.steps.function, [])
    with pytest.raises(JaxkvError, match="1 decodes is not compiled"):
        steps.run(Bucket(1, 1, True), (), bench.runner.pages, bench.runner.pages, None)


class Trivial:
    """A step that only hands the pool on."""

    max_num_seqs = 1

    def step(self, weights, pages, previous, words, *, shape):
        return pages


def test_an_interrupt_while_compiling_is_raised_at_once():
    shapes = [StepShape(Bucket(n, n, True), ()) for n in (1, 2, 3, 4)]
    steps = CompiledSteps(Trivial(), shapes)  # pyright: ignore[reportArgumentType]
    seen = []

    def interrupt(bucket):
        seen.append(bucket)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps.compile((), jax.numpy.zeros(1), interrupt)
    assert len(seen) == 1
    steps.compile((), jax.numpy.zeros(1), seen.append)
    assert set(seen[1:]) == {shape.bucket for shape in shapes}
