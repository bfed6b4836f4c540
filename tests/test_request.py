"""Request: tokens are one sequence whether it waits or runs; hashes grow with it; bad input changes
nothing.
"""

from typing import Any

import numpy as np
import pytest

from jaxkv.errors import JaxkvError
from jaxkv.hashing import make_hasher
from jaxkv.request import MultimodalInput, Request, RequestStatus
from jaxkv.request_table import NO_TOKEN, RequestTable


def test_a_waiting_request_knows_its_prompt() -> None:
    request = Request("a", [5, 6, 7], max_tokens=4)
    assert request.token_ids().tolist() == [5, 6, 7]
    assert request.token_ids(1, 99).tolist() == [6, 7]
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert request.max_total_tokens == 7
    assert request.row is None


def test_tokens_and_counters_move_to_the_row_and_back() -> None:
    table = RequestTable(num_rows=2, capacity=4)
    request = Request("a", [5, 6, 7], max_tokens=9, end_token_ids=[1, 2])
    request.num_computed_tokens = 2
    request.bind(table, 1)
    request.append_tokens([8, 9, 10])  # past the capacity: the table grows under the request
    assert table.tokens[1, :6].tolist() == [5, 6, 7, 8, 9, 10]
    assert request.output_token_ids.tolist() == [8, 9, 10]
    assert request.row == 1
    assert request.num_computed_tokens == 2
    request.num_computed_tokens = 5
    request.unbind()
    assert request.token_ids().tolist() == [5, 6, 7, 8, 9, 10]
    assert request.prompt_token_ids.tolist() == [5, 6, 7]
    assert (request.row, request.num_computed_tokens) == (None, 5)
    assert not table.is_live(1)
    request.append_tokens([11])
    assert request.output_token_ids.tolist() == [8, 9, 10, 11]


def test_a_view_cannot_be_written() -> None:
    request = Request("a", [5, 6])
    with pytest.raises(ValueError, match="read-only"):
        request.token_ids()[0] = 1


def test_the_caller_keeps_its_own_array() -> None:
    mine = np.array([5, 6], np.int32)
    request = Request("a", mine)
    mine[0] = 9
    assert request.token_ids().tolist() == [5, 6]


def test_block_hashes_are_extended_not_recomputed() -> None:
    hasher = make_hasher("sha256", 2)
    request = Request("a", [1, 2, 3], max_tokens=5)
    first = list(request.block_hashes(hasher))
    request.append_tokens([4, 5])
    assert request.block_hashes(hasher) == Request("b", [1, 2, 3, 4, 5]).block_hashes(hasher)
    assert request.block_hashes(hasher)[:1] == first
    assert len(first) == 1


def test_another_hasher_starts_anew() -> None:
    request = Request("a", [1, 2, 3, 4])
    assert len(request.block_hashes(make_hasher("sha256", 2))) == 2
    assert len(request.block_hashes(make_hasher("sha256", 4))) == 1


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], r"at least one token id, got shape \(0,\)"),
        ([[1]], r"got shape \(1, 1\)"),
        ([1.5], "float64"),
        ([3, -2], "got -2 at position 1"),
        ([3, 2**31], "got 2147483648 at position 1"),
    ],
)
def test_bad_token_ids_are_refused_by_name(tokens: list, message: str) -> None:
    with pytest.raises(JaxkvError, match=message):
        Request("a", tokens)


def test_bad_limits_are_refused() -> None:
    with pytest.raises(JaxkvError, match="max_tokens must be an integer of at least 1, not 0"):
        Request("a", [1], max_tokens=0)
    with pytest.raises(JaxkvError, match="'cat' ends at token 4 of a prompt of 3 tokens"):
        Request("a", [1, 2, 3], multimodal_inputs=[MultimodalInput(identifier="cat", offset=2, length=2)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ""}, "request_id must not be empty"),
        ({"request_id": 7}, "request_id must be text, not 7"),
        ({"prompt_token_ids": [1, [2]]}, "prompt_token_ids must be a list of token ids"),
        ({"end_token_ids": [2**40]}, r"end_token_ids must lie in \[0, 2147483647\], got 1099511627776"),
        ({"end_token_ids": [-1]}, "end_token_ids must lie in .* got -1 at position 0"),
        ({"end_token_ids": ["x"]}, "end_token_ids must be integers"),
        ({"arrival": float("nan")}, "arrival must be a finite number, not nan"),
        ({"priority": "high"}, "priority must be a finite number, not 'high'"),
        ({"cache_salt": 5}, "cache_salt must be text, not 5"),
        ({"cache_salt": "a\ud800"}, "is not UTF-8 text: character 1"),
        ({"lora_name": b"x"}, "lora_name must be text"),
    ],
)
def test_what_would_stop_a_later_step_is_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxkvError, match=message):
        Request(**{"request_id": "a", "prompt_token_ids": [1, 2]} | fields)


def test_the_content_of_an_image_is_named_by_text() -> None:
    with pytest.raises(JaxkvError, match="identifier of a multimodal input must be text, not 3"):
        MultimodalInput(identifier=3, offset=0, length=1)  # pyright: ignore


def test_finish_reasons_are_the_public_words() -> None:
    reasons = {status.name: status.finish_reason for status in RequestStatus}
    assert reasons == {
        "WAITING": None,
        "WAITING_FOR_REMOTE_KVS": None,
        "PREEMPTED": None,
        "RUNNING": None,
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH_CAPPED": "length",
        "FINISHED_ABORTED": "abort",
    }


def test_placeholders_are_filled_oldest_first() -> None:
    table = RequestTable(num_rows=1, capacity=3)
    request = Request("a", [5, 6, 7], max_tokens=9)
    request.bind(table, 0)
    rows = np.array([0])
    table.add_placeholders(rows)
    table.add_placeholders(rows)
    assert table.tokens[0, 3:5].tolist() == [NO_TOKEN, NO_TOKEN]
    assert request.num_tokens == 3
    table.fill_placeholders(rows, np.array([8], np.int32))
    assert request.token_ids().tolist() == [5, 6, 7, 8]
    with pytest.raises(JaxkvError, match="row 0 waits for 1 tokens"):
        request.append_tokens([9])
    table.fill_placeholders(rows, np.array([9], np.int32))
    assert request.token_ids().tolist() == [5, 6, 7, 8, 9]


def test_end_tokens_are_looked_up_by_row() -> None:
    table = RequestTable(num_rows=1)
    Request("a", [5], end_token_ids=[1]).bind(table, 0)
    Request("b", [5], end_token_ids=[2, 3]).bind(table, 1)
    Request("c", [5]).bind(table, 2)
    rows = np.array([0, 0, 1, 1, 2])
    tokens = np.array([1, 2, 1, 3, 1], np.int32)
    assert table.ends_at(rows, tokens).tolist() == [True, False, False, True, False]


def test_a_row_has_one_tenant_and_every_tenant_its_own_epoch() -> None:
    table = RequestTable(num_rows=1)
    first, second = Request("a", [5]), Request("b", [6])
    first.bind(table, 0)
    epoch = table.epoch[0]
    with pytest.raises(JaxkvError, match="row 0 already holds request 'a'"):
        second.bind(table, 0)
    with pytest.raises(JaxkvError, match="'a' is already in row 0"):
        first.bind(table, 1)
    first.unbind()
    assert table.epoch[0] == 0
    second.bind(table, 0)
    assert table.epoch[0] not in (0, epoch)
    assert table.request_ids[0] == "b"
