"""`siftkv serve`: its options, its port, and how it ends."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from siftkv.cli import app
from siftkv.cli.serve import parse_size
from siftkv.errors import SiftKVError
from siftkv.server.run import Address, listen
from siftkv.server.settings import ServerSettings
from tests.models_helpers import FAMILIES, save_random
from tests.server.live import Live, byte_llm, wait_for


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments], prog_name="siftkv")


def test_help_has_examples() -> None:
    assert "siftkv serve" in invoke("--help").stdout.partition("Example")[2]


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = invoke("--port", str(port))
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: port {port} on 127.0.0.1 is in use")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kv", "nonsense"], "unknown kv policy 'nonsense'"),
        (["--allow-kv", "nonsense"], "unknown kv policy 'nonsense'"),
        (["--host", "no.such.host.invalid"], "cannot listen on"),
        (["--ssl-keyfile", "x.pem"], "TLS needs both"),
        (["--ssl-keyfile", "x.pem", "--ssl-certfile", "y.pem"], "there is no file x.pem"),
        (["--max-body-bytes", "much"], "--max-body-bytes 'much' is no size"),
        (["--log-level", "loud"], "unknown --log-level 'loud'"),
        (["--load-format", "gguf"], "unknown --load-format 'gguf'"),
    ],
    ids=str,
)
def test_wrong_options_are_one_line(arguments: list[str], says: str) -> None:
    result = invoke(*arguments, "--port", "0")
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert says in line


@pytest.mark.parametrize(
    "arguments", [["--port", "99999"], ["--port", "-1"], ["--max-queue", "-5"], ["--drain-seconds", "-1"]], ids=str
)
def test_numbers_out_of_range(arguments: list[str]) -> None:
    """99999 would be port 34463 to the system."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr


def test_files_that_are_no_certificate_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a.pem"
    file.write_text("garbage")
    result = invoke("--ssl-keyfile", str(file), "--ssl-certfile", str(file), "--port", "0")
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert "no key and certificate" in line


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("12GiB", 12 << 30), ("1.5 kb", 1500), ("8MiB", 8 << 20), ("2B", 2)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--x", text) == size
    with pytest.raises(SiftKVError, match="--x"):
        parse_size("--x", text + "x")


def test_a_drained_server_finishes_and_refuses(caplog: pytest.LogCaptureFixture) -> None:
    server = Live(byte_llm()).ready()
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        server.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.worker.state == "draining")
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        assert int(refused.headers["Retry-After"]) > 0
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert server.join()
    assert server.worker.state == "stopped"


def test_what_does_not_end_in_time_is_told_so() -> None:
    server = Live(byte_llm(), ServerSettings(drain_seconds=0.05)).ready()
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}
    found: list[httpx.Response] = []
    whole = threading.Thread(target=lambda: found.append(server.post("/v1/completions", body)))
    whole.start()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        wait_for(lambda: server.worker.in_system == 2)
        server.server.handle_exit(signal.SIGTERM, None)
        events = [line for line in lines if line.startswith("data: ")]
    whole.join(20)
    assert "shutting down" in json.loads(events[-2][6:])["error"]["message"]
    assert found[0].status_code == 503
    assert server.join()
    llm = server.worker.llm
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def test_a_second_signal_does_not_wait() -> None:
    server = Live(byte_llm(), ServerSettings(drain_seconds=600)).ready()
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
        server.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.worker.state == "draining")
        server.server.handle_exit(signal.SIGTERM, None)
        assert server.join()
    server.worker.stop()
    assert server.worker.state == "stopped"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make, *names], check=True, capture_output=True)
    server = Live(byte_llm(), address=Address(keyfile=str(key), certfile=str(certificate))).ready()
    assert server.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(certificate))
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, verify=trusted).status_code == 200
    server.close()


def _serve(folder: Path, *options: str) -> tuple[subprocess.Popen[str], int]:
    bound = listen(Address(port=0))
    port = bound.getsockname()[1]
    bound.close()
    command = [sys.executable, "-c", "from siftkv.cli import main; main()", "serve", str(folder), "--port", str(port)]
    return subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True), port


def test_sigterm_ends_the_process_with_0(tmp_path: Path) -> None:
    save_random(FAMILIES["llama"], tmp_path / "model")
    options = [
        "--kernels",
        "reference",
        "--max-num-seqs",
        "1",
        "--served-model-name",
        "mine",
        "--kv",
        "diffkv:window=4,sinks=1",
    ]
    process, port = _serve(tmp_path / "model", *options)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, process.stderr and process.stderr.read()
        try:
            return httpx.get(f"{url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(ready, 120, pause=0.5)
        body = {"model": "mine", "prompt": [[5, 6, 7]] * 3, "max_tokens": 30, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert sum('"finish_reason":"length"' in line for line in rest) == 3
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert process.stderr is not None
    first, *logs = process.stderr.read().splitlines()
    assert first == f"loading {tmp_path / 'model'}"
    serving = [line for line in logs if not line.startswith("{")]
    assert serving == [f"serving {tmp_path / 'model'} at {url}"]
    assert any(json.loads(line)["message"].startswith("draining") for line in logs if line.startswith("{"))


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("siftkv.server.logs.configure", lambda *_: None)
    result = invoke(str(tmp_path / "nothing"), "--port", "0")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: There is no model")
    assert result.stdout == ""
