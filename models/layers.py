"""What every decoder is made of: linear layers, embedding, norms, attention, MLP, the decoder layer.

Layers are built once from a Scope and then called with arrays. Tensor parallelism is Megatron's: a
column-parallel layer's output stays divided, a row-parallel one sums over the ranks, so a decoder layer
reduces twice. All arithmetic is the backend's.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend, Communicator, Handle, KVCache
from cupaged.batch import Batch
from cupaged.config import ModelConfig


class Scope(NamedTuple):
    """What a layer is built from: its backend, its ranks, and the weights below `prefix`."""

    backend: Backend
    communicator: Communicator
    weights: Mapping[str, NDArray[Any]]  # by Weight.attribute, this rank's share
    prefix: str = ""

    def __truediv__(self, name: str) -> "Scope":
        """Return the scope of the part `name`."""
        return self._replace(prefix=f"{self.prefix}{name}.")

    def tensor(self, name: str) -> NDArray[Any]:
        """Return the tensor `name` of this scope."""
        return self.weights[self.prefix + name]

    def divide(self, size: int, name: str) -> int:
        """Return each rank's share of `size`; ValueError if the ranks cannot share it evenly."""
        if size % self.communicator.size:
            raise ValueError(
                f"{name} {size} cannot be divided over {self.communicator.size} ranks; "
                f"choose a tensor_parallel_size that divides it"
            )
        return size // self.communicator.size


class ColumnParallelLinear:
    """x @ weight.T + bias, output features divided over the ranks; several parts are one product."""

    def __init__(self, scope: Scope, *parts: str) -> None:
        """Prepare the parts, side by side, as one matrix."""
        self._backend = scope.backend
        self._weight: Handle = _prepare(scope, parts, has_bias=True)

    def __call__(self, x: Array) -> Array:
        return self._backend.linear(x, self._weight)


class RowParallelLinear:
    """x @ weight.T + bias, input features divided over the ranks and their products summed."""

    def __init__(self, scope: Scope, part: str) -> None:
        """Prepare the weight; only the first rank adds the bias, or the sum would have it size times."""
        self._backend, self._communicator = scope.backend, scope.communicator
        self._weight: Handle = _prepare(scope, (part,), has_bias=scope.communicator.rank == 0)

    def __call__(self, x: Array) -> Array:
        return self._communicator.all_reduce(self._backend.linear(x, self._weight))


def _prepare(scope: Scope, parts: tuple[str, ...], *, has_bias: bool) -> Handle:
    weights = [{"weight": scope.tensor(f"{part}.weight")} for part in parts]
    if not has_bias or f"{scope.prefix}{parts[0]}.bias" not in scope.weights:
        return scope.backend.prepare_linear(weights)
    return scope.backend.prepare_linear(weights, [scope.tensor(f"{part}.bias") for part in parts])


class Embedding:
    """Rows of a matrix by token id; every rank has all of it."""

    def __init__(self, scope: Scope) -> None:
        """Prepare the matrix."""
        self._backend = scope.backend
        self.weight: Handle = scope.backend.prepare_linear([{"weight": scope.tensor("weight")}])

    def __call__(self, ids: Array) -> Array:
        return self._backend.embedding(ids, self.weight)


class LMHead:
    """Logits of the vocabulary, each rank's share computed, then gathered."""

    def __init__(self, scope: Scope, vocab_size: int, tied: Embedding | None = None) -> None:
        """Prepare the matrix, or share the tied embedding's where a rank needs all of it anyway."""
        self._backend, self._communicator = scope.backend, scope.communicator
        scope.divide(vocab_size, "vocab_size")
        if tied is not None and scope.communicator.size == 1:
            self._weight: Handle = tied.weight
        else:
            self._weight = scope.backend.prepare_linear([{"weight": scope.tensor("weight")}])

    def __call__(self, x: Array) -> Array:
        return self._communicator.all_gather(self._backend.logits(x, self._weight))


class RMSNorm:
    """x / rms(x) * weight; with a residual, first adds x to it in place and norms the sum."""

    def __init__(self, scope: Scope, eps: float) -> None:
        """Prepare the weight."""
        self._backend, self._eps = scope.backend, eps
        self._weight: Array = scope.backend.prepare_vector(scope.tensor("weight"))

    def __call__(self, x: Array, residual: Array | None = None) -> Array:
        return self._backend.rms_norm(x, self._weight, self._eps, residual)


class Attention:
    """Causal self-attention over the paged cache, grouped queries, optional norms of q and k heads."""

    def __init__(self, scope: Scope, config: ModelConfig, layer: int, cos_sin: Array) -> None:
        """Prepare the projections; cos_sin is float32[max_model_len, head_dim]."""
        self._backend = backend = scope.backend
        self._num_heads = scope.divide(config.num_heads, "num_attention_heads")
        self._num_kv_heads = scope.divide(config.num_kv_heads, "num_key_value_heads")
        self._head_dim, self._eps = config.head_dim, config.rms_norm_eps
        self._scale = config.head_dim**-0.5
        self._layer, self._cos_sin = layer, cos_sin
        self._sliding_window = config.sliding_window(layer)
        self._qkv = ColumnParallelLinear(scope, "q", "k", "v")
        self._o = RowParallelLinear(scope, "o")
        self._q_norm: Array | None = None
        self._k_norm: Array | None = None
        if config.qk_norm:
            self._q_norm = backend.prepare_vector(scope.tensor("q_norm.weight"))
            self._k_norm = backend.prepare_vector(scope.tensor("k_norm.weight"))

    def __call__(self, x: Array, batch: Batch, kv_cache: KVCache) -> Array:
        kv = kv_cache.layer(self._layer)
        q_end = self._num_heads * self._head_dim
        k_end = q_end + self._num_kv_heads * self._head_dim
        qkv = self._qkv(x)
        q = qkv[:, :q_end].reshape(-1, self._num_heads, self._head_dim)  # [num_tokens, num_heads, head_dim]
        k = qkv[:, q_end:k_end].reshape(-1, self._num_kv_heads, self._head_dim)
        v = qkv[:, k_end:].reshape(-1, self._num_kv_heads, self._head_dim)
        self._backend.rope_kv_write(
            q, k, v, kv, batch, self._cos_sin, q_norm=self._q_norm, k_norm=self._k_norm, eps=self._eps
        )
        return self._o(self._backend.paged_attention(q, kv, batch, self._scale, self._sliding_window))


class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, scope: Scope, config: ModelConfig) -> None:
        """Prepare gate and up as one matrix, and down."""
        scope.divide(config.intermediate_size, "intermediate_size")
        self._backend = scope.backend
        self._gate_up = ColumnParallelLinear(scope, "gate", "up")
        self._down = RowParallelLinear(scope, "down")

    def __call__(self, x: Array) -> Array:
        return self._down(self._backend.silu_mul(self._gate_up(x)))


class DecoderLayer:
    """Norm, attention, add, norm, MLP; the last add is left to the next norm, which does both at once.

    So a layer takes and gives `hidden` (not added yet) and `residual` (the sum so far). The residual is one
    array for the whole forward, the embedding's output: made before the first begin_layer, so it stays.
    """

    def __init__(self, scope: Scope, config: ModelConfig, layer: int, cos_sin: Array) -> None:
        """Build the parts."""
        self._backend = scope.backend
        self._attention_norm = RMSNorm(scope / "attention_norm", config.rms_norm_eps)
        self._attention = Attention(scope / "attention", config, layer, cos_sin)
        self._mlp_norm = RMSNorm(scope / "mlp_norm", config.rms_norm_eps)
        self._mlp = GatedMLP(scope / "mlp", config)

    def __call__(
        self, hidden: Array, residual: Array | None, batch: Batch, kv_cache: KVCache
    ) -> tuple[Array, Array]:
        self._backend.begin_layer()
        x = self._attention_norm(hidden, residual)
        residual = hidden if residual is None else residual
        x = self._attention(x, batch, kv_cache)
        x = self._mlp_norm(x, residual)
        return self._mlp(x), residual
