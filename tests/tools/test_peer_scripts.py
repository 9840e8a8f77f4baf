"""The scripts that run under the peers' interpreters: what they ask stand-ins for, and what they count."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tools import peer_llama_cpp, peer_transformers, peer_vllm


class Llama:
    """The few functions of llama.cpp that are used; the likeliest token is always the position after it."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}  # sequence -> tokens, by position
        self.sizes: list[int] = []  # of batches
        self.sampled: list[int] = []
        self.params = SimpleNamespace()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 1

    def llama_context_default_params(self) -> Any:
        return self.params

    def llama_batch_init(self, size: int, _embedding: int, _sequences: int) -> Any:
        columns = ("token", "pos", "n_seq_id", "logits")
        lists = {name: [None] * size for name in columns}
        return SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(size)], **lists)

    def llama_memory_clear(self, _memory: Any, _data: bool) -> None:
        self.seen.clear()

    def llama_decode(self, _context: Any, batch: Any) -> int:
        self.batch = batch
        self.sizes.append(batch.n_tokens)
        for i in range(batch.n_tokens):
            tokens = self.seen.setdefault(batch.seq_id[i][0], [])
            assert batch.pos[i] == len(tokens)
            tokens.append(batch.token[i])
        return 0

    def llama_sampler_sample(self, _sampler: Any, _context: Any, i: int) -> int:
        row = i % self.sizes[-1]
        assert self.batch.logits[row]
        self.sampled.append(self.batch.seq_id[row][0])
        return int(self.batch.pos[row]) + 1


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Llama:
    fake = Llama()
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_cpp=fake))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", fake)
    return fake


def test_llama_cpp_decodes_all_sequences_in_one_batch_and_fills_it_with_prompts(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_llama_cpp, "BATCH", 8)
    context = peer_llama_cpp.Context("model.gguf", 2, 3, 64)
    prompts = [[90] * 6, [91] * 11, [92] * 2]

    peer_llama_cpp.run_all(context, prompts, [3, 1, 4])

    assert llama.seen == {  # the last token is sampled, not computed
        0: [90] * 6 + [6, 7],
        1: [91] * 11,
        2: [92] * 2 + [2, 3, 4],
    }
    assert [llama.sampled.count(seq) for seq in range(3)] == [3, 1, 4]
    assert llama.sizes == [6 + 2, 1 + 7, 1 + 2 + 2, 1, 1, 1]


def test_llama_cpp_answers_one_request(llama: Llama) -> None:
    context = peer_llama_cpp.Context("model.gguf", 2, 1, 64)

    first, last = peer_llama_cpp.run_single(context, [90] * 5, 4)

    assert 0 < first < last
    assert llama.sizes == [5, 1, 1, 1]
    assert llama.seen == {0: [90] * 5 + [5, 6, 7]}


def test_llama_cpp_has_room_for_all_sequences_and_prompts_have_as_many_threads(llama: Llama) -> None:
    peer_llama_cpp.Context("model.gguf", 3, 5, 64)

    assert vars(llama.params) == {
        "n_ctx": 5 * 64,
        "n_batch": peer_llama_cpp.BATCH,
        "n_seq_max": 5,
        "n_threads": 3,
        "n_threads_batch": 3,
    }


class VLLM:
    """vLLM's LLM and its engine, which gives a token a step."""

    def __init__(self, short_by: int = 0) -> None:
        self.llm_engine = self
        self.short_by = short_by
        self.tokens: list[int] = []
        self.length = 0

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        assert [list(prompt) for prompt in prompts] == [["prompt_token_ids"]] * len(params)
        return [_output([0] * (asked.max_tokens - self.short_by)) for asked in params]

    def add_request(self, _name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert prompt == {"prompt_token_ids": [1, 2]}
        self.length = params.max_tokens - self.short_by

    def has_unfinished_requests(self) -> bool:
        return len(self.tokens) < self.length

    def step(self) -> list[Any]:
        self.tokens.append(0)
        return [_output(self.tokens)]


def _output(tokens: list[int]) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])


@pytest.fixture
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))


@pytest.mark.usefixtures("_vllm")
def test_vllm_counts_only_whole_answers() -> None:
    first, last = peer_vllm.run_single(VLLM(), "single", [1, 2], 5)

    assert 0 < first < last
    assert peer_vllm.run_all(VLLM(), [[1], [2]], [3, 5]) > 0
    with pytest.raises(SystemExit, match="6 tokens of 8"):
        peer_vllm.run_all(VLLM(short_by=1), [[1], [2]], [3, 5])
    with pytest.raises(SystemExit, match="4 tokens of 5"):
        peer_vllm.run_single(VLLM(short_by=1), "single", [1, 2], 5)


@pytest.mark.parametrize(
    ("one_process", "bound", "options"),
    [(False, "auto", {}), (True, "4,6", {"distributed_executor_backend": "uni"})],
)
def test_vllm_runs_on_as_many_cores_as_it_is_told(
    one_process: bool, bound: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = {9, 4, 6}
    monkeypatch.setattr(peer_vllm, "os", os := SimpleNamespace(environ={}))
    os.sched_getaffinity = lambda _: cores
    os.sched_setaffinity = lambda _, wanted: cores.intersection_update(wanted)

    assert peer_vllm.set_environment(2, one_process) == options

    assert cores == {4, 6}
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == bound
    assert os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == ("0" if one_process else None)


class Transformers:
    """A model whose `generate` notes what it is asked for, and streams the prompt and then tokens."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any, int]] = []

    def generate(self, ids: Any, attention_mask: Any, max_new_tokens: int, streamer: Any, **_: Any) -> None:
        self.asked.append((ids, attention_mask, max_new_tokens))
        for _token in range((1 + max_new_tokens) if streamer else 0):
            streamer.put(None)


@pytest.fixture
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(tensor=lambda rows: rows, inference_mode=nullcontext)
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.usefixtures("_torch")
def test_transformers_pads_on_the_left_and_goes_on_to_the_longest_output_of_a_batch() -> None:
    model = Transformers()
    order = {"prompts": [[5, 6], [7], [8]], "output_lengths": [2, 9, 4], "batch": 2}

    assert peer_transformers.run_batches(model, order) > 0

    assert model.asked == [([[5, 6], [0, 7]], [[1, 1], [0, 1]], 9), ([[8]], [[1]], 4)]


@pytest.mark.usefixtures("_torch")
def test_transformers_first_token_is_what_comes_after_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(peer_transformers, "perf_counter", lambda: next(clock))

    # The clock says 0 at the start and 1 at the prompt.
    assert peer_transformers.run_single(Transformers(), [5], 3) == [2, 4]


class Continuous:
    """Continuous batching that gives each request the tokens that it asks for, less `short_by`, or stops."""

    def __init__(self, short_by: int = 0, most: int = 99) -> None:
        self.short_by, self.most = short_by, most
        self.asked: list[int] = []

    def continuous_batching_context_manager(self, _greedy: Any, continuous_batching_config: Any) -> Any:
        self.num_blocks = continuous_batching_config.num_blocks
        return nullcontext(self)

    def add_request(self, _prompt: list[int], max_new_tokens: int, eos_token_id: int) -> None:
        assert eos_token_id == -1
        self.asked.append(max_new_tokens)

    def is_running(self) -> bool:
        return self.most > 0

    def get_result(self, timeout: int) -> Any:  # noqa: ARG002
        self.most -= 1
        if self.most < 0:
            return None
        tokens = [0] * (self.asked.pop() - self.short_by)
        return SimpleNamespace(is_finished=lambda: True, generated_tokens=tokens)


def test_transformers_counts_only_whole_answers_of_continuous_batching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = SimpleNamespace(ContinuousBatchingConfig=SimpleNamespace, GenerationConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    prompts, lengths, whole = [[1] * 40, [2]], [30, 5], Continuous()

    assert peer_transformers.run_continuous(whole, prompts, lengths) > 0

    assert whole.num_blocks == 3 + 1 + 2  # pages of 32 tokens, and one more for each request
    with pytest.raises(SystemExit, match="33 tokens of 35"):
        peer_transformers.run_continuous(Continuous(short_by=1), prompts, lengths)
    with pytest.raises(SystemExit, match="ended early"):
        peer_transformers.run_continuous(Continuous(most=1), prompts, lengths)
