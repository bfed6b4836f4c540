import pytest

from jaxkv.engine.buckets import Bucket, make_buckets, pick_bucket
from jaxkv.errors import JaxkvError


def test_buckets_grow_by_four_up_to_the_maximum():
    buckets = make_buckets(max_num_seqs=6, max_num_batched_tokens=300)
    assert [b.num_seqs for b in buckets if b.decode_only] == [1, 4, 6]
    assert [b for b in buckets if not b.decode_only] == [
        (16, 6, False),
        (64, 6, False),
        (256, 6, False),
        (300, 6, False),
    ]


def test_a_prefill_bucket_is_never_wider_in_sequences_than_in_tokens():
    buckets = make_buckets(max_num_seqs=32, max_num_batched_tokens=32, prefill_tokens=(2,), decode_seqs=())
    assert buckets == (Bucket(32, 32, True), Bucket(2, 2, False), Bucket(32, 32, False))


def test_every_step_within_the_limits_has_a_bucket_and_it_is_the_smallest_of_its_kind():
    buckets = make_buckets(max_num_seqs=5, max_num_batched_tokens=40)
    for tokens in range(1, 41):
        for seqs in range(1, min(tokens, 5) + 1):
            bucket = pick_bucket(buckets, num_tokens=tokens, num_seqs=seqs)
            assert bucket.decode_only == (tokens == seqs)
            assert bucket.num_tokens >= tokens
            assert bucket.num_seqs >= seqs
            smaller = [b for b in buckets if b.decode_only == bucket.decode_only and b < bucket]
            assert all(b.num_tokens < tokens or b.num_seqs < seqs for b in smaller)


def test_a_step_that_fits_no_bucket_is_refused():
    buckets = make_buckets(max_num_seqs=2, max_num_batched_tokens=16)
    with pytest.raises(JaxkvError, match="17 tokens in 1 sequences"):
        pick_bucket(buckets, num_tokens=17, num_seqs=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seqs": 0, "max_num_batched_tokens": 8}, "max_num_seqs"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens"),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 8, "prefill_tokens": [9]}, "from 1 to 8"),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 8, "decode_seqs": [0]}, "from 1 to 2"),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 8, "decode_seqs": "x"}, "from 1 to 2, not 'x'"),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 8, "prefill_tokens": 4}, "prefill buckets .* not 4"),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 8, "prefill_tokens": (True,)}, "not True"),
        ({"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9}, "max_num_seqs must be at most 1048576"),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 10**9}, "max_num_batched_tokens must be at most"),
    ],
)
def test_bad_limits_are_refused(arguments, message):
    with pytest.raises(JaxkvError, match=message):
        make_buckets(**arguments)
