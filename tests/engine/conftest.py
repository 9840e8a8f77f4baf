"""A tokenizer of 64 one-character tokens, and engines over the scripted model."""

import json
from collections.abc import Callable
from pathlib import Path
from string import ascii_letters, digits
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import RequestOutput
from cupaged.sampling_params import SamplingParams
from tests.engine.scripted import VOCAB_SIZE, Late, NextToken, next_token, scripted

ALPHABET = ["<eos>", *ascii_letters, *digits, "_"]
assert len(ALPHABET) == VOCAB_SIZE
EOS = 0
PROMPT = [10, 20, 30]

MakeEngine = Callable[..., LLMEngine]


@pytest.fixture(scope="session")
def scripted_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a tokenizer whose token i is the i-th character of ALPHABET."""
    path = tmp_path_factory.mktemp("scripted")
    vocab = {text: i for i, text in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="9"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return path


@pytest.fixture
def make_engine(scripted_dir: Path) -> MakeEngine:
    """Return a function that builds an engine over the scripted model."""

    def make(
        num_blocks: int = 64,
        late: Late = False,
        follow: NextToken = next_token,
        num_host_blocks: int = 0,
        **options: Any,
    ) -> LLMEngine:
        config = EngineConfig.create(scripted_dir, **{"max_num_seqs": 8, **options})
        return LLMEngine(config, create_executor=scripted(num_blocks, late, follow, num_host_blocks))

    return make


def greedy(max_tokens: int | None = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until all is done; return the last output of each request."""
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            last[output.request_id] = output
        engine.scheduler.check_invariants()
    return last


def run(engine: LLMEngine, params: SamplingParams, prompt: Any = PROMPT) -> RequestOutput:
    engine.add_request("r", prompt, params)
    return finish(engine)["r"]
