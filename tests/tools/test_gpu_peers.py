"""How gpu_check asks PyTorch and transformers for the same work, with stand-ins for both."""

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tools.fake_stream import CALL_SECONDS, Event, Stream
from tools.engine_model import REAL, hf_config
from tools.gpu_peers import load_transformers, time_sdpa
from tools.kernel_cases.case import Attention


class Torch:
    """The few names of torch that are used, on one stream, where attention takes CALL_SECONDS."""

    bfloat16, float16 = "bfloat16", "float16"

    def __init__(self) -> None:
        self.stream = Stream()
        self.asked: list[tuple[list[Any], bool]] = []
        self.cuda = SimpleNamespace(
            Event=lambda enable_timing: TorchEvent(self.stream),  # noqa: ARG005
            CUDAGraph=lambda: SimpleNamespace(),
            graph=self.capture,
        )
        self.nn = SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=self.attend))

    def randn(self, shape: tuple[int, ...], dtype: str, device: str) -> Any:
        return shape, dtype, device

    def attend(self, *qkv: Any, is_causal: bool, enable_gqa: bool) -> None:
        assert enable_gqa
        self.asked.append((list(qkv), is_causal))
        self.stream.work(CALL_SECONDS)

    @contextlib.contextmanager
    def capture(self, graph: Any) -> Iterator[None]:
        self.stream.begin_capture()
        yield
        captured = self.stream.end_capture()
        graph.replay = lambda: captured.launch(self.stream)


class TorchEvent(Event):
    """Records when it is told to."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def record(self) -> None:
        self.clock = self.stream.record().clock

    def elapsed_time(self, end: Event) -> float:
        return (end.clock - self.clock) * 1e3


@pytest.mark.parametrize(("num_queries", "causal"), [(1, False), (64, True)])
def test_torch_is_asked_for_the_same_attention(num_queries: int, causal: bool) -> None:
    torch = Torch()

    times = time_sdpa(torch, Attention("bf16", 3, num_queries, 64, 8, 2, 128), 60 << 20)

    shapes = [(3, 8, num_queries, 128), (3, 2, 64, 128), (3, 2, 64, 128)]
    assert torch.asked[0] == ([(shape, "bfloat16", "cuda") for shape in shapes], causal)
    num_bytes = 2 * 3 * 128 * (8 * num_queries + 2 * 2 * 64)
    assert times.num_sets == max(2, -(-3 * (60 << 20) // num_bytes))
    assert times.seconds == pytest.approx(CALL_SECONDS)


class Ids:
    """Token ids of some shape."""

    def __init__(self, low: int, high: int, shape: tuple[int, int], device: str) -> None:
        assert 0 < low < high == REAL.shape.vocab_size
        self.shape, self.device = shape, device

    def cpu(self) -> "Ids":
        return self


class Transformers:
    """The few names of transformers that are used; generate gives as many tokens as it is asked for."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.AutoConfig = SimpleNamespace(for_model=self.for_model)
        self.AutoModelForCausalLM = SimpleNamespace(from_config=self.from_config)

    def for_model(self, kind: str, **config: Any) -> str:
        self.config = {"model_type": kind, **config}
        return "config"

    def from_config(self, config: str, **options: Any) -> Any:
        assert config == "config"
        self.options = options
        return SimpleNamespace(eval=lambda: None, generate=self.generate)

    def generate(self, ids: Ids, **options: Any) -> Ids:
        self.asked.append({"shape": ids.shape, **options})
        num_seqs, length = ids.shape
        return Ids(1, REAL.shape.vocab_size, (num_seqs, length + options["max_new_tokens"]), ids.device)


def test_transformers_is_asked_for_the_same_model_and_work(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Transformers()
    monkeypatch.setitem(sys.modules, "transformers", fake)
    torch = SimpleNamespace(
        bfloat16="bfloat16",
        device=lambda _: contextlib.nullcontext(),
        inference_mode=contextlib.nullcontext,
        randint=Ids,
        ones_like=lambda ids: ids,
    )

    generate = load_transformers(torch, hf_config(REAL.shape))
    seconds = generate(16, 1024, 32)

    assert fake.config["model_type"] == "llama"
    assert fake.config["num_hidden_layers"] == 32
    assert fake.options == {"dtype": "bfloat16", "attn_implementation": "sdpa"}
    asked = fake.asked[-1]
    assert asked["shape"] == (16, 1024)
    assert asked["max_new_tokens"] == asked["min_new_tokens"] == 32
    assert not asked["do_sample"]
    assert 0 < seconds < 1
