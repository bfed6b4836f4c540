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


def ranked_run(bench):
    """An answer that nothing ends, with the most likely tokens at each position, and the first position
    whose token comes there for the first time.
    """
    free = free_run(bench, logprobs=3)
    tokens = free.token_ids
    return free, next(i for i, token in enumerate(tokens) if i > 2 and token not in tokens[:i])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_best_token_stands_where_a_stop_token_would_come_before_min_tokens(bench, own, overlap):
    free, index = ranked_run(bench)
    assert free.logprobs is not None
    best, second, *_ = free.logprobs[index].top
    assert best == free.token_ids[index]

    def run(min_tokens, max_tokens):
        engine = bench.engine(overlap=overlap)
        if own:
            engine._end_token_ids = (best,)
        params = SamplingParams(
            temperature=0,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            stop_token_ids=() if own else (best,),
        )
        [output] = answers(engine, [PROMPT], params)
        return output

    at_once = run(index, 24)
    assert (at_once.token_ids, at_once.finish_reason) == (free.token_ids[: index + 1], "stop")
    later = run(index + 1, index + 1)
    assert (later.token_ids, later.finish_reason) == ((*free.token_ids[:index], second), "length")


def test_min_tokens_bans_end_tokens_even_where_they_are_ignored(bench):
    free, index = ranked_run(bench)
    engine = bench.engine()
    engine._end_token_ids = (free.token_ids[index],)
    params = SamplingParams(temperature=0, min_tokens=24, max_tokens=24, ignore_eos=True)
    [output] = answers(engine, [PROMPT], params)
    assert output.token_ids[:index] == free.token_ids[:index]
    assert free.token_ids[index] not in output.token_ids


def test_sampled_answers_have_no_stop_token_among_the_first_tokens(bench):
    even = tuple(range(0, 32, 2))
    params = SamplingParams(
        temperature=50.0, top_k=0, seed=1, min_tokens=20, max_tokens=24, stop_token_ids=even
    )
    engine = bench.engine()
    engine._end_token_ids = ()
    for output in answers(engine, [PROMPT, PROMPT[:5], PROMPT[3:]], params):
        assert len(output.token_ids) >= 20
        assert not set(output.token_ids[:20]) & set(even)


def test_a_stop_string_of_the_first_tokens_does_not_end_an_answer(bench):
    free = free_run(bench)
    decode = bench.loaded.tokenizer.decode
    stop = free.text[:1]
    output = free_run(bench, stop=(stop,), min_tokens=24)
    assert (output.token_ids, output.text, output.finish_reason) == (free.token_ids, free.text, "length")
    shown = len(decode(free.token_ids[:6]))
    cut = free.text.find(free.text[shown], shown)
    output = free_run(bench, stop=(free.text[shown],), min_tokens=6)
    assert (output.text, output.finish_reason) == (free.text[:cut], "stop")
    assert len(output.token_ids) > 6


def test_more_end_and_stop_tokens_than_can_be_banned_are_refused(bench):
    engine = bench.engine()
    engine._end_token_ids = (3,)
    params = SamplingParams(min_tokens=1, stop_token_ids=range(3, 20))
    with pytest.raises(JaxkvError, match="at most 16 end and stop tokens, not 17"):
        engine.add_request(Prompt(token_ids=PROMPT), params)
    assert not engine.has_unfinished_requests
    engine.add_request(Prompt(token_ids=PROMPT), SamplingParams(min_tokens=1, stop_token_ids=range(3, 19)))
