import pytest

from jaxkv.engine.engine import Prompt
from jaxkv.engine.sampling_params import SamplingParams
from jaxkv.errors import JaxkvError
from tests.engine.serving import MAX_MODEL_LEN, answers, run_to_end

PROMPT = list(range(30, 50))


def free_run(bench, **kwargs):
    [output] = answers(
        bench.engine(), [PROMPT], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **kwargs)
    )
    return output


def test_length_ends_an_answer(bench):
    output = free_run(bench)
    assert (len(output.token_ids), output.finish_reason) == (24, "length")
    assert output.text == bench.loaded.tokenizer.decode(output.token_ids)


def test_an_answer_ends_at_the_maximum_length_of_the_model(bench):
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    [output] = answers(bench.engine(), [PROMPT], params)
    assert (len(output.token_ids), output.finish_reason) == (MAX_MODEL_LEN - len(PROMPT), "length")


def test_a_stop_token_ends_an_answer_and_adds_no_text(bench):
    free = free_run(bench).token_ids
    index = next(i for i, token in enumerate(free) if i > 2 and token not in free[:i])
    output = free_run(bench, stop_token_ids=(free[index],))
    assert output.token_ids == free[: index + 1]
    assert output.finish_reason == "stop"
    assert output.text == bench.loaded.tokenizer.decode(free[:index])


@pytest.mark.parametrize("ignore", [False, True])
def test_the_models_own_end_tokens_end_an_answer_unless_ignored(bench, ignore):
    free = free_run(bench).token_ids
    engine = bench.engine()
    engine._end_token_ids = (free[3],)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=ignore)
    [output] = answers(engine, [PROMPT], params)
    end = 24 if ignore else free.index(free[3]) + 1
    assert output.token_ids == free[:end]
    assert output.finish_reason == ("length" if ignore else "stop")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_ends_an_answer_and_is_cut_off(bench, overlap):
    free = free_run(bench)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 2]
    engine = bench.engine(overlap=overlap)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=("no such text", stop))
    request_id = engine.add_request(Prompt(token_ids=PROMPT), params)
    pieces = []
    output = None
    while engine.has_unfinished_requests:
        for delta in engine.step():
            pieces.append(delta.text)
            output = delta.output or output
    assert output is not None
    assert output.request_id == request_id
    assert output.finish_reason == "stop"
    assert output.text == "".join(pieces) == free.text[: free.text.index(stop)]
    assert len(output.token_ids) < 24
    engine.cache_manager.check_integrity()


def test_an_aborted_request_gives_what_it_had_and_its_blocks_back(bench):
    engine = bench.engine(caching=False)
    free = engine.cache_manager.num_free_blocks
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    kept = engine.add_request(Prompt(token_ids=PROMPT), params)
    dropped = engine.add_request(Prompt(token_ids=PROMPT[:7]), params)
    for _ in range(5):
        engine.step()
    [delta] = engine.abort([dropped, "no such request"])
    assert delta.output is not None
    assert (delta.output.finish_reason, len(delta.output.token_ids)) == ("abort", 5)
    assert engine.abort([dropped]) == []
    assert run_to_end(engine).keys() == {kept}
    assert engine.cache_manager.num_free_blocks == free


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(bench):
    engine = bench.engine()
    with pytest.raises(JaxkvError, match=str(MAX_MODEL_LEN)):
        engine.add_request(Prompt(token_ids=[7] * MAX_MODEL_LEN), SamplingParams())
    assert not engine.has_unfinished_requests
