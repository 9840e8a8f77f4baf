"""python -m cupaged.serve: its flags, what stops it from starting, and one run over a real model."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from cupaged import serve

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
GO_ON = {"ignore_eos": True}


def test_flags_of_engine_and_server_have_their_defaults() -> None:
    args, config = serve.parse_args(["org/name"])

    assert (args.host, args.port, args.served_model_name, args.api_key) == ("127.0.0.1", 8000, None, None)
    assert (config.model, config.max_model_len, config.block_size) == ("org/name", None, 16)


def test_flags_arrive() -> None:
    names = ["--served-model-name", "a", "b"]
    args, config = serve.parse_args(
        ["m", "--max-model-len", "99", "--port", "0", *names, "--shutdown-timeout", "1.5"]
    )

    assert config.max_model_len == 99
    assert (args.port, args.served_model_name, args.shutdown_timeout) == (0, ["a", "b"], 1.5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "MODEL"),
        (["m", "--port", "70000"], "70000 is not in 0..65535"),
        (["m", "--port", "x"], "--port"),
        (["m", "--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["m", "--api-key", ""], "--api-key"),
        (["m", "--block-size", "17"], "block_size must be one of"),
        (["m", "--dtype", "int4"], "--dtype"),
        (["m", "--max-model", "9"], "--max-model"),
        (["m", "--nonsense"], "--nonsense"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        serve.parse_args(flags)

    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def run(*flags: str, setup: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import sys\n{setup}\nfrom cupaged.serve import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, timeout=60)


def test_without_the_serve_extra_the_error_says_how_to_install_it() -> None:
    done = run("m", setup="sys.modules['uvicorn'] = None")

    assert done.returncode == 1
    assert done.stderr == "error: the server needs uvicorn: pip install 'cupaged[serve]'\n"


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = run(str(tmp_path / "nothing"), "--port", "0")

    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_memory_that_does_not_suffice_is_one_line_that_names_the_way_out(tiny_llama_dir: Path) -> None:
    done = run(str(tiny_llama_dir), "--port", "0", "--max-model-len", "500", "--kv-cache-memory", "99999")

    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "lower max_model_len to " in done.stderr
    assert done.stderr.count("\n") == 1


def test_warnings_of_loading_are_shown(tiny_llama_dir: Path) -> None:
    setup = "from cupaged.server import runner\nrunner.serve = lambda *_, **__: None"

    done = run(str(tiny_llama_dir), "--port", "0", "--kv-cache-memory", "99999", setup=setup)

    warning, plan = done.stderr.splitlines()
    assert warning.startswith("WARNING: max_model_len lowered from 512 to ")
    assert plan.startswith("INFO: memory in MiB: weights ")


def test_a_port_in_use_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(str(tmp_path / "nothing"), "--port", port)

    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr


def test_a_signal_while_the_model_loads_ends_it_even_inside_a_callback() -> None:
    setup = """
import ctypes, os, signal
from cupaged.engine import llm_engine

def callback():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass

def load(config):
    ctypes.CFUNCTYPE(None)(callback)()
    raise ValueError("the signal was lost")

llm_engine.LLMEngine = load
"""
    done = run("m", "--port", "0", setup=setup)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_model_is_served_until_sigterm(tiny_llama_dir: Path) -> None:
    flags = [str(tiny_llama_dir), "--port", "0", "--served-model-name", "tiny", "--max-model-len", "128"]
    command = [sys.executable, "-m", "cupaged.serve", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_completion_tokens=12, seed=7, extra_body=GO_ON
            )
            stream = client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                max_completion_tokens=12,
                seed=7,
                extra_body=GO_ON,
                stream=True,
            )
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        process.send_signal(signal.SIGTERM)

        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        assert "".join(pieces) == whole.choices[0].message.content
        assert process.wait(30) == 0
        out, err = process.communicate()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("INFO: memory in ")
    finally:
        process.kill()
        process.communicate()
