"""llama.cpp as the other side of bench_engine.py, on the same dequantised weights; see transformers_peer.py.

Runs in a Python that has llama-cpp-python and gguf. The packaged file is dequantised into a file of float32
or bfloat16 matrices (norms stay float32), deleted at the end. Its cache has llama.cpp's default, float16.
"""

import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import llama_cpp  # pyright: ignore[reportMissingImports] (in an environment of its own)
import numpy as np
from answering import answer

MAX_TOKENS = 8192 + 64
MAX_SEQUENCES = 8
MICROBATCH = 512
SKIPPED = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


class Token(NamedTuple):
    """One input token: its id, its position, its sequence, and whether its logits are wanted."""

    token_id: int
    position: int
    sequence: int
    sampled: bool


class Peer:
    """One model, loaded by the first request."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.rng = np.random.default_rng(0)
        self.folder = tempfile.TemporaryDirectory()

    def load(self, gguf: str, dtype: str) -> dict[str, Any]:
        path = Path(self.folder.name) / f"{dtype}.gguf"
        dequantise(Path(gguf), path, dtype)
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = MAX_SEQUENCES * MAX_TOKENS
        options.n_batch, options.n_ubatch = MAX_TOKENS, MICROBATCH
        options.n_seq_max = MAX_SEQUENCES
        options.n_threads = options.n_threads_batch = self.threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(MAX_TOKENS, 0, 1)
        return {}

    def decode(self, batch: int, prompt: int, tokens: int) -> dict[str, Any]:
        """Greedy decoding after a prompt of random tokens; the prompt is not counted."""
        self._forget()
        rows = self.rng.integers(3, self.vocabulary, (batch, prompt))
        last = self._run(
            Token(int(rows[s, i]), i, s, i == prompt - 1) for s in range(batch) for i in range(prompt)
        )
        start = time.perf_counter()
        for step in range(tokens):
            last = self._run(Token(token, prompt + step, s, True) for s, token in enumerate(last))
        return {"tokens_per_second": batch * tokens / (time.perf_counter() - start)}

    def prefill(self, prompt: int) -> dict[str, Any]:
        """One prompt of random tokens up to its first token."""
        self._forget()
        ids = self.rng.integers(3, self.vocabulary, prompt)
        tokens = [Token(int(token), i, 0, i == prompt - 1) for i, token in enumerate(ids)]
        start = time.perf_counter()
        self._run(tokens)
        seconds = time.perf_counter() - start
        return {"tokens_per_second": prompt / seconds, "seconds": seconds}

    def _forget(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def _run(self, tokens: Iterable[Token]) -> list[int]:
        """One call; the likeliest next token of every sampled position."""
        batch, sampled = self.batch, []
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token.token_id, token.position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, token.sequence
            batch.logits[i] = token.sampled
            batch.n_tokens = i + 1
            if token.sampled:
                sampled.append(i)
        code = llama_cpp.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode of {batch.n_tokens} tokens ended with code {code}")
        logits = (llama_cpp.llama_get_logits_ith(self.context, i) for i in sampled)
        return [int(np.ctypeslib.as_array(row, (self.vocabulary,)).argmax()) for row in logits]


def dequantise(source: Path, target: Path, dtype: str) -> None:
    """Writes `source` again with matrices of `dtype` and everything else in float32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if not field.name.startswith(SKIPPED):
            of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if dtype == "bfloat16" and values.ndim > 1:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    answer(Peer(int(sys.argv[1])))
