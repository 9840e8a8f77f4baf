"""Gemm on an emulated GPU: right products in all buckets, chosen once, nothing allocated on the way."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.backend import gemm as module
from cupaged.backend.arena import no_memory
from cupaged.backend.cublaslt import CublasLt, Layouts
from cupaged.backend.gemm import WORKSPACE_BYTES, Gemm, Weight, bucket, buckets
from cupaged.backend.gemm_choices import Choice, ChoiceFile
from tests.cuda_on_cpu.gpu import DeviceArray, EmulatedGpu

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
OUT, IN = 48, 72
CHUNK = 128  # rows of logits at once


class Gpu(EmulatedGpu):
    """Counts what is timed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(memory=96 << 20, **options)
        self.num_timed = 0
        self.graph_sizes: set[int] = set()  # products in each

    def capture(self, work: Callable[[], None]) -> Any:
        """Remember how much was captured."""
        graph = super().capture(work)
        self.graph_sizes.add(len(graph))
        return graph

    def seconds(self, work: Callable[[], None]) -> float:
        """Count."""
        self.num_timed += 1
        return super().seconds(work)


class Multiplied:
    """A Gemm with weights of one shape, tuned."""

    def __init__(
        self,
        folder: Path,
        *,
        gpu: Gpu | None = None,
        dtype: np.dtype[Any] = BF16,
        out_dtype: np.dtype[Any] | None = None,
        bias: bool = False,
        max_rows: int = 40,
        num_weights: int = 2,
    ) -> None:
        rng = np.random.default_rng(1)
        self.gpu = gpu or Gpu()
        self.dtype, self.out_dtype = dtype, out_dtype or dtype
        self.matrices = [rng.standard_normal((OUT, IN)).astype(dtype) for _ in range(num_weights)]
        self.biases = [rng.standard_normal(OUT).astype(dtype) if bias else None for _ in range(num_weights)]
        self.gemm = Gemm(self.gpu, folder)
        self.note(self.gemm, max_rows)
        self.weights = [
            self.gemm.prepare(self.gpu.array(matrix), None if vector is None else self.gpu.array(vector))
            for matrix, vector in zip(self.matrices, self.biases, strict=True)
        ]
        self.workspace = self.gpu.allocate(WORKSPACE_BYTES)
        self.memory = self.gpu.allocate(64 << 10)
        self.gemm.tune(self.workspace, self.memory, max_rows)

    def note(self, gemm: Gemm, rows: int) -> None:
        """Do what a rehearsal does."""
        vector = None if self.biases[0] is None else no_memory((OUT,), self.dtype)
        weight = Weight(no_memory((OUT, IN), self.dtype), vector)
        gemm.note(no_memory((rows, IN), self.dtype), weight, no_memory((rows, OUT), self.out_dtype))

    def x(self, rows: int) -> NDArray[Any]:
        """Return the same inputs, more or fewer."""
        return np.random.default_rng(2).standard_normal((100, IN)).astype(self.dtype)[:rows]

    def out(self, rows: int) -> DeviceArray:
        """Return room for the outputs."""
        return self.gpu.array(np.full((rows, OUT), np.nan, self.out_dtype))

    def __call__(self, rows: int, weight: int = 0) -> NDArray[Any]:
        """Multiply."""
        out = self.out(rows)
        self.gemm.multiply(self.gpu.array(self.x(rows)), self.weights[weight], out)
        return self.gpu.read(out)

    def seconds(self, rows: int) -> float:
        """Return how long a product takes."""
        x, out = self.gpu.array(self.x(rows)), self.out(rows)
        return self.gpu.seconds(lambda: self.gemm.multiply(x, self.weights[0], out))

    def expected(self, rows: int, weight: int = 0) -> NDArray[np.float64]:
        """Return the products in float64."""
        products: NDArray[np.float64] = self.x(rows).astype(float) @ self.matrices[weight].astype(float).T
        vector = self.biases[weight]
        return products if vector is None else np.add(products, vector.astype(float))


def test_buckets_are_an_eighth_apart() -> None:
    assert buckets(256) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    assert buckets(300)[-1] == 320
    assert len(buckets(2048)) == 31


def test_bucket_is_the_least_that_holds() -> None:
    every = buckets(5000)

    assert [bucket(n) for n in range(1, 4097)] == [next(b for b in every if b >= n) for n in range(1, 4097)]
    assert bucket(0) == 0


def test_what_chunks_leave_of_a_bucket_is_one() -> None:
    rests = {rows % CHUNK for rows in buckets(8192)} - {0}

    assert all(bucket(rest) == rest for rest in rests)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_product_is_right_in_every_bucket(tmp_path: Path, dtype: np.dtype[Any], bias: bool) -> None:
    multiply = Multiplied(tmp_path, dtype=dtype, bias=bias)

    for rows in buckets(40):
        error = np.abs(multiply(rows, 1).astype(np.float64) - multiply.expected(rows, 1)).max()
        assert error < (40 / 128 if dtype == BF16 else 40 / 1024), f"{rows} rows: {error}"


def test_logits_are_not_rounded(tmp_path: Path) -> None:
    multiply = Multiplied(tmp_path, out_dtype=F32)

    assert np.abs(multiply(24) - multiply.expected(24)).max() < 1e-5


def test_row_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    multiply = Multiplied(tmp_path, bias=True)

    alone = multiply(1)

    assert all((multiply(rows)[:1] == alone).all() for rows in buckets(40))


def test_products_are_captured_and_replayed_on_other_values(tmp_path: Path) -> None:
    multiply = Multiplied(tmp_path)
    gpu = multiply.gpu
    x, out = gpu.array(np.zeros((8, IN), BF16)), multiply.out(8)
    graph = gpu.capture(lambda: multiply.gemm.multiply(x, multiply.weights[0], out))

    gpu.write(x, multiply.x(8))
    graph.launch()

    assert (gpu.read(out) == multiply(8)).all()


def test_nothing_is_allocated_or_waited_for(tmp_path: Path) -> None:
    multiply = Multiplied(tmp_path)
    x, out = multiply.gpu.array(multiply.x(8)), multiply.out(8)

    multiply.gpu.freeze()
    for weight in multiply.weights:
        multiply.gemm.multiply(x, weight, out)

    assert multiply.gpu.launches[-2:] == ["matmul", "matmul"]


@pytest.mark.parametrize("rows", [3, 48])
def test_rows_that_are_no_bucket_or_too_many_are_an_error(tmp_path: Path, rows: int) -> None:
    multiply = Multiplied(tmp_path)

    with pytest.raises(AssertionError, match=rf"\({rows}, {IN}\).* not tuned for bfloat16 weight\[48, 72\]"):
        multiply(rows)


def test_rows_that_lie_apart_are_an_error(tmp_path: Path) -> None:
    multiply = Multiplied(tmp_path)
    x = multiply.gpu.array(np.zeros((8, 2 * IN), BF16))[:, :IN]

    with pytest.raises(AssertionError, match="were not tuned"):
        multiply.gemm.multiply(x, multiply.weights[0], multiply.out(8))


def test_failing_call_names_the_product(tmp_path: Path) -> None:
    multiply = Multiplied(tmp_path)
    x = multiply.gpu.view(multiply.gpu.allocate(2048), 2, (8, IN), BF16)

    with pytest.raises(RuntimeError, match=r"cublasLtMatmul failed .* for 8 rows and bfloat16 weight"):
        multiply.gemm.multiply(x, multiply.weights[0], multiply.out(8))


def test_most_rows_are_those_of_the_final_limits(tmp_path: Path) -> None:
    multiply = Multiplied(tmp_path, max_rows=30)
    multiply.note(multiply.gemm, 4000)  # of a rehearsal for more than fits

    multiply.gemm.tune(multiply.workspace, multiply.memory, 30)

    with pytest.raises(AssertionError, match="were not tuned"):
        multiply(40)


def test_choice_gains_over_the_first_heuristic_what_the_log_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cupaged"):
        chosen = Multiplied(tmp_path / "chosen")
    monkeypatch.setattr(module, "NUM_HEURISTICS", 1)
    first = Multiplied(tmp_path / "first")

    gains = {rows: first.seconds(rows) / chosen.seconds(rows) for rows in buckets(40)}

    assert max(gains.values()) > 1.02
    assert min(gains.values()) == 1
    told = ", ".join(f"{gain:.2f}x at {rows}" for rows, gain in gains.items() if gain > 1)
    start = (
        "matrix products, bfloat16 weight[48, 72] to bfloat16: 8 numbers of rows up to 40, cublasLt's first"
    )
    assert caplog.messages[0].startswith(start)
    assert f"faster ones for others ({told}), timed in " in caplog.messages[0]


def test_the_first_eight_heuristics_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: set[int] = set()
    heuristics = CublasLt.heuristics

    def counted(cublaslt: CublasLt, operation: int, layouts: Layouts, count: int) -> list[bytes]:
        counts.add(count)
        return heuristics(cublaslt, operation, layouts, count)

    monkeypatch.setattr(CublasLt, "heuristics", counted)
    Multiplied(tmp_path)

    assert counts == {8}


def test_timing_reads_more_weights_than_stay_in_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COLD_BYTES", 2 * OUT * IN * 2 - 1)

    multiply = Multiplied(tmp_path, num_weights=3)

    assert multiply.gpu.graph_sizes == {2}


def test_choice_is_made_once_and_read_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Multiplied(tmp_path)
    assert first.gpu.num_timed == 8 * 3 * 4  # buckets, candidates, rounds

    with caplog.at_level(logging.INFO, "cupaged"):
        again = Multiplied(tmp_path)

    assert again.gpu.num_timed == 0
    assert (again(24) == first(24)).all()
    assert caplog.messages[0].endswith("as timed before")


def test_more_rows_than_before_are_timed_alone(tmp_path: Path) -> None:
    Multiplied(tmp_path, max_rows=16)

    assert Multiplied(tmp_path, max_rows=32).gpu.num_timed == 2 * 3 * 4


def test_choices_of_another_gpu_or_version_are_not_taken(tmp_path: Path) -> None:
    Multiplied(tmp_path)
    newer = Gpu()
    newer.cublaslt.cublasLtGetVersion = lambda: 2

    for gpu in (Gpu(name="another GPU"), Gpu(num_sms=5), newer):
        assert Multiplied(tmp_path, gpu=gpu).gpu.num_timed > 0
    assert len(list(tmp_path.iterdir())) == 4


def test_choices_are_kept_by_product(tmp_path: Path) -> None:
    products: list[dict[str, Any]] = [{}, {"dtype": F16}, {"out_dtype": F32}, {"bias": True}]

    for product in products:
        Multiplied(tmp_path, **product)

    assert len(list(tmp_path.iterdir())) == 4


def test_algorithm_that_cublaslt_does_not_take_is_chosen_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Multiplied(tmp_path)
    foreign = dict.fromkeys(buckets(40), Choice(bytes(64), 1.0))
    monkeypatch.setattr(ChoiceFile, "load", lambda _: foreign)

    multiply = Multiplied(tmp_path)

    assert multiply.gpu.num_timed > 0
    assert np.isfinite(multiply(8).astype(float)).all()


def test_bias_with_float32_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\+ bias to float32: cublasLt adds a bias of the output's type"):
        Multiplied(tmp_path, out_dtype=F32, bias=True)


def test_product_without_an_algorithm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CublasLt, "heuristics", lambda *_: [])

    with pytest.raises(ValueError, match=r"no algorithm for 1 rows and bfloat16 weight.*use device='cpu'"):
        Multiplied(tmp_path)


class Failing(Gpu):
    """A GPU whose cublasLt returns `status`, always or, with 0 outside, while a graph is captured."""

    def __init__(self, eager: int, captured: int) -> None:
        super().__init__()
        self._statuses = [eager, captured]
        self._capturing = False

    @property
    def cublaslt(self) -> Any:
        """Return the library; its product may fail."""
        real = super().cublaslt

        class Library:
            def __getattr__(_, name: str) -> Any:  # noqa: N805
                return getattr(real, name)

            cublasLtMatmul = staticmethod(  # noqa: N815
                lambda *args: self._statuses[self._capturing] or real.cublasLtMatmul(*args)
            )

        return Library()

    def capture(self, work: Callable[[], None]) -> Any:
        """Remember that it captures."""
        self._capturing = True
        return super().capture(work)


@pytest.mark.parametrize(
    ("eager", "captured", "error", "said"),
    [
        (15, 0, ValueError, "has no algorithm for 1 rows"),
        (
            13,
            0,
            RuntimeError,
            r"failed with .*\(13\) for 1 rows .*the GPU may have failed in a kernel before",
        ),
        (0, 14, RuntimeError, r"failed with .*\(14\) for 1 rows"),
    ],
)
def test_product_that_fails_while_it_is_tuned_is_said_as_it_is(
    tmp_path: Path, eager: int, captured: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Multiplied(tmp_path, gpu=Failing(eager, captured))

    assert not list(tmp_path.iterdir())


def test_weight_of_a_rehearsal_cannot_be_multiplied(tmp_path: Path) -> None:
    multiply = Multiplied(tmp_path)

    with pytest.raises(AssertionError, match="of a rehearsal"):
        multiply.gemm.multiply(multiply.x(1), Weight(multiply.matrices[0]), multiply.out(1))
