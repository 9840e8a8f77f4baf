"""Whole steps: what one must move and compute, and how its parts add up."""

import pytest

from tools.gpu_specs import GPUS, H200
from tools.kernel_cases.case import Case
from tools.kernel_tables import predictions
from tools.steps import LLAMA_8B, STEPS, Gemm, Step, gemm_seconds, step_row


def test_an_8b_llama_reads_its_weights_and_131072_bytes_a_token() -> None:
    assert LLAMA_8B.weight_bytes == 2 * (32 * 218_103_808 + 128_256 * 4096)
    assert LLAMA_8B.kv_bytes == 131_072


def test_a_decode_must_move_weights_and_the_keys_and_values_it_sees() -> None:
    step = Step(LLAMA_8B, 256, 1024)

    assert step.least_bytes == LLAMA_8B.weight_bytes + 256 * 1024 * 131_072
    assert step.roofline(4.8e12, 1e18) == pytest.approx(10.3e-3, rel=0.01)


def test_a_prefill_computes_two_flops_a_weight_and_token_and_half_of_attentions_square() -> None:
    step = Step(LLAMA_8B, 2, 1000, 1000)
    layers = (LLAMA_8B.weight_bytes - LLAMA_8B.head(1).weight_bytes) // 2
    pairs = 2 * 1000 * 1001 // 2  # of query and key

    assert step.least_flops == 2 * (2000 * layers + 2 * 128_256 * 4096) + 32 * 32 * pairs * 4 * 128
    assert step.least_bytes == LLAMA_8B.weight_bytes + 2 * 2000 * 131_072


def test_products_of_few_rows_take_as_long_as_their_weights_and_of_many_as_their_flops() -> None:
    one, many = Gemm(1, 4096, 4096), Gemm(8192, 4096, 4096)

    assert gemm_seconds(one, H200) == pytest.approx(one.weight_bytes / H200.copy_bandwidth + 2.2e-6, rel=0.01)
    assert gemm_seconds(many, H200) == pytest.approx(many.flops / H200.matmul_flops + 2.2e-6, rel=0.01)


def test_a_step_is_the_sum_of_its_parts() -> None:
    step = Step(LLAMA_8B, 16, 1024)
    parts = step.parts()

    row = step_row(step, lambda case, gpu: 1e-6)  # noqa: ARG005

    kernels = sum(count for count, part in parts if isinstance(part, Case))
    products = sum(count * gemm_seconds(part, H200) for count, part in parts if isinstance(part, Gemm))
    found = row["gpus"]["H200"]
    assert found["predicted_us"] == pytest.approx(kernels + 1e6 * products, abs=0.1)
    assert found["gemm_share"] == pytest.approx(products / (products + 1e-6 * kernels))


def test_every_step_has_its_prediction_in_the_readme_above_its_roofline() -> None:
    for gpu in GPUS:
        found = predictions(gpu.name)
        for step in STEPS:
            assert found[step.name] > step.roofline(gpu.copy_bandwidth, gpu.matmul_flops)
