"""The command `jaxkv`: finds the subcommand, runs it, turns bad input into exit code 2.

Whatever takes time to import is imported inside `main`, which knows what to do when Ctrl-C comes meanwhile.
"""

import importlib
import os
import sys

from jaxkv.errors import JaxkvError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

INTERRUPTED = 130

# A module of jaxkv.commands each, with `add_arguments(parser)` and `run(args) -> int`. They are imported when
# asked for, so that `jaxkv plan` works where jax is not installed.
COMMANDS = {
    "generate": "answer prompts with a model",
    "plan": "show how a model's cache is laid out and what fits",
    "replay": "replay a trace of requests and measure hit rates",
    "scenario": "run or check a cache scenario written as JSON",
}


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code.

    0 done, 1 a check failed, 2 bad input, 130 interrupted, 141 the reader of the output went away.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except JaxkvError as error:
        print(f"jaxkv: error: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"jaxkv: error: not enough memory on this machine: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxkv: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: list[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="jaxkv", description="One pool of pages for hybrid models, in JAX.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == chosen:
            importlib.import_module(f"jaxkv.commands.{name}").add_arguments(subparser)
    args = parser.parse_args(argv)
    return importlib.import_module(f"jaxkv.commands.{args.command}").run(args)


def command() -> "NoReturn":
    """The installed command: `main`, except that an interrupted one ends at once. A compilation under way
    cannot be stopped, and Python would wait for its thread."""
    code = main()
    if code == INTERRUPTED:
        try:
            sys.stdout.flush()
        finally:
            os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    command()
