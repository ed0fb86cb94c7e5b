"""The command line: help, errors, output, conversations, and the demo end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from siftkv.cli import app
from siftkv.cli.formats import DEFAULT_HEAD_DIM, EXAMPLES, markdown_table
from siftkv.errors import ModelError
from siftkv.formats import KNOWN_FORMATS
from siftkv.kernels import reference
from tests.models_helpers import FAMILIES, save_random


def _commands(group: Any, *path: str) -> list[list[str]]:
    """The words of every command below a group."""
    found = []
    for name, command in group.commands.items():
        found += _commands(command, *path, name) if hasattr(command, "commands") else [[*path, name]]
    return found


COMMANDS = _commands(typer.main.get_group(app))
KV = "diffkv:window=4,sinks=1"
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def siftkv(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, prog_name="siftkv")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_random(FAMILIES["llama"], folder)
    return str(folder)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "chatty"
    save_random(FAMILIES["llama"], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.fixture
def _reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to compile: what is tested here is the command line."""
    monkeypatch.setattr("siftkv.engine.llm.get_kernels", lambda *_: reference)


def test_torch_is_not_loaded_for_help_and_openmp_is_told_not_to_spin() -> None:
    code = (
        "import os, sys; os.environ.pop('OMP_WAIT_POLICY', None); sys.argv = ['siftkv', '--help']\n"
        "from siftkv.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False PASSIVE"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    result = siftkv(*command, "--help")
    assert result.exit_code == 0
    assert f"siftkv {' '.join(command)}" in result.stdout.partition("Example")[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "w5", "--model", "no-such-model"], "There is no model 'no-such-model'"),
        (["generate", "w5", "--kv", "nonsense"], "unknown kv policy 'nonsense'"),
        (["generate", "w5", "--kv", "diffkv:alpha_low=2"], "alpha_low=2.0 is above"),
        (["generate", "w5", "--temperature", "-1"], "temperature must be"),
        (["generate", "w5", "--top-p", "0"], "top_p must be"),
        (["generate", "w5", "--max-tokens", "0"], "max_tokens must be"),
        (["generate", "w5", "--n", "0"], "n must be"),
        (["generate", "--file", "/no/such/file.txt"], "cannot read /no/such/file.txt"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "-"], "the prompt is empty"),
        (["generate"], "give one prompt"),
        (["generate", "w5", "--file", "x.txt"], "give one prompt"),
        (["generate", "w5", "--json", "/no/such/folder/x.json"], "cannot write"),
        (["chat", "--kv", "uniform:k3v3"], "unknown format 'k3v3'"),
        (["models", "pull", "nothing"], "There is no built-in model 'nothing'"),
        (["models", "path", "nothing"], "There is no built-in model 'nothing'"),
        (["formats", "--head-dim", "12"], "head_dim 12"),
        (["formats", "--head-dim", "64", "--model", "x"], "not both"),
        (["bench", "selection", "--json", "/no/such/folder/x.json"], "cannot write"),
        (["bench", "drift", "--plot", "/no/such/folder/x.png"], "cannot write"),
        (["demo", "--kv", "nonsense"], "unknown kv policy 'nonsense'"),
        (["demo", "--json", "/no/such/folder/x.json"], "cannot write"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = siftkv(*arguments, stdin="")
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line


@pytest.mark.usefixtures("_reference_kernels")
class TestGenerate:
    def test_text_on_stdout_and_report_on_stderr(self, saved: str) -> None:
        result = siftkv("generate", "w5 w6 w7", "--model", saved, "--kv", KV, "--max-tokens", "8")
        assert result.exit_code == 0, result.stderr
        assert len(result.stdout.split()) >= 1
        [line] = result.stderr.splitlines()
        assert line.startswith("KV cache: ")
        assert "of bf16" in line
        assert "window" in line

    def test_streamed_or_not_the_text_is_the_same(self, saved: str) -> None:
        arguments = ["generate", "w5 w6 w7", "--model", saved, "--kv", KV, "--max-tokens", "12"]
        texts = {siftkv(*arguments, flag).stdout for flag in ("--stream", "--no-stream")}
        assert len(texts) == 1

    def test_prompt_from_file_and_stdin(self, saved: str, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_text("w5 w6 w7")
        common = ["--model", saved, "--max-tokens", "6", "--seed", "1", "--temperature", "1"]
        texts = {
            siftkv("generate", "w5 w6 w7", *common).stdout,
            siftkv("generate", "-", *common, stdin="w5 w6 w7").stdout,
            siftkv("generate", "--file", "-", *common, stdin="w5 w6 w7").stdout,
            siftkv("generate", "--file", str(tmp_path / "p.txt"), *common).stdout,
        }
        assert len(texts) == 1

    def test_json_holds_outputs_and_reports(self, saved: str, tmp_path: Path) -> None:
        path = tmp_path / "out.json"
        sampling = ["--n", "2", "--temperature", "1", "--seed", "3", "--max-tokens", "5"]
        result = siftkv("generate", "w5 w6", "--model", saved, "--kv", KV, *sampling, "--json", str(path))
        assert result.exit_code == 0, result.stderr
        assert "--- 2 of 2 ---" in result.stdout
        stored = json.loads(path.read_text())
        assert stored["kv"].startswith("diffkv:")
        assert [output["index"] for output in stored["outputs"]] == [0, 1]
        for output in stored["outputs"]:
            assert output["kv"]["tokens_seen"] == len(stored["prompt_token_ids"]) + len(output["token_ids"]) - 1
            assert output["kv"]["ratio"] == output["kv"]["physical_bytes"] / output["kv"]["bf16_bytes"]
        alone = siftkv("generate", "w5 w6", "--model", saved, "--kv", KV, *sampling, "--json", "-")
        assert json.loads(alone.stdout)["outputs"] == stored["outputs"]

    def test_stop_strings(self, saved: str) -> None:
        common = ["generate", "w5 w6 w7", "--model", saved, "--max-tokens", "12"]
        words = siftkv(*common).stdout.split()
        stopped = siftkv(*common, "--stop", words[1]).stdout.split()
        assert stopped == words[: words.index(words[1])]

    def test_chat_needs_a_template(self, saved: str) -> None:
        result = siftkv("generate", "w5", "--chat", "--model", saved)
        assert result.exit_code == 2
        assert "no chat template" in result.stderr


@pytest.mark.usefixtures("_reference_kernels")
class TestChat:
    def test_conversation_grows_and_is_forgotten(self, chatty: str) -> None:
        lines = "w5 w6\n/kv\nw7\n/kv\n/reset\n/kv\n\nw5 w6\n/kv\n/exit\nw8\n"
        result = siftkv("chat", "--model", chatty, "--kv", KV, "--max-tokens", "3", stdin=lines)
        assert result.exit_code == 0, result.stderr
        reports = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit()]
        tokens = [int(cells[0]) for cells in reports]
        assert len(tokens) == 3
        assert tokens[1] > tokens[0] == tokens[2]
        assert result.stderr.splitlines() == ["The conversation is forgotten.", "No answer has been finished yet."]

    def test_end_of_input_ends_it(self, chatty: str) -> None:
        result = siftkv("chat", "--model", chatty, "--system", "w9", "--max-tokens", "2", stdin="w5")
        assert result.exit_code == 0
        assert result.stdout.strip()

    def test_unknown_command_is_not_sent_to_the_model(self, chatty: str) -> None:
        result = siftkv("chat", "--model", chatty, stdin="/nothing\n")
        assert result.exit_code == 0
        assert result.stdout == ""
        assert "There is no /nothing" in result.stderr

    def test_a_piped_conversation_that_outgrows_the_context_fails(self, chatty: str) -> None:
        result = siftkv("chat", "--model", chatty, stdin="w5 " * 100 + "\n")
        assert result.exit_code == 2
        assert "context holds 64" in result.stderr

    def test_a_model_without_template_is_refused_at_once(self, saved: str) -> None:
        result = siftkv("chat", "--model", saved, stdin="w5\n")
        assert result.exit_code == 2
        assert "no chat template" in result.stderr


def test_models_list_and_path() -> None:
    assert "smollm2-135m" in siftkv("models", "list").stdout
    assert siftkv("models", "path", "smollm2-135m").stdout.strip().endswith("smollm2-135m")


def test_formats_table_shows_every_format(saved: str) -> None:
    table = siftkv("formats", "--head-dim", "64").stdout
    for name in (*KNOWN_FORMATS, *EXAMPLES):
        assert f"\n {name} " in table
    assert siftkv("formats", "--model", saved).stdout == siftkv("formats", "--head-dim", "8").stdout


def test_documented_table_is_what_the_command_prints() -> None:
    page = (Path(__file__).parents[1] / "docs" / "formats.md").read_text(encoding="utf-8")
    begin, end = "do not edit by hand -->\n", "<!-- end of generated -->"
    committed = page.partition(begin)[2].partition(end)[0]
    assert committed == siftkv("formats", "--markdown").stdout == markdown_table(DEFAULT_HEAD_DIM) + "\n"


@pytest.mark.usefixtures("_reference_kernels")
@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 1)])
def test_interruptions_are_quiet(raised: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise raised

    monkeypatch.setattr("siftkv.models.list_models", fail)
    monkeypatch.setattr("siftkv.cli.group._discard_stdout", lambda: None)
    result = siftkv("models", "list")
    assert (result.exit_code, result.output) == (code, "")


@pytest.mark.usefixtures("_reference_kernels")
def test_an_error_made_of_an_interruption_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ModelError("could not import")

    monkeypatch.setattr("siftkv.models.list_models", fail)
    assert siftkv("models", "list").exit_code == 2
    monkeypatch.setattr("siftkv.cli.group.Interrupts.seen", True)
    assert siftkv("models", "list").exit_code == 130


@pytest.mark.model
def test_demo_end_to_end(tmp_path: Path) -> None:
    out, path = tmp_path / "pictures", tmp_path / "demo.json"
    result = siftkv("demo", "--prompt-tokens", "256", "--out", str(out), "--json", str(path))
    assert result.exit_code == 0, result.stderr
    stored = json.loads(path.read_text())
    full, moderate, strong = stored["data"]["policies"]
    assert full["divergence"] is None
    assert full["text_report"]["ratio"] > moderate["text_report"]["ratio"] > strong["text_report"]["ratio"]
    assert 0 < moderate["divergence"]["mean_kl"] < strong["divergence"]["mean_kl"] < 1
    assert all(policy["answer"] for policy in (full, moderate, strong))
    assert full["answer"] in result.stdout
    for picture in ("kept_tokens.png", "token_fates.png"):
        assert str(out / picture) in result.stdout
        assert (out / picture).stat().st_size > 10_000
