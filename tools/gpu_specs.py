"""The GPUs that kernel_report speaks of, and how many blocks of a kernel one multiprocessor (SM) holds.

Rates are a second and of the whole chip. "datasheet" is NVIDIA's figure for the SXM form; what is attained of
it is measured or published where it says so, else assumed.
"""

from dataclasses import dataclass, replace

from cupaged.kernels.launch import ceil_div

WARP = 32  # threads
RESERVED_SHARED = 1024  # bytes of each block's shared memory that CUDA keeps for itself
REGISTERS_PER_SM = 65536
REGISTER_UNIT = 256  # registers that a warp gets at once

MATMUL_SHARE = 790 / 989  # of tensor_flops, that cuBLAS attains in a large product; seen there too
COPY_SHARE = 4.3 / 4.8  # of the bandwidth, that a copy attains, read + write; seen on an H200 through PyTorch


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Limits of one SM, by what kernels are compiled for (CUDA programming guide, compute capabilities)."""

    shared_bytes: int
    threads: int
    blocks: int


ARCHITECTURES = {
    "sm_80": Architecture(shared_bytes=164 << 10, threads=2048, blocks=32),
    "sm_89": Architecture(shared_bytes=100 << 10, threads=1536, blocks=24),
    "sm_90": Architecture(shared_bytes=228 << 10, threads=2048, blocks=32),
    "sm_100": Architecture(shared_bytes=228 << 10, threads=2048, blocks=32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    arch: str
    num_sms: int
    clock: float  # Hz, at which the tensor rate holds
    bandwidth: float  # bytes of HBM, datasheet
    tensor_flops: float  # bf16, dense, datasheet
    mma_share: float  # of tensor_flops, that mma.sync attains
    attention_share: float  # of tensor_flops, that FlashAttention-2 attains at long contexts, published
    l2_bytes: int
    l2_bandwidth: float  # bytes that SMs get out of L2; assumed, near published microbenchmarks

    @property
    def copy_bandwidth(self) -> float:
        """Bytes a second that a copy attains, read + write."""
        return self.bandwidth * COPY_SHARE

    @property
    def matmul_flops(self) -> float:
        """FLOPs a second that a large bf16 product attains."""
        return self.tensor_flops * MATMUL_SHARE

    @property
    def fp32_flops(self) -> float:
        """FLOPs a second of 128 lanes an SM, two a multiply-add."""
        return self.num_sms * 128 * 2 * self.clock


A100 = Gpu(
    name="A100",  # 80 GB
    arch="sm_80",
    num_sms=108,
    clock=1.41e9,
    bandwidth=2.039e12,
    tensor_flops=312e12,
    mma_share=0.95,  # assumed: mma.sync is all that there is
    attention_share=0.73,  # FlashAttention-2's paper: 230 TFLOP/s
    l2_bytes=40 << 20,
    l2_bandwidth=4.5e12,
)
H100 = Gpu(
    name="H100",
    arch="sm_90",
    num_sms=132,
    clock=1.83e9,
    bandwidth=3.35e12,
    tensor_flops=989e12,
    mma_share=0.63,  # published (arXiv 2402.13499); the rest is for wgmma
    attention_share=0.35,  # FlashAttention-3's paper on FlashAttention-2
    l2_bytes=50 << 20,
    l2_bandwidth=6.0e12,
)
# The same processor with more and faster memory; the L2 is as one reported it, through PyTorch.
H200 = replace(H100, name="H200", bandwidth=4.8e12, l2_bytes=60 << 20)
GPUS = (A100, H100, H200)


def blocks_per_sm(arch: str, threads: int, registers: int, shared_bytes: int) -> int:
    """Return how many blocks an SM holds at once: registers a thread, shared bytes a block; 0 = too large."""
    limits = ARCHITECTURES[arch]
    warps = ceil_div(threads, WARP)
    registers_a_warp = max(1, ceil_div(registers * WARP, REGISTER_UNIT)) * REGISTER_UNIT
    most_warps = REGISTERS_PER_SM // 4 // registers_a_warp * 4  # each quarter of an SM has its own registers
    shared = ceil_div(shared_bytes + RESERVED_SHARED, 128) * 128
    by_threads = limits.threads // (warps * WARP)
    return min(limits.blocks, by_threads, most_warps // warps, limits.shared_bytes // shared)


def occupancy(arch: str, threads: int, registers: int, shared_bytes: int) -> float:
    """Return the share of an SM's threads that can be there at once, 0 to 1."""
    warps = ceil_div(threads, WARP)
    blocks = blocks_per_sm(arch, threads, registers, shared_bytes)
    return blocks * warps * WARP / ARCHITECTURES[arch].threads
