"""Which kernels the CPU backend runs, for which types: what is compiled before there is a request."""

from cupaged.backend.matrices import Kernel
from cupaged.kernels import (
    adjust_logits,
    gated_mul,
    logprobs,
    paged_attention,
    rms_norm,
    rope_kv_write,
    rows,
    sample,
)


def step_kernels(inputs: str, kv: str) -> list[Kernel]:
    """Return what a step runs beside its matrices; `inputs` is the type of what goes into those."""
    return [
        (paged_attention.paged_attention_cpu, paged_attention.SIGNATURE.format(kv, inputs)),
        (rope_kv_write.rope_kv_write_cpu, rope_kv_write.SIGNATURE.format(kv)),
        (sample.sample_cpu, sample.SIGNATURE),
        (logprobs.logprobs_cpu, logprobs.SIGNATURE),
        (adjust_logits.adjust_logits_cpu, adjust_logits.SIGNATURE),
        (rms_norm.rms_norm_cpu, rms_norm.SIGNATURE.format(inputs)),
        (rms_norm.add_rms_norm_cpu, rms_norm.ADD_SIGNATURE.format(inputs)),
        (gated_mul.silu_mul_cpu, gated_mul.SIGNATURE.format(inputs)),
        (rows.gather_rows_cpu, rows.SIGNATURE.format(inputs, inputs)),
        (rows.load_last_tokens_cpu, rows.LOAD_SIGNATURE),
        (rows.store_last_tokens_cpu, rows.STORE_SIGNATURE),
        (rows.copy_blocks_cpu, rows.COPY_SIGNATURE),
    ]
