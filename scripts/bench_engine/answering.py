"""What every other side of bench_engine.py does: answer questions from standard input, a JSON line each."""

import json
import sys
from typing import Any


def answer(peer: Any) -> None:
    """Until the input ends: {"do": NAME, ...} calls that method with the rest; its result is the answer.
    Standard output is kept for answers, whatever the library prints goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        question = json.loads(line)
        result = getattr(peer, question.pop("do"))(**question)
        print(json.dumps(result), file=answers, flush=True)
