"""`jaxkv scenario`: what the cache decides in a case written as JSON."""

import argparse
from pathlib import Path

from jaxkv.errors import JaxkvError
from jaxkv.scenario.answer_text import answer_text
from jaxkv.scenario.run import check_file, run_scenario
from jaxkv.scenario.scenario import load_scenario


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", type=Path, help="a scenario as JSON")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare each answer with NAME.answer.json beside the file and with its 'expect' objects; print "
        "every difference (saved answers among the files are passed over)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the answer of one file, or checks files. Returns 1 where an answer differs."""
    if not args.check:
        if len(args.files) != 1:
            raise JaxkvError(f"{len(args.files)} files given; without --check give one")
        print(answer_text(run_scenario(load_scenario(args.files[0]))))
        return 0
    files = [path for path in args.files if not path.name.endswith(".answer.json")]
    if not files:
        raise JaxkvError("no scenario among the files: only saved answers")
    num_differing = 0
    for path in files:
        differences = check_file(path)
        for difference in differences:
            print(f"{path}: {difference}")
        num_differing += bool(differences)
    print(f"{len(files)} scenarios checked, {num_differing} differ")
    return 1 if num_differing else 0
