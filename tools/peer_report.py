"""What bench_peers prints: each engine beside ours, and the goals that ours is held to."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

BUSY = "beside a busy process"  # how ours runs with a neighbour
ONE_THREAD = "one thread"  # how llama.cpp is often faster than on all: its threads sleep at every barrier


class Row(NamedTuple):
    """One engine in one form; None is what was not measured."""

    engine: str
    how: str
    dtype: str  # of the weights, or their quantization
    version: str = ""
    offline: float | None = None  # output tokens per second, all requests at once
    decode: float | None = None  # tokens per second of a single stream, from its first token to its last
    whole: float | None = None  # the same from the request on
    first_ms: float | None = None  # to its first token
    bandwidth: float | None = None  # bytes per second
    bandwidth_share: float | None = None  # bytes of weights per second, over it
    missing: str = ""  # why this version cannot
    error: str = ""  # why the process ended


class Goal(NamedTuple):
    """A ratio of ours and whether it is reached; None is not measured."""

    what: str
    limit: float
    measured: float | None
    over_one_thread: float | None = None  # the same over the peer on one thread, which binds nobody

    @property
    def text(self) -> str:
        """Return the goal as one line."""
        if self.measured is None:
            return f"not measured: {self.what}, goal {self.limit:.2f} or more"
        status = "met" if self.measured >= self.limit else "missed"
        note = "" if self.over_one_thread is None else f" ({self.over_one_thread:.3g} over its one thread)"
        return f"{status}: {self.what} {self.measured:.3g}{note}, goal {self.limit:.2f} or more"


def make_row(engine: str, how: str, order: dict[str, Any], answer: dict[str, Any]) -> Row:
    """Return the medians of an engine's answer to its order."""
    found: dict[str, Any] = {}
    if offline := answer.get("offline"):
        found["offline"] = sum(order["output_lengths"]) / median(offline)
    if single := answer.get("single"):
        found["decode"] = median((order["length"] - 1) / (last - first) for first, last in single)
        found["whole"] = median(order["length"] / last for _, last in single)
        found["first_ms"] = median(first for first, _ in single) * 1e3
    if rates := answer.get("bandwidth"):
        found["bandwidth"] = median(rates)
        found["bandwidth_share"] = answer["weight_bytes"] * found["decode"] / found["bandwidth"]
    dtype = answer.get("dtype") or order.get("quantization") or order["dtype"]
    said = {name: answer[name] for name in ("version", "missing", "error") if name in answer}
    return Row(engine, how, dtype, **said, **found)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table; `ours` is our first row's rate over the row's."""
    ours = rows[0]
    head = ("offline", "ours", "decode", "ours", "whole", "first ms")
    yield f"  {'tokens/s':34} {'weights':9}" + "".join(f"{word:>9}" for word in head)
    for row in rows:
        rates = (
            _shown(row.offline),
            _shown(_ratio(ours.offline, row.offline), "x"),
            _shown(row.decode),
            _shown(_ratio(ours.decode, row.decode), "x"),
            _shown(row.whole),
            _shown(row.first_ms),
        )
        yield f"  {f'{row.engine} {row.how}':34} {row.dtype:9}" + "".join(f"{rate:>9}" for rate in rates)
    for version in dict.fromkeys(row.version for row in rows if row.version):
        yield f"  {version}"
    for row in rows:
        if row.bandwidth and row.bandwidth_share:
            yield (
                f"  {row.dtype}: {row.bandwidth / 1e9:.1f} GB/s read, of which the single stream uses"
                f" {row.bandwidth_share:.0%}"
            )
        for word, reason in (("this version has none", row.missing), ("failed", row.error)):
            if reason:
                name = " ".join(filter(None, (row.engine, row.how, row.dtype)))
                yield f"  {name}: {word}: {reason}"


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals, each against the best of a peer's forms on as many threads as ours has."""

    def best(field: str, engine: str, dtype: str | None = None, is_one_thread: bool = False) -> float | None:
        values = [
            getattr(row, field)
            for row in rows
            if row.engine == engine
            and dtype in (None, row.dtype)
            and row.how != BUSY
            and (row.how == ONE_THREAD) == is_one_thread
        ]
        return max((value for value in values if value is not None), default=None)

    def over_llama_cpp(what: str, limit: float, ours: float | None, dtype: str) -> Goal:
        alone = _ratio(ours, best("decode", "llama.cpp", dtype, is_one_thread=True))
        return Goal(what, limit, _ratio(ours, best("decode", "llama.cpp", dtype)), alone)

    offline, decode = (best(field, "cupaged", "bfloat16") for field in ("offline", "decode"))
    shares = {dtype: best("bandwidth_share", "cupaged", dtype) for dtype in ("bfloat16", "int8")}
    busy = next((row.offline for row in rows if row.how == BUSY), None)
    int8 = best("decode", "cupaged", "int8")
    over_transformers = _ratio(decode, best("decode", "transformers"))
    return [
        Goal("64 requests: bfloat16 over vllm", 1.3, _ratio(offline, best("offline", "vllm"))),
        Goal("single stream: bfloat16's share of the bandwidth", 0.8, shares["bfloat16"]),
        Goal("single stream: int8's share of the bandwidth", 0.6, shares["int8"]),
        over_llama_cpp("single stream: int8 over llama.cpp's Q4_1", 1.0, int8, "Q4_1"),
        Goal("single stream: bfloat16 over transformers", 2.0, over_transformers),
        over_llama_cpp("single stream: bfloat16 over llama.cpp's F16", 1.6, decode, "F16"),
        Goal("64 requests: beside a busy process over alone", 0.5, _ratio(busy, offline)),
    ]


def _ratio(ours: float | None, other: float | None) -> float | None:
    return ours / other if ours is not None and other else None


def _shown(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}" if unit else f"{value:.1f}"
