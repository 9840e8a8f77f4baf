from dataclasses import replace

import pytest

from tools.gpu_specs import A100, H100, H200, Gpu, blocks_per_sm, occupancy
from tools.predict import LAUNCH, Work, predict, roofline

# 10,000 blocks that stream a GB with plenty in flight.
STREAM = Work(
    blocks=10_000,
    threads=256,
    registers=32,
    shared_bytes=0,
    num_bytes=1_000_000_000,
    unique_bytes=1_000_000_000,
    flops=1_000_000_000,
)


def seconds(work: Work, gpu: Gpu = H200) -> float:
    return predict(work, gpu).seconds


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "blocks"),
    [
        ("sm_80", 256, 32, 0, 8),  # all 2048 threads
        ("sm_90", 32, 16, 0, 32),  # most blocks
        ("sm_90", 128, 128, 0, 4),  # 512 threads of 128 registers are all registers
        ("sm_90", 128, 129, 0, 3),  # 136, as they are given out
        ("sm_90", 128, 255, 0, 2),
        ("sm_89", 256, 32, 0, 6),  # all 1536 threads
        ("sm_80", 128, 32, 81 * 1024, 2),  # 82 KiB with what CUDA keeps, twice in 164
        ("sm_80", 128, 32, 81 * 1024 + 1, 1),
        ("sm_89", 128, 32, 100 * 1024, 0),
        ("sm_90", 1024, 65, 0, 0),
    ],
)
def test_what_an_sm_holds(arch: str, threads: int, registers: int, shared_bytes: int, blocks: int) -> None:
    assert blocks_per_sm(arch, threads, registers, shared_bytes) == blocks


def test_occupancy_is_the_share_of_the_sm_s_threads() -> None:
    assert occupancy("sm_90", 128, 128, 0) == 0.25
    assert occupancy("sm_89", 96, 32, 0) == 1.0


def test_a_stream_takes_what_copying_takes() -> None:
    for gpu in (A100, H100, H200):
        copied = STREAM.num_bytes / gpu.copy_bandwidth

        assert copied < seconds(STREAM, gpu) < 1.05 * copied
        assert roofline(STREAM, gpu) == STREAM.num_bytes / gpu.bandwidth


def test_the_roofline_of_much_arithmetic_is_that_of_its_instructions() -> None:
    heavy = replace(STREAM, flops=10**13)

    assert roofline(heavy, H200) == 1e13 / H200.fp32_flops
    assert roofline(replace(heavy, mma_flops=1e13), H200) == 1e13 / (H200.tensor_flops * H200.mma_share)


def test_few_blocks_cannot_use_the_bandwidth() -> None:
    few = replace(STREAM, blocks=10)

    assert seconds(few) > 10 * seconds(STREAM)
    assert seconds(replace(few, copy_bytes=32 * 1024)) < seconds(few) / 3


def test_what_is_read_again_costs_hbm_time_only_if_l2_cannot_keep_it() -> None:
    small = replace(STREAM, unique_bytes=10_000_000)
    again = replace(small, num_bytes=small.unique_bytes)

    assert seconds(small) < STREAM.num_bytes / H200.copy_bandwidth
    assert seconds(small) > seconds(again)
    assert seconds(replace(STREAM, num_bytes=2_000_000_000, blocks=100)) > 1.9 * seconds(
        replace(STREAM, blocks=100)
    )


def test_the_last_wave_costs_as_much_as_its_fullest_sm() -> None:
    heavy = replace(STREAM, shared_bytes=200 * 1024, mma_flops=1e12, blocks=H200.num_sms)
    rate = H200.tensor_flops * H200.attention_share

    one_wave = seconds(heavy)
    two_waves = seconds(replace(heavy, blocks=H200.num_sms + 1, mma_flops=1e12 * (1 + 1 / 132)))

    assert one_wave == pytest.approx(1e12 / rate, rel=0.01)
    assert two_waves == pytest.approx(2 * 1e12 / rate, rel=0.01)


def test_an_sm_takes_no_more_than_its_bytes_a_clock() -> None:
    one = replace(STREAM, blocks=1, unique_bytes=1_000_000, copy_bytes=10**9)

    assert predict(one, H200).limit == "L2"
    assert seconds(one) > STREAM.num_bytes / (64 * H200.clock)


def test_bank_conflicts_are_in_the_prediction() -> None:
    clean = replace(STREAM, wavefronts=STREAM.num_bytes / 128)

    assert seconds(replace(clean, wavefronts=32 * clean.wavefronts)) > 4 * seconds(clean)


def test_nothing_is_faster_than_its_launch_and_two_round_trips() -> None:
    tiny = replace(STREAM, blocks=1, num_bytes=32, unique_bytes=32, flops=0)

    assert LAUNCH < seconds(tiny, A100) < 5e-6


def test_a_block_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not fit on an SM of sm_80"):
        predict(replace(STREAM, shared_bytes=200 * 1024), A100)


@pytest.mark.parametrize(
    ("work", "limit"),
    [
        (STREAM, "HBM"),
        (replace(STREAM, blocks=10), "latency"),
        (replace(STREAM, unique_bytes=1_000_000), "L2"),
        (replace(STREAM, mma_flops=1e12), "tensor"),
        (replace(STREAM, wavefronts=1e9), "shared"),
        (replace(STREAM, flops=10**12), "fp32"),
        (replace(STREAM, flops=10**12, mma_flops=1.0), "HBM"),  # the tensor cores have them
    ],
)
def test_the_limit_is_named(work: Work, limit: str) -> None:
    assert predict(work, H200).limit == limit
