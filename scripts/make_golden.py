"""Makes tests/golden/: what transformers' models answer, in float32.

    python scripts/make_golden.py --gguf gemma-3-270m-q4_k_m.gguf    # writes gemma3_270m.npz and
                                                                     # gemma3_tokens.json
    python scripts/make_golden.py --tiny jamba lfm3                  # writes jamba_tiny.npz, lfm3_tiny.npz

Needs torch, transformers (5.24 knows all families), gguf and accelerate, which the tests do not. transformers
reads the same file with its own name map, so the comparison covers ours; a tensor that it misses or does not
know stops the script. Every greedy token is the best of one pass over the whole sequence, without a cache.
Tiny models are those of scripts/make_tiny_checkpoint.py with its default seed and layers.

Each file holds for prompt i: `tokens_i` (prompt and answer), `num_prompt_i`, `positions_i` (whose next-token
logits were kept), `top_ids_i` and `top_logits_i` (the largest of each), `some_logits_i` (every `stride`-th
token's), and `log_sum_i` (log of the sum of exponentials of the whole row, so that no logit goes unchecked).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports] (in an environment of its own)
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.make_tiny_checkpoint import write_checkpoint  # noqa: E402
from scripts.tiny_models import MODELS  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
NUM_GREEDY = 32
SHORT_PROMPT, LONG_PROMPT = 64, 1500
TINY_PROMPTS, TINY_NUM_GREEDY, TINY_STRIDE = (1, 20, 77, 300), 16, 2
TOP = 16
PROMPT_ROWS = 9

TEXTS = (
    "The lighthouse at the end of the bay had been dark for eleven years when the letter "
    "arrived. It was written in a careful hand, on paper that smelled of salt, and it asked only "
    "one thing of the old keeper: that he climb the stairs once more and light the lamp before "
    "the first storm of the autumn, for a ship was coming.",
    'def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n    """Merges two sorted '
    'lists into one sorted list."""\n    merged = []\n    i = j = 0\n    while i < len(left) and j '
    "< len(right):\n        if left[i] <= right[j]:\n            "
    "merged.append(left[i])\n            i += 1\n        else:\n",
    "Die Katze saß auf der Fensterbank und sah dem Schnee zu, der leise auf die Dächer der "
    "kleinen Stadt fiel. Im Zimmer war es warm, und aus der Küche kam der Geruch von frischem "
    "Brot. Niemand sprach, bis die alte Uhr im Flur zu schlagen begann und der Großvater langsam "
    "von seiner Zeitung aufblickte, als hätte er etwas vergessen.",
    "Days of the week, in order:\n1. Monday\n2. Tuesday\n3. Wednesday\n4. Thursday\n5. Friday\n6. "
    "Saturday\n7. Sunday\n\nMonths of the year, in order:\n1. January\n2. February\n3. March\n4. April\n"
    "5. May\n6. June\n7. July\n8. August\n",
    "東京の冬は乾いていて、空がとても青い。朝の電車は混んでいるが、公園まで歩くと、"
    "静かな池のそばで鳥の声が聞こえる。今日は友達と一緒に小さな喫茶店へ行って、"
    "窓の近くの席に座り、温かいお茶を飲みながら、来年の旅行について話した。",
)

AWKWARD_TEXTS = (
    "",
    "a",
    " ",
    " a",
    "  a",
    "a  b",
    " leading",
    "trailing ",
    "   three",
    "\n",
    "\n\n",
    "a\n\n\nb",
    "\t\tx",
    "\r\n",
    " " * 31,
    "\n" * 40,
    "\t" * 40,
    "A" * 100,
    "abc" * 60,
    "    def f(self):\n        return 1\n",
    "naïve café",
    "e\u0301",
    "日本語のテキスト",
    "한국어",
    "עברית",
    "العربية",
    "हिन\u094dदी",
    "ไทย",
    "İstanbul ß",
    "🤖",
    "👩\u200d👩\u200d👧\u200d👦 family",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "\u00a0nbsp\u2003em\u3000wide",
    "\u200bzero\u200dwidth",
    "\ufeffbom",
    "\x00\x01",
    "a\x7fb",
    "\U0010ffff",
    "\ue000",
    "ﬁ ①② ｆｕｌｌ",
    "▁",
    "▁▁a",
    "a▁b",
    "ᐛ╾▥籙",
    "<bos>",
    "<eos>x",
    "<pad>",
    "<mask>",
    "[multimodal]",
    "<start_of_image>",
    "<unused1>",
    "<0x41>",
    "<0xFF>",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<end_of_turn",
    "< eos >",
    "Hi<eos>World",
    "<h1>title</h1>",
    "<table><tr><td>1</td></tr></table>",
    "</s><s>",
    "<|endoftext|>",
    "1234567890",
    "3.14159",
    "x=1;y=2",
    "don't",
    "http://example.com/a?b=c&d=%20",
    "C:\\path\\n",
    "$\\alpha^2$",
)


@torch.inference_mode()
def logits_of(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """Next-token logits float32[len(tokens), V].

    Gemma 3's module does not hand its attention the softcap of its configuration (published models have
    none), though the attention function knows it: given here.
    """
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    options = {} if softcap is None else {"softcap": softcap}
    return model(torch.tensor([tokens]), use_cache=False, **options).logits[0].float().numpy()


def greedy(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """The prompt and its answer, a pass over everything for each token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens


def greedy_with_cache(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """The same, token by token, and confirmed by one pass over everything."""
    model.generation_config.eos_token_id = None  # the answer goes on to its full length
    tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens)[0].tolist()
    best = logits_of(model, tokens)[len(prompt) - 1 : -1].argmax(axis=-1)
    if best.tolist() != tokens[len(prompt) :]:
        raise SystemExit("the tokens generated with a cache are not the best ones without it")
    return tokens


@torch.inference_mode()
def smallest_routing_lead(model: torch.nn.Module, tokens: list[int]) -> float:
    """By how much the last expert chosen leads the first one not chosen, in logits; infinite without
    experts."""
    if not hasattr(model.config, "num_experts_per_tok"):
        return float("inf")
    output = model(torch.tensor([tokens]), use_cache=False, output_router_logits=True)
    chosen = model.config.num_experts_per_tok
    ranked = (logits.sort(dim=-1, descending=True).values for logits in output.router_logits)
    return min(float((logits[:, chosen - 1] - logits[:, chosen]).min()) for logits in ranked)


def answer(model: torch.nn.Module, tokens: list[int], num_prompt: int, stride: int) -> dict[str, np.ndarray]:
    """The arrays of one prompt and its answer, named without its number."""
    logits = logits_of(model, tokens)
    spread = np.linspace(0, num_prompt - 1, PROMPT_ROWS).astype(np.int32)
    positions = np.unique(
        np.concatenate([spread, np.arange(num_prompt - 1, len(tokens) - 1, dtype=np.int32)])
    )
    rows = logits[positions]
    top_ids = np.argsort(-rows, axis=-1)[:, :TOP]
    top = np.take_along_axis(rows, top_ids, axis=-1)
    lead = (top[:, 0] - top[:, 1])[positions >= num_prompt - 1]
    print(
        f"{num_prompt} tokens; smallest lead of a greedy token {lead.min():.4f}, "
        f"of an expert {smallest_routing_lead(model, tokens):.6f}"
    )
    return {
        "tokens": np.asarray(tokens, np.int32),
        "num_prompt": np.asarray(num_prompt, np.int32),
        "positions": positions,
        "top_ids": top_ids.astype(np.int32),
        "top_logits": top,
        "some_logits": rows[:, ::stride],
        "log_sum": torch.logsumexp(torch.from_numpy(rows), dim=-1).numpy(),
    }


def save(
    name: str,
    model: torch.nn.Module,
    answers: Sequence[list[int]],
    num_prompts: Sequence[int],
    stride: int,
) -> None:
    """`answers`: prompts with their answers; `num_prompts`: how many tokens of each are the prompt."""
    arrays = {"stride": np.asarray(stride, np.int32), "num_prompts": np.asarray(len(answers), np.int32)}
    for index, (tokens, num_prompt) in enumerate(zip(answers, num_prompts, strict=True)):
        made = answer(model, tokens, num_prompt, stride)
        arrays |= {f"{key}_{index}": value for key, value in made.items()}
    GOLDEN.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(GOLDEN / name, allow_pickle=False, **arrays)


def save_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Awkward texts and their ids.

    Not among them: runs of more than 31 spaces, where SentencePiece takes the longest token first, as
    llama.cpp does, and transformers' conversion merges by score; and "<unk>" written out, which SentencePiece
    takes for plain text.
    """
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in AWKWARD_TEXTS}
    lines = (f"{json.dumps(text)}: {json.dumps(ids[text])}" for text in ids)
    (GOLDEN / "gemma3_tokens.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def from_gguf(path: Path) -> None:
    folder, file = str(path.parent), path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    print(model.config)
    save_tokens(tokenizer)
    bos = tokenizer.convert_tokens_to_ids("<bos>")
    texts = [*TEXTS, (ROOT / "LICENSE").read_text(encoding="utf-8")]
    lengths = [SHORT_PROMPT] * len(TEXTS) + [LONG_PROMPT]
    prompts = []
    for text, length in zip(texts, lengths, strict=True):
        ids = [bos, *tokenizer.encode(text, add_special_tokens=False)]
        if len(ids) < length:
            raise SystemExit(f"a text of {len(ids)} tokens is too short for a prompt of {length}")
        prompts.append(ids[:length])
    answers = [greedy_with_cache(model, prompt, NUM_GREEDY) for prompt in prompts]
    save("gemma3_270m.npz", model, answers, lengths, stride=512)


def from_tiny(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(name, Path(folder))
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    if any(loading.values()):
        raise SystemExit(f"transformers reads the tensors of {name} otherwise: {loading}")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, model.config.vocab_size, n).tolist() for n in TINY_PROMPTS]
    answers = [greedy(model.eval(), prompt, TINY_NUM_GREEDY) for prompt in prompts]
    save(f"{name.replace('-', '_')}_tiny.npz", model, answers, TINY_PROMPTS, stride=TINY_STRIDE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden files.")
    parser.add_argument("--gguf", type=Path, metavar="FILE")
    parser.add_argument("--tiny", nargs="+", choices=sorted(MODELS), metavar="MODEL", default=[])
    args = parser.parse_args()
    for name in args.tiny:
        from_tiny(name)
    if args.gguf is not None:
        from_gguf(args.gguf)


if __name__ == "__main__":
    main()
