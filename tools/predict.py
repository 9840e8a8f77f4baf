"""How long a launch takes on a GPU: the roofline, and a prediction. Neither is a measurement.

Roofline: the longer of what HBM needs for the bytes, each counted once, by the datasheet, and what the tensor
cores need for the sheet's FLOPs at the rate of mma.sync (in a kernel without it: the fp32 lanes at their
peak).

Prediction: LAUNCH, a first round trip to HBM (a table, a length), then one wave of blocks after the other, as
many as fit on the chip at once, the last one fewer. A wave lasts at least a round trip, and as long as the
slowest of these on the SM with most blocks:
  HBM     bytes counted once (all, if what a wave reads again is more than half of L2), at copy bandwidth
  L2      all bytes that warps request, at L2 bandwidth, at most 64 bytes a clock on an SM
  latency of either: it cannot move more than the bytes in flight in a latency
  tensor  mma.sync's FLOPs as executed, tiles and padding included, at the rate that FlashAttention-2 attains
  shared  wavefronts, bank conflicts included, one a clock
  fp32    the sheet's FLOPs at half the peak, in kernels without mma.sync
Executed FLOPs, wavefronts and cp.async bytes in flight are counted by the emulator at a smaller shape, and
scale with the sheet's FLOPs and bytes. Blocks count as equally long.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cupaged.kernels.launch import ceil_div
from tools.gpu_specs import Gpu, blocks_per_sm

LAUNCH = 1.5e-6  # s from one kernel's end to the next one's start in a graph; assumed
HBM_LATENCY = 0.7e-6  # s, under load; assumed
L2_LATENCY = 0.3e-6  # s, under load; assumed
L2_BYTES_PER_CLOCK = 64  # that an SM takes
LOADS_IN_FLIGHT = 32  # bytes of a thread without cp.async, two 16-byte loads; assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one launch does, all blocks together unless it says a block."""

    blocks: int
    threads: int  # a block
    registers: int  # a thread
    shared_bytes: int  # a block, static and dynamic
    num_bytes: int  # that warps request of global memory
    unique_bytes: int  # of them, each counted once
    flops: int
    mma_flops: float = 0.0  # as executed, 0 = the kernel has none
    wavefronts: float = 0.0
    copy_bytes: int = 0  # of cp.async in flight, a block


def roofline(work: Work, gpu: Gpu) -> float:
    """Return the seconds that no kernel for this work, by the same instructions, can beat."""
    peak = gpu.tensor_flops * gpu.mma_share if work.mma_flops else gpu.fp32_flops
    return max(work.unique_bytes / gpu.bandwidth, work.flops / peak)


class Prediction(NamedTuple):
    """How long, and because of what."""

    seconds: float
    limit: str  # of a full wave: HBM, L2, tensor, shared, fp32, or latency


def predict(work: Work, gpu: Gpu) -> Prediction:
    """Return what a launch is predicted to take."""
    held = blocks_per_sm(gpu.arch, work.threads, work.registers, work.shared_bytes)
    if not held:
        raise ValueError(
            f"a block of {work.threads} threads with {work.registers} registers each and {work.shared_bytes} "
            f"bytes of shared memory does not fit on an SM of {gpu.arch}"
        )
    full, rest = divmod(work.blocks, held * gpu.num_sms)
    seconds, limit = _wave(work, gpu, held * gpu.num_sms if full else rest)
    if full and rest:
        seconds = full * seconds + _wave(work, gpu, rest).seconds
    elif full:
        seconds *= full
    return Prediction(LAUNCH + HBM_LATENCY + seconds, limit)


def _wave(work: Work, gpu: Gpu, blocks: int) -> Prediction:
    """Return the time of `blocks` blocks that run together."""
    part = blocks / work.blocks
    fullest = ceil_div(blocks, gpu.num_sms) / work.blocks  # the share of all work on the SM with most blocks
    in_flight = blocks * max(work.copy_bytes, LOADS_IN_FLIGHT * work.threads)
    rereads_hit = part * work.unique_bytes <= gpu.l2_bytes / 2
    hbm_bytes = work.unique_bytes if rereads_hit else work.num_bytes
    mma_rate = gpu.tensor_flops * gpu.attention_share / gpu.num_sms
    fp32_rate = gpu.fp32_flops / 2 / gpu.num_sms
    times = {
        "latency": max(
            HBM_LATENCY,
            part * hbm_bytes * HBM_LATENCY / in_flight,
            part * work.num_bytes * L2_LATENCY / in_flight,
        ),
        "HBM": part * hbm_bytes / gpu.copy_bandwidth,
        "L2": max(
            part * work.num_bytes / gpu.l2_bandwidth,
            fullest * work.num_bytes / (L2_BYTES_PER_CLOCK * gpu.clock),
        ),
        "tensor": fullest * work.mma_flops / mma_rate,
        "shared": fullest * work.wavefronts / gpu.clock,
        "fp32": 0.0 if work.mma_flops else fullest * work.flops / fp32_rate,
    }
    limit = max(times, key=times.__getitem__)
    return Prediction(times[limit], limit)
