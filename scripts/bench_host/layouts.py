"""The cache layouts that the cases run on, described in words that both sides translate into their own
specs."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["full", "sliding_window", "mamba"]

NUM_KV_HEADS = 8
HEAD_SIZE = 128


@dataclass(frozen=True)
class Layer:
    """One group's spec. `sliding_window` in tokens, for windows only. All groups have equal page bytes."""

    kind: Kind
    block_size: int
    sliding_window: int = 0

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a bfloat16 K and V page of `block_size` tokens; a recurrent state is given as many."""
        return self.block_size * NUM_KV_HEADS * 2 * HEAD_SIZE * 2


@dataclass(frozen=True)
class Layout:
    """Groups of one model. `title` is what the report prints."""

    name: str
    title: str
    groups: tuple[Layer, ...]

    @property
    def block_size(self) -> int:
        return self.groups[0].block_size

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` settled tokens holds, with a little to spare."""
        total = 0
        for layer in self.groups:
            blocks = -(-num_tokens // layer.block_size)
            if layer.kind == "sliding_window":
                blocks = min(blocks, layer.sliding_window // layer.block_size + 2)
            elif layer.kind == "mamba":
                blocks = 3
            total += blocks
        return total


def _full(block_size: int = 16) -> Layer:
    return Layer("full", block_size)


def _window(block_size: int = 16) -> Layer:
    return Layer("sliding_window", block_size, sliding_window=1024)


def _mamba(block_size: int = 16) -> Layer:
    return Layer("mamba", block_size)


LAYOUTS = (
    Layout("full", "full attention only", (_full(),)),
    Layout("gemma3", "Gemma 3: 6 windows + 1 full", (*(_window(),) * 6, _full())),
    Layout(
        "gemma3_31", "Gemma 3 27B in groups of 2: 26 windows + 5 full", (*(_window(),) * 26, *(_full(),) * 5)
    ),
    Layout("mamba", "full + 3 Mamba, block 16", (_full(), *(_mamba(),) * 3)),
    Layout(
        "mamba_528", "full + 3 Mamba, block 528 (as vLLM plans Granite 4)", (_full(528), *(_mamba(528),) * 3)
    ),
    Layout("three", "three kinds: full + window + Mamba", (_full(), _window(), _mamba())),
)
