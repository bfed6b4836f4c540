import pytest

from jaxkv.errors import JaxkvError
from jaxkv.memory_size import format_bytes, parse_memory_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5g", 3 * 2**29),
        (".5KiB", 512),
        ("2GB", 2 * 10**9),
        ("1048576", 2**20),
        (1048576, 2**20),
        ("17b", 17),
        ("1.1TiB", 1209462790553),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_memory_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 gigs", "-1GiB", "1e9", "4,5GiB", "nan", True, None, 2.5])
def test_what_is_no_size_is_refused_with_its_value(text) -> None:
    with pytest.raises(JaxkvError, match="is not a memory size"):
        parse_memory_size(text)


@pytest.mark.parametrize("text", ["0", "0.4b", 0, -7])
def test_sizes_below_a_byte_are_refused(text: str | int) -> None:
    with pytest.raises(JaxkvError, match="at least 1 byte"):
        parse_memory_size(text)


def test_sizes_are_written_in_the_largest_fitting_unit() -> None:
    assert [format_bytes(n) for n in (17, 1024, 98304, 3 * 2**29, 5 * 2**40)] == [
        "17 B",
        "1 KiB",
        "96 KiB",
        "1.5 GiB",
        "5 TiB",
    ]
