"""Loaders: what a line means, and how a bad one is refused."""

import json
from pathlib import Path

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.hashing import Sha256Hasher
from jaxkv.lab.content import HashCache, PrefixIds, Run, SeenPrefixes, Tokens, runs_of
from jaxkv.lab.generator import PATTERNS, generate
from jaxkv.lab.loading import load_trace

DATA = Path(__file__).parent / "data"


def written(tmp_path: Path, *lines: object) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return str(path)


def mooncake(length: int, ids: list[int], timestamp: int = 0) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": length, "output_length": 5, "hash_ids": ids}


def hashes(content: PrefixIds | Tokens, size: int, blocks: int, serial: int = 0) -> list[bytes]:
    return content.hashes(Sha256Hasher(size), HashCache(size), serial, blocks)


def test_mooncake_lines_are_read_in_order_of_arrival() -> None:
    trace = load_trace(str(DATA / "mooncake_head.jsonl"))
    first = trace.requests[0]
    assert (trace.format, trace.block_size, len(trace.requests)) == ("mooncake", 512, 6)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (6758, 500)
    assert isinstance(first.content, PrefixIds)
    assert first.content.num_ids == 14
    arrivals = [request.arrival for request in trace.requests]
    assert arrivals == sorted(arrivals)


def test_weka_sessions_share_nothing_and_sub_agents_share_their_parents_ids() -> None:
    trace = load_trace(str(DATA / "weka_two.jsonl"))
    lines = [json.loads(line) for line in (DATA / "weka_two.jsonl").read_text().splitlines()]
    count = sum(
        len(entry["requests"]) if isinstance(entry, dict) else 1
        for line in lines
        for entry in line["requests"]
    )
    assert (trace.format, trace.block_size, len(trace.requests)) == ("weka", 64, count)
    by_session: dict[str, set[int]] = {}
    for request in trace.requests:
        assert isinstance(request.content, PrefixIds)
        session = request.name.split(":")[0]
        by_session.setdefault(session, set()).update(request.content.keys(Sha256Hasher(64)))
    first, second = by_session.values()
    assert not first & second
    sub = next(entry for entry in lines[1]["requests"] if isinstance(entry, dict))
    began = lines[1]["start_s"] + sub["t"] + sub["requests"][0][0]
    assert began in {request.arrival for request in trace.requests}


def test_azure_tells_lengths_only() -> None:
    trace = load_trace(str(DATA / "azure_head.csv"))
    assert not trace.has_content
    assert (trace.requests[0].num_prompt_tokens, trace.requests[0].num_output_tokens) == (374, 44)
    assert trace.requests[0].arrival == 0.0


def test_text_sessions_are_bytes_unless_a_tokenizer_is_given() -> None:
    path = str(DATA / "taubench_head.jsonl")
    values = json.loads((DATA / "taubench_head.jsonl").read_text().splitlines()[0])
    assert load_trace(path).requests[0].num_prompt_tokens == len(values["input"].encode())
    words = load_trace(path, tokenize=lambda text: [len(word) for word in text.split()])
    assert words.requests[0].num_prompt_tokens == len(values["input"].split())


def test_chats_take_their_answers_and_limits(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "response": "yes"},
    )
    trace = load_trace(path)
    assert [request.num_output_tokens for request in trace.requests] == [7, 3, 3]
    assert len({request.num_prompt_tokens for request in trace.requests}) == 1


def test_bailian_ids_stand_for_sixteen_tokens(tmp_path: Path) -> None:
    line = {**mooncake(33, [4, 5, 6]), "chat_id": 1, "parent_chat_id": -1, "turn": 1, "type": "text"}
    trace = load_trace(written(tmp_path, line, {**line, "hash_ids": [4, 5], "timestamp": 2.5}))
    assert (trace.format, trace.block_size) == ("bailian", 16)
    assert [request.arrival for request in trace.requests] == [0.0, 2.5]


GOOD = mooncake(600, [1, 2])


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ('{"timestamp": 0, "input_le', "line 2: not JSON, or cut short"),
        ("[1, 2]", "line 2: a JSON object is needed"),
        (mooncake(2000, [1]), "line 2: input_length 2000 takes 4 hash_ids of 512 tokens, got 1"),
        (mooncake(0, []), "line 2: input_length must be a whole number of at least 1, got 0"),
        (mooncake(5, ["x"]), "line 2: a hash id must be a whole number, got 'x'"),  # type: ignore[list-item]
        ({"session": "a", "turn": 0, "t_us": 0, "input": "x", "output": ""}, "line 2: 'input_length' is"),
        ({**GOOD, "timestamp": -1}, "line 2: timestamp must be a number of at least 0, got -1"),
    ],
)
def test_a_bad_line_is_refused_by_number_or_counted(tmp_path: Path, bad: object, why: str) -> None:
    path = written(tmp_path, GOOD, bad, GOOD)
    with pytest.raises(JaxkvError, match=why.replace("[", r"\[")):
        load_trace(path)
    trace = load_trace(path, skip_bad_lines=True)
    assert (len(trace.requests), trace.num_skipped_lines) == (2, 1)


def test_files_without_a_request_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JaxkvError, match="is empty"):
        load_trace(written(tmp_path))
    with pytest.raises(JaxkvError, match="line 1: no known trace format"):
        load_trace(written(tmp_path, "hello"))
    with pytest.raises(JaxkvError, match="cannot read the trace"):
        load_trace(str(tmp_path / "absent"))
    with pytest.raises(JaxkvError, match="all 1 lines are bad"):
        load_trace(written(tmp_path, "x"), "mooncake", skip_bad_lines=True)
    (tmp_path / "latin").write_bytes(json.dumps(GOOD).encode() + b"\n\xe9\n")
    with pytest.raises(JaxkvError, match="line 2: not UTF-8"):
        load_trace(str(tmp_path / "latin"))


def test_runs() -> None:
    assert runs_of([3, 4, 5, 9, 2, 3]) == (Run(3, 3), Run(9, 1), Run(2, 2))
    assert runs_of([]) == ()


@pytest.mark.parametrize("size", [4, 8, 16, 3, 5, 24])
def test_hashes_agree_exactly_where_the_ids_they_end_in_do(size: int) -> None:
    """Trace blocks of 8 tokens; hash blocks that divide them, equal them, or lie across them."""
    one, two = PrefixIds(8, 40, (Run(0, 5),)), PrefixIds(8, 40, (Run(0, 3), Run(7, 2)))
    blocks = 40 // size
    ours, theirs = hashes(one, size, blocks, 0), hashes(two, size, blocks, 1)
    assert len(set(ours)) == len(ours) == blocks
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [
        (block + 1) * size <= 24 for block in range(blocks)
    ]


def test_what_no_id_covers_is_the_requests_own() -> None:
    content = PrefixIds(8, 20, (Run(0, 2),))
    first, second = hashes(content, 4, 8, serial=0), hashes(content, 4, 8, serial=1)
    assert first[:4] == second[:4]
    assert not set(first[4:]) & set(second)
    partial = PrefixIds(8, 20, (Run(0, 3),))  # the last id stands for tokens 16..19
    assert hashes(partial, 4, 8, 0)[:5] == hashes(partial, 4, 8, 1)[:5]
    assert hashes(partial, 4, 8, 0)[5] != hashes(partial, 4, 8, 1)[5]


def test_seen_prefixes_are_found_by_halving() -> None:
    seen = SeenPrefixes()
    seen.add(range(10))
    assert [seen.shared(range(n)) for n in (0, 1, 9, 10, 30)] == [0, 1, 9, 10, 10]
    assert seen.shared([20, 21]) == 0


@pytest.mark.parametrize("pattern", [*PATTERNS, "mixed"])
def test_made_up_traces_are_the_same_for_the_same_seed(pattern: str) -> None:
    def prompts(seed: int) -> list[bytes]:
        contents = [request.content for request in generate(pattern, 12, seed).requests]
        return [content.prompt.tobytes() for content in contents if isinstance(content, Tokens)]

    assert len(prompts(1)) == 12
    assert prompts(1) == prompts(1) != prompts(2)


def test_made_up_traces_are_refused_by_name_and_number() -> None:
    with pytest.raises(JaxkvError, match="unknown pattern 'x'"):
        generate("x", 1, 0)
    with pytest.raises(JaxkvError, match="at least 1 request, got 0"):
        generate("chat", 0, 0)
