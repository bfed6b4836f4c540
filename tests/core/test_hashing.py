import hashlib
import subprocess
import sys

import numpy as np
import pytest

from jaxkv.errors import JaxkvError
from jaxkv.hashing import HASHERS, ROOT, BlockHasher, make_hasher
from jaxkv.request import MultimodalInput, Request

TOKENS = [7, 1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.fixture(params=sorted(HASHERS))
def hasher(request: pytest.FixtureRequest) -> BlockHasher:
    return make_hasher(request.param, 4)


def hashes(hasher: BlockHasher, tokens: list[int], **fields) -> list[bytes]:
    return list(Request("r", tokens, **fields).block_hashes(hasher))


def test_sha256_is_what_the_documentation_says() -> None:
    first = hashlib.sha256(ROOT + np.array(TOKENS[:4], "<i4").tobytes()).digest()
    second = hashlib.sha256(first + np.array(TOKENS[4:8], "<i4").tobytes()).digest()
    assert hashes(make_hasher("sha256", 4), TOKENS) == [first, second]
    assert hashlib.sha256(b"jaxkv prefix hash 1").digest() == ROOT


def test_hashes_are_the_same_in_another_process(hasher: BlockHasher) -> None:
    code = (
        "from jaxkv.hashing import make_hasher; from jaxkv.request import Request;"
        f"print(Request('x', {TOKENS}).block_hashes(make_hasher({hasher.name!r}, 4))[-1].hex())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == hashes(hasher, TOKENS)[-1].hex()


def test_a_hash_stands_for_the_whole_prefix(hasher: BlockHasher) -> None:
    reference = hashes(hasher, TOKENS)
    assert len(reference) == 2
    other = hashes(hasher, [8, *TOKENS[1:]])
    assert other[0] != reference[0]
    assert other[1] != reference[1]
    assert hashes(hasher, TOKENS[:8]) == reference


def test_order_and_place_matter(hasher: BlockHasher) -> None:
    assert hashes(hasher, [1, 2, 3, 4]) != hashes(hasher, [2, 1, 3, 4])
    swapped = hashes(hasher, [5, 6, 7, 8, 1, 2, 3, 4])
    assert swapped[1] != hashes(hasher, [1, 2, 3, 4, 5, 6, 7, 8])[1]
    assert len(set(hashes(hasher, [0] * 40))) == 10


def test_extending_gives_the_hashes_of_the_whole(hasher: BlockHasher) -> None:
    request = Request("r", TOKENS)
    first = list(request.block_hashes(hasher))
    request.append_tokens([10, 11, 12, 13, 14])
    extended = request.block_hashes(hasher)
    assert extended[:2] == first
    assert extended == hashes(hasher, [*TOKENS, 10, 11, 12, 13, 14])


def test_tenants_with_different_salts_or_adapters_never_share(hasher: BlockHasher) -> None:
    variants = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora_name": "a"},
        {"cache_salt": "a", "lora_name": "a"},
        {"cache_salt": ""},
    ]
    found = [hashes(hasher, TOKENS, **fields) for fields in variants]
    assert len({block_hash for some in found for block_hash in some}) == 2 * len(variants)


def test_multimodal_content_counts_from_the_block_it_begins_in(hasher: BlockHasher) -> None:
    def with_image(identifier: str, offset: int, length: int = 2) -> list[bytes]:
        inputs = [MultimodalInput(identifier=identifier, offset=offset, length=length)]
        return hashes(hasher, TOKENS, multimodal_inputs=inputs)

    plain, cat, dog = hashes(hasher, TOKENS), with_image("cat", 5), with_image("dog", 5)
    assert cat[0] == dog[0] == plain[0]
    assert len({plain[1], cat[1], dog[1], with_image("cat", 4)[1]}) == 4
    across = with_image("cat", 2, 4)
    assert across[0] != plain[0]
    # The second block continues the image: it is the image's other part, not a plain block.
    assert across[1] != with_image("cat", 2, 2)[1]


def test_image_in_a_later_request_changes_only_what_follows_when_extended(hasher: BlockHasher) -> None:
    inputs = [MultimodalInput(identifier="cat", offset=6, length=3)]
    request = Request("r", TOKENS, multimodal_inputs=inputs)
    first = list(request.block_hashes(hasher))
    request.append_tokens([10, 11])
    whole = hashes(hasher, [*TOKENS, 10, 11], multimodal_inputs=inputs)
    assert request.block_hashes(hasher) == whole
    assert whole[:2] == first


@pytest.mark.parametrize("name", sorted(HASHERS))
def test_look_ahead_puts_the_following_tokens_into_a_hash(name: str) -> None:
    ahead = make_hasher(name, 4, 2)
    assert ahead.num_hash_blocks(9) == 1
    assert ahead.num_hash_blocks(10) == 2
    assert ahead.num_hash_blocks(1) == 0
    reference = ahead.hash_blocks(Request("r", TOKENS), 0, 2, None)
    changed = ahead.hash_blocks(Request("r", [*TOKENS[:9], 0]), 0, 2, None)
    assert changed[0] == reference[0]
    assert changed[1] != reference[1]
    assert ahead.hash_blocks(Request("r", TOKENS), 1, 2, reference[0]) == reference[1:]


def test_no_two_of_many_random_blocks_collide(hasher: BlockHasher) -> None:
    rng = np.random.default_rng(0)
    found = set()
    for _ in range(50):
        found.update(hashes(hasher, rng.integers(0, 3, 400).tolist()))
    # Prefixes of four tokens out of three: 81 different first blocks at most; all later prefixes differ.
    assert len(found) > 50 * 95


def test_an_unknown_hash_is_refused_with_the_known_ones() -> None:
    with pytest.raises(JaxkvError, match=r"'md5'.*sha256, mix128"):
        make_hasher("md5", 4)
    with pytest.raises(JaxkvError, match=r"hash_block_size.*0"):
        make_hasher("sha256", 0)
