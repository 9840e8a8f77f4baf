"""The two configurations: ModelConfig (what the checkpoint is) and EngineConfig (what the user wants).

Both are frozen and validated once. What is found out at run time (the number of blocks, the length
that fits) is a return value of whoever finds it, never written back here.
"""

import json
from collections.abc import Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from reprlib import repr as shorten
from typing import Any, Literal, get_args

from cupaged.sampling_params import as_plain, is_neutral

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
QuantizationName = Literal["int8", "int8_w8a8"]
GenerationConfigName = Literal["auto", "none"]
SchedulingPolicy = Literal["fcfs", "priority"]
PreemptionMode = Literal["auto", "swap", "recompute"]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


class HFConfig:
    """A config.json read strictly: every read states its type and, if there is one, its default."""

    _REQUIRED: Any = object()

    def __init__(self, values: dict[str, Any], source: str = "config.json") -> None:
        self._values = values
        self._source = source

    @classmethod
    def from_file(cls, path: Path) -> "HFConfig":
        """Read the JSON object at `path`."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist; the model must be a Hugging Face directory") from None
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds a {type(values).__name__}, expected an object")
        return cls(values, path.name)

    def __contains__(self, key: str) -> bool:
        """Return whether `key` has a value; null is absent."""
        return self._values.get(key) is not None

    def has(self, key: str) -> bool:
        """Return whether `key` is there, be it null."""
        return key in self._values

    def keys(self) -> Set[str]:
        """Return all keys."""
        return self._values.keys()

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Return `key` as `kind` (an int serves as float); null is absent. ValueError names the key."""
        value = self._values.get(key)
        if value is None:
            if default is self._REQUIRED:
                raise ValueError(f"{self._source} has no {key!r}, which this model family needs")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{self._source}: {key!r} is {value!r}, expected {kind.__name__}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the token id, or the list of them, as a tuple; empty if absent."""
        value = self.get(key, object, None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise ValueError(f"{self._source}: {key!r} is {value!r}, expected a token id or a list of them")
        return tuple(ids)

    def section(self, key: str) -> "HFConfig":
        """Return the object at `key` (empty if absent)."""
        return HFConfig(self.get(key, dict, {}), f"{self._source}: {key}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: its base and how it is stretched; names as in config.json's rope_scaling."""

    theta: float = 10000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # 0 = the model's max_position_embeddings
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = derived
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions

    def __post_init__(self) -> None:
        """Check what would divide by zero or turn the wrong way."""
        for name in ("theta", "factor", "high_freq_factor", "low_freq_factor", "beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                raise ValueError(f"config.json: rope {name} is {getattr(self, name)}, must be above 0")
        if self.high_freq_factor == self.low_freq_factor:
            raise ValueError(f"config.json: rope low and high_freq_factor are both {self.low_freq_factor}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer, in config.json's names where it has them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()  # tokens, one a layer, 0 = full attention; () = all full
    dtype: str = "float32"  # of the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check that the numbers fit each other."""
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"config.json: {name} is {getattr(self, name)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads {self.num_heads} is no multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"config.json: head_dim {self.head_dim} is odd; rotary embedding needs it even")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ValueError(
                f"config.json: {len(self.sliding_windows)} layer types for {self.num_layers} layers"
            )

    @property
    def max_sliding_window(self) -> int:
        """Return the tokens that any layer looks back at most, the query's own included; 0 = all."""
        windows = self.sliding_windows
        return max(windows) if windows and all(windows) else 0

    def sliding_window(self, layer: int) -> int:
        """Return the window of `layer` in tokens, the query's own included; 0 = full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else 0


BLOCK_SIZES = (16, 32, 64, 128)


def option(default: Any, help_text: str) -> Any:
    """Return a field whose help text the command line shows."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user chooses; the server's flags are made from these fields and their help texts."""

    model: str = field(metadata={"help": "directory of a Hugging Face checkpoint, or org/name (extra hub)"})
    tokenizer: str | None = option(None, "directory of the tokenizer; unset = the model's")
    dtype: DTypeName = option(
        "auto",
        "of the KV cache, on a GPU of all else too (the CPU computes in float32, and keeps float16 as "
        "that); auto = the checkpoint's, on a GPU bfloat16 for float32",
    )
    quantization: QuantizationName | None = option(
        None,
        "of the weights, at load, on the CPU: int8 = 8 bits each; int8_w8a8 = what they are multiplied with "
        "has 8 bits too, less exact",
    )
    device: DeviceName = option("auto", "auto = cuda if there is one, else cpu")
    max_model_len: int | None = option(None, "tokens of prompt + output; unset = what fits")
    block_size: int = option(16, f"tokens per KV block, one of {BLOCK_SIZES}")
    max_num_seqs: int = option(256, "sequences running at once")
    max_num_batched_tokens: int = option(2048, "token budget of one step")
    gpu_memory_utilization: float = option(
        0.9, "share of the free memory, host's or GPU's, that weights, steps and KV cache take at most"
    )
    kv_cache_memory: int | None = option(
        None, "bytes of KV cache; unset = all that is left, on the CPU half of it, at most 4 GiB"
    )
    enable_prefix_caching: bool = option(
        True, "keep the KV blocks of prompts and outputs for those that follow"
    )
    swap_space: float | None = option(
        None,
        "GiB of host memory for KV blocks that are swapped out; unset = 4 or a quarter of what is free, "
        "on the CPU 0",
    )
    preemption_mode: PreemptionMode = option(
        "auto", "when KV blocks run out, a victim's are swapped out or recomputed; auto = what costs less"
    )
    swap_bandwidth: float | None = option(None, "bytes per second of a swap; unset = measured at load")
    prefill_rate: float | None = option(None, "tokens per second of a recompute; unset = measured at load")
    scheduling_policy: SchedulingPolicy = option(
        "fcfs", "who goes first: by arrival, or by the request's priority (lower first), then arrival"
    )
    trace: str | None = option(None, "file that records requests and plans, for python -m cupaged.trace")
    trace_text: bool = option(False, "record token ids in the trace, from which texts can be read")
    load_format: LoadFormat = option("auto", "auto = safetensors; dummy = random weights, for measurements")
    enforce_eager: bool = option(False, "on a GPU, launch every kernel by itself: no CUDA graphs")
    async_scheduling: bool = option(True, "plan a step while the one before it runs")
    seed: int = option(0, "seed of requests that bring none")
    num_threads: int | None = option(None, "CPU threads; unset = all cores")
    generation_config: GenerationConfigName = option(
        "auto", "auto = defaults for sampling from generation_config.json"
    )
    chat_template: str | None = option(None, "file with a Jinja chat template")

    def __post_init__(self) -> None:
        """Validate every field; ValueError names field, value and limit."""
        for item in fields(self):
            object.__setattr__(self, item.name, as_plain(getattr(self, item.name)))
        for name, (optional, most) in _COUNTS.items():
            value = getattr(self, name)
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"{name} must be a whole number in 1..{most}, got {value!r}")
        if self.max_model_len == 1:
            raise ValueError("max_model_len must be >= 2, a token of prompt and one of output, got 1")
        if type(self.block_size) is not int or self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {self.block_size!r}")
        share = self.gpu_memory_utilization
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")
        if type(self.seed) is not int:
            raise ValueError(f"seed must be a whole number, got {self.seed!r}")
        for name in ("swap_space", "swap_bandwidth", "prefill_rate"):
            value = getattr(self, name)
            is_number = type(value) in (int, float) and 0 <= value <= _MOST_NUMBER
            if value is not None and not (is_number and (value > 0 or name == "swap_space")):
                least = ">= 0" if name == "swap_space" else "> 0"
                raise ValueError(
                    f"{name} must be a number {least}, at most {_MOST_NUMBER:g}, got {shorten(value)}"
                )
        for name in ("enforce_eager", "async_scheduling", "enable_prefix_caching", "trace_text"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        for name in ("model", "tokenizer", "chat_template", "trace"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "model"):
                raise ValueError(f"{name} must be text, got {value!r}")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str | None) or value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}")

    @classmethod
    def create(cls, model: str | Path, **options: Any) -> "EngineConfig":
        """Build from keyword options; one that later versions bring is taken at its neutral value only."""
        known = {f.name for f in fields(cls)}
        for name in [name for name in options if name not in known]:
            if name not in _NOT_YET:
                raise TypeError(f"unknown engine option {name!r}; there are {sorted(known)}")
            value = as_plain(options.pop(name))
            if not is_neutral(value, _NOT_YET[name]):
                raise ValueError(
                    f"{name}={value!r} is not supported yet; leave it out or at {_NOT_YET[name][0]!r}"
                )
        paths = {name: str(value) for name, value in options.items() if isinstance(value, Path)}
        return cls(model=str(model), **options | paths)


_MOST_NUMBER = 1e18  # of GiB, or of bytes or tokens a second: what it is multiplied with stays a number
_COUNTS = {  # whether None stands for a default, and the most: tokens and sequences are counted in int32
    "max_num_seqs": (False, 2**31 - 1),
    "max_num_batched_tokens": (False, 2**31 - 1),
    "max_model_len": (True, 2**31 - 1),
    "kv_cache_memory": (True, 2**63 - 1),
    "num_threads": (True, 2**31 - 1),
}
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "dtype": get_args(DTypeName),
    "device": get_args(DeviceName),
    "generation_config": get_args(GenerationConfigName),
    "load_format": get_args(LoadFormat),
    "preemption_mode": get_args(PreemptionMode),
    "quantization": (None, *get_args(QuantizationName)),
    "scheduling_policy": get_args(SchedulingPolicy),
}

_NOT_YET: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "kv_cache_dtype": ("auto",),
    "enable_chunked_prefill": (True, None),
    "trust_remote_code": (False,),
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "speculative_config": (None,),
    "enable_lora": (False,),
}
