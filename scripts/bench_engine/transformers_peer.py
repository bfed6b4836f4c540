"""The other side of bench_engine.py: transformers on the same dequantised weights, asked over standard input.

Runs in a Python that has torch, transformers, gguf and accelerate (without which transformers reads no GGUF
file). Each line read is a JSON request, each line written its answer:

    {"do": "load", "gguf": PATH, "dtype": "float32"}          -> {}
    {"do": "decode", "batch": 8, "prompt": 64, "tokens": 32}  -> {"tokens_per_second": ...}
    {"do": "prefill", "prompt": 1024}                         -> {"tokens_per_second": ..., "seconds": ...}
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports] (in an environment of its own)
from answering import answer
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    DynamicCache,
)


class Peer:
    """One model, loaded by the first request."""

    def load(self, gguf: str, dtype: str) -> dict[str, Any]:
        path = Path(gguf)
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, dtype)
        ).eval()
        self.vocabulary = self.model.config.vocab_size
        return {}

    @torch.inference_mode()
    def decode(self, batch: int, prompt: int, tokens: int) -> dict[str, Any]:
        """Greedy decoding after a prompt of random tokens; the prompt is not counted."""
        cache = DynamicCache(config=self.model.config)
        ids = torch.randint(3, self.vocabulary, (batch, prompt))
        last = (
            self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        )
        start = time.perf_counter()
        for _ in range(tokens):
            logits = self.model(last[:, None], past_key_values=cache, use_cache=True).logits
            last = logits[:, -1].argmax(-1)
        return {"tokens_per_second": batch * tokens / (time.perf_counter() - start)}

    @torch.inference_mode()
    def prefill(self, prompt: int) -> dict[str, Any]:
        """One prompt of random tokens up to its first token."""
        ids = torch.randint(3, self.vocabulary, (1, prompt))
        start = time.perf_counter()
        self.model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).item()
        seconds = time.perf_counter() - start
        return {"tokens_per_second": prompt / seconds, "seconds": seconds}


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    answer(Peer())
