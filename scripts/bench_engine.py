"""Measures the engine: decode and prefill speed, time to first token with and without a prefix hit.

    python scripts/bench_engine.py [--json] [--torch-python PATH] [--llama-python PATH] [--rounds 3]
                                   [--dtype float32 --dtype bfloat16] [--case decode_8]

With --torch-python (a Python that has torch, transformers, gguf and accelerate) every round also asks
transformers, with --llama-python (one that has llama-cpp-python and gguf) llama.cpp, on the same dequantised
weights, so that all sides see the same machine; figures are medians over rounds, ratios of medians.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import LLM, SamplingParams
from jaxkv.engine.loading import load_model
from jaxkv.engine.loading.packaged import gemma3_270m
from jaxkv.engine.outputs import RequestOutput

PEERS = Path(__file__).parent / "bench_engine"
MAX_NUM_SEQS = 8
CHUNK = 1024
LONG_PROMPT = 8192
DECODE_PROMPT, DECODE_TOKENS = 64, 48
HIT_PROMPT, HIT_REST = 1024, 16
LONG_CASE = f"prefill_{LONG_PROMPT}"
CASES = ("decode_1", f"decode_{MAX_NUM_SEQS}", f"prefill_{CHUNK}", LONG_CASE, "prefix_hit")
COMPLAINT_LINES = 20


class Ours:
    """The engine with one dtype."""

    def __init__(self, model: str, dtype: str, memory: str) -> None:
        self._rng = np.random.default_rng(0)
        self.llm = LLM(
            load_model(model, dtype),
            memory=memory,
            max_model_len=LONG_PROMPT + 64,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=CHUNK,
            async_scheduling=True,
            decode_buckets=(1, MAX_NUM_SEQS),
            prefill_buckets=(64, CHUNK),
            progress=sys.stderr.isatty(),
        )

    def prompt(self, length: int) -> list[int]:
        """Random tokens, never the same twice."""
        return self._rng.integers(3, self.llm.loaded.config.vocab_size, length).tolist()

    def _answer(self, prompts: list[list[int]], max_tokens: int) -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return self.llm.generate(prompts, params)

    def decode(self, batch: int) -> dict[str, float]:
        """Tokens a second while `batch` requests decode; in milliseconds a step the host's part, and the
        processor time on all cores together, which other work on the machine disturbs less."""
        params = SamplingParams(temperature=0, max_tokens=DECODE_TOKENS + 2, ignore_eos=True)
        request_ids = self.llm.submit([self.prompt(DECODE_PROMPT) for _ in range(batch)], params)
        started: set[str] = set()
        while len(started) < batch:
            started |= {delta.request_id for delta in self.llm.step()}
        self.llm.metrics.reset()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        tokens = sum(len(self.llm.step()) for _ in range(DECODE_TOKENS))
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
        host = self.llm.metrics.host_time
        self.llm.abort(request_ids)
        return {
            "tokens_per_second": tokens / seconds,
            "host_ms_per_step": 1000 * host / DECODE_TOKENS,
            "cpu_ms_per_step": 1000 * cpu / DECODE_TOKENS,
        }

    def prefill(self, length: int) -> dict[str, float]:
        """Tokens a second of one prompt up to its first token."""
        seconds = _first_token(self._answer([self.prompt(length)], 1)[0])
        return {"tokens_per_second": length / seconds, "seconds": seconds}

    def hit(self) -> dict[str, float]:
        """Seconds to the first token of a prompt, and of one that shares all but its end."""
        prompt = self.prompt(HIT_PROMPT)
        cold = _first_token(self._answer([prompt], 1)[0])
        [output] = self._answer([prompt[:-HIT_REST] + self.prompt(HIT_REST)], 1)
        return {"cold_s": cold, "hit_s": _first_token(output), "cached_tokens": output.num_cached_tokens}


class Peer:
    """Another engine in its own process. Where that one dies, this one ends with what it wrote last."""

    def __init__(self, name: str, python: str, dtype: str) -> None:
        self._name = name
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [python, str(PEERS / f"{name}_peer.py"), str(os.cpu_count())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        self.ask("load", gguf=str(gemma3_270m()), dtype=dtype)

    def ask(self, do: str, **arguments: Any) -> dict[str, float]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do, **arguments}), file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            last = self.close()
            code = self._process.returncode
            raise SystemExit(f"the {self._name} process ended with code {code}; it wrote last:\n{last}")
        return json.loads(line)

    def close(self) -> str:
        """Waits for its end; the last lines that it wrote to standard error."""
        self._process.communicate()
        with self._complaints as complaints:
            complaints.seek(0)
            return "".join(complaints.readlines()[-COMPLAINT_LINES:])


def _first_token(output: RequestOutput) -> float:
    seconds = output.metrics.time_to_first_token
    assert seconds is not None
    return seconds


def measure(dtype: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians by case and figure, e.g. result["decode_8"]["tokens_per_second"]; those of another engine begin
    with its name, its ratio is ours over its.
    """
    ours = Ours(args.model, dtype, args.memory)
    pythons = {"transformers": args.torch_python, "llama": args.llama_python}
    peers = {name: Peer(name, python, dtype) for name, python in pythons.items() if python}
    cases: dict[str, tuple[Callable[[], dict[str, float]], tuple[str, dict[str, int]] | None]] = {
        f"decode_{batch}": (
            lambda batch=batch: ours.decode(batch),
            ("decode", {"batch": batch, "prompt": DECODE_PROMPT, "tokens": DECODE_TOKENS // 2}),
        )
        for batch in (1, MAX_NUM_SEQS)
    }
    for length in (CHUNK, LONG_PROMPT):
        cases[f"prefill_{length}"] = (
            lambda length=length: ours.prefill(length),
            ("prefill", {"prompt": length}),
        )
    cases["prefix_hit"] = (ours.hit, None)
    cases = {case: cases[case] for case in args.case}
    samples: dict[str, dict[str, list[float]]] = {case: {} for case in cases}
    for round_number in range(args.rounds + 1):
        for case, (run, question) in cases.items():
            if not round_number and case == LONG_CASE and f"prefill_{CHUNK}" in cases:
                continue  # the same steps as the shorter prompt's, only more of them
            measured = dict(run())
            if question is not None:
                for name, peer in peers.items():
                    answer = peer.ask(question[0], **question[1])
                    measured |= {f"{name}_{figure}": value for figure, value in answer.items()}
            if round_number:  # the first round warms caches of both sides
                for name, value in measured.items():
                    samples[case].setdefault(name, []).append(value)
    for peer in peers.values():
        peer.close()
    result = {
        case: {name: statistics.median(values) for name, values in by_name.items()}
        for case, by_name in samples.items()
    }
    for figures in result.values():
        for name in peers:
            if f"{name}_tokens_per_second" in figures:
                figures[f"{name}_ratio"] = figures["tokens_per_second"] / figures[f"{name}_tokens_per_second"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the engine.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"), help="default: both")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measured rounds, after one to warm up (default 3)"
    )
    parser.add_argument("--memory", default="512MiB", help="of the cache (default 512MiB)")
    parser.add_argument(
        "--torch-python", metavar="PATH", help="a Python with torch, to measure transformers too"
    )
    parser.add_argument(
        "--llama-python", metavar="PATH", help="a Python with llama-cpp-python, to measure llama.cpp too"
    )
    parser.add_argument(
        "--case", action="append", choices=CASES, help="measure this; may be repeated (default: everything)"
    )
    parser.add_argument("--quick", action="store_true", help="leave out the prompt of 8,192 tokens")
    args = parser.parse_args()
    args.case = [case for case in args.case or CASES if not (args.quick and case == LONG_CASE)]
    results = {}
    for dtype in args.dtype or ["float32", "bfloat16"]:
        results[dtype] = measure(dtype, args)
        if not args.json:
            print_table(dtype, results[dtype])
    if args.json:
        print(json.dumps({"cores": os.cpu_count(), "rounds": args.rounds, "results": results}, indent=1))


def print_table(dtype: str, cases: dict[str, dict[str, float]]) -> None:
    for case, figures in cases.items():
        line = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"{dtype:9} {case:13} {line}", flush=True)


if __name__ == "__main__":
    main()
