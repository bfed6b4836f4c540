"""`jaxkv generate`, in this process; what ends before a model runs, also as a process of its own."""

import json
import os
import signal
import subprocess
import sys

import jax
import pytest

from jaxkv.cli import main
from jaxkv.engine.llm import LLM
from jaxkv.engine.sampling_params import SamplingParams
from tests.engine.serving import answers


@pytest.fixture(scope="module", autouse=True)
def compiled_steps_are_kept(tmp_path_factory):
    """Every run here starts an engine of the same few shapes."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def generate(folder, *arguments):
    small = ["--memory", "1MiB", "--max-num-seqs", "1", "--max-num-batched-tokens", "16"]
    return main(["generate", "--model", str(folder), *small, "--block-size", "4", *arguments])


def test_json_holds_the_answers_of_all_prompts_in_order(tiny_folder, bench, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("second prompt\n\nthird\n")
    code = generate(
        tiny_folder,
        *("--prompt", "first", "--prompts", str(tmp_path / "prompts.txt")),
        *("--json", "--max-tokens", "6", "--ignore-eos"),
    )
    assert code == 0
    printed = json.loads(capsys.readouterr().out)
    prompts = [output["prompt"] for output in printed["outputs"]]
    assert prompts == ["first", "second prompt", "third"]
    tokenizer = bench.loaded.tokenizer
    expected = answers(
        bench.engine(),
        [tokenizer.encode(prompt) for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    )
    assert [output["token_ids"] for output in printed["outputs"]] == [list(o.token_ids) for o in expected]
    assert [output["text"] for output in printed["outputs"]] == [o.text for o in expected]
    assert {output["finish_reason"] for output in printed["outputs"]} == {"length"}


def test_an_interrupt_prints_what_there_is_and_ends_with_130(tiny_folder, capsys, monkeypatch):
    step, calls = LLM.step, []

    def interrupted_step(self):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(LLM, "step", interrupted_step)
    before = signal.getsignal(signal.SIGINT)  # a shell's background job starts with it ignored
    assert generate(tiny_folder, "--prompt", "abc", "--max-tokens", "50", "--ignore-eos", "--json") == 130
    printed = capsys.readouterr()
    [output] = json.loads(printed.out)["outputs"]
    assert (output["finish_reason"], len(output["token_ids"])) == ("abort", 4)
    assert "interrupted" in printed.err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_prompt_longer_than_the_maximum_is_refused_before_anything_runs(tiny_folder, capsys):
    code = generate(
        tiny_folder, "--prompt", "short", "--prompt", "x" * 40, "--max-model-len", "32", "--max-tokens", "2"
    )
    assert code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "41 tokens" in printed.err
    assert "32" in printed.err


def refused(capsys, *arguments):
    """The message of a command that must end with code 2 and print no answer."""
    assert main(["generate", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_a_temperature_below_zero_is_refused_before_the_model_is_looked_for(capsys):
    message = refused(capsys, "--model", "no-such-model", "--prompt", "x", "--temperature", "-1")
    assert "temperature" in message
    assert "-1" in message


def test_more_tokens_at_least_than_at_most_are_refused(capsys):
    arguments = ("--model", "no-such-model", "--prompt", "x", "--min-tokens", "9", "--max-tokens", "3")
    assert "min_tokens 9 is more than max_tokens 3" in refused(capsys, *arguments)


def test_a_missing_model_is_named(capsys):
    assert "no-such-model" in refused(capsys, "--model", "no-such-model", "--prompt", "x")


def test_no_prompt_at_all_is_refused(capsys):
    assert "--prompt" in refused(capsys, "--model", "no-such-model")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe\x00text", "0xff at 0"), (b"a\0b", "NUL"), (b"\n \n", "holds no prompt")],
)
def test_a_prompts_file_that_is_no_list_of_prompts_is_refused(capsys, tmp_path, content, message):
    path = tmp_path / "prompts"
    path.write_bytes(content)
    assert message in refused(capsys, "--model", "no-such-model", "--prompts", str(path))


def test_a_prompts_file_that_does_not_exist_is_refused(capsys, tmp_path):
    assert "cannot read" in refused(capsys, "--model", "x", "--prompts", str(tmp_path / "none"))


def test_memory_that_holds_no_block_is_refused(capsys, tiny_folder):
    message = refused(capsys, "--model", str(tiny_folder), "--prompt", "x", "--memory", "5KiB")
    assert "block" in message


def test_truncated_weights_are_refused(capsys, tiny_folder, tmp_path):
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refused(capsys, "--model", str(tmp_path), "--prompt", "x")


def test_an_unknown_architecture_is_named(capsys, tiny_folder, tmp_path):
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Gemma9ForDreams"]}))
    assert "Gemma9ForDreams" in refused(capsys, "--model", str(tmp_path), "--prompt", "x")


def run_alone(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_process_ends_with_code_2_and_no_traceback():
    arguments = ["generate", "--model", "no-such-model", "--prompt", "x", "--temperature", "-1"]
    done = run_alone(f"import sys; from jaxkv.cli import main; sys.exit(main({arguments}))")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jaxkv: error: temperature")
    assert "Traceback" not in done.stderr


def test_where_jax_is_missing_the_extra_to_install_is_named():
    arguments = ["generate", "--model", "gemma3-270m", "--prompt", "x"]
    done = run_alone(
        f"import sys; sys.modules['jax'] = None\nfrom jaxkv.cli import main; sys.exit(main({arguments}))"
    )
    assert done.returncode == 2
    assert "jaxkv[engine]" in done.stderr


def test_an_interrupted_command_does_not_wait_for_what_still_compiles():
    done = run_alone(
        "import threading, time; from jaxkv import cli; cli.main = lambda: cli.INTERRUPTED\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        "print('what there was', end=''); cli.command()"
    )
    assert (done.returncode, done.stdout) == (130, "what there was")


def test_an_interrupt_during_any_import_of_the_command_ends_with_130_and_no_traceback():
    done = run_alone(
        "import importlib, os, sys\n"
        "class Interrupted:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name not in ('jaxkv', 'jaxkv.errors', 'jaxkv.cli'): raise KeyboardInterrupt\n"
        "sys.modules.pop('argparse', None); sys.meta_path.insert(0, Interrupted)\n"
        "from jaxkv.cli import command; command()"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "jaxkv: interrupted\n")
