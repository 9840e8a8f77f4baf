"""What requests change in their logits before a token is sampled: bias, penalties, bans.

Order and meaning are vLLM's. The bias is added first. A token in prompt or output has its logit divided by
repetition_penalty, or multiplied where it is not positive; one in the output then loses frequency_penalty for
each time, and presence_penalty once. A ban is last and final. NaN in the logits becomes minus infinity.

counts int32[max_num_seqs, vocab_size] has, by row, how often each token is in the output, and in its sign bit
whether it is in the prompt. Every operation is one float32 rounding: twin and kernel give the same bits.
"""

from typing import Any

import numpy as np

from cupaged.jit import njit
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.launch import Array, Device, Kernel, ceil_div, row_stride
from cupaged.kernels.parallel import parallel_for

GRAIN = 1 << 16  # logits, 8 us of a CPU's work
THREADS = 256  # of a CUDA block, which has
CHUNK = 4096  # tokens of a row

SAMPLES, RESET = 1, 4  # bits of a sequence's flags, as in batch.Flag
BANNED = np.uint32(0xFFFFFFFF)  # the bits of a NaN that no arithmetic makes
IN_PROMPT = np.int32(-(2**31))


@njit
def number(x: Any) -> Any:
    """Return x, or minus infinity for NaN."""
    return x if x == x else np.float32(-np.inf)


@njit
def penalise(z: Any, count: Any, penalties: Any) -> Any:
    """Return the logit of a token with this entry of counts."""
    repetition, frequency, presence = penalties
    if count == 0:
        return z
    z = z / repetition if z > 0 else z * repetition
    num_output = count & np.int32(0x7FFFFFFF)
    return (z - frequency * np.float32(num_output)) - presence if num_output > 0 else z


@njit
def penalise_row(row: Any, counted: Any, penalties: Any) -> None:
    """Penalise the logits of the tokens that were counted."""
    if penalties[0] != 1 or penalties[1] != 0 or penalties[2] != 0:
        for j in range(row.shape[0]):
            row[j] = penalise(row[j], counted[j], penalties)


@njit
def ragged(start: Any, seq: int) -> Any:
    """Return the places of a sequence's part; none where there are no starts."""
    return range(start[seq], start[seq + 1]) if start.shape[0] > 0 else range(0)


@njit
def adjust_rows(
    logits: Any,
    logit_seq: Any,
    logit_target: Any,
    penalties: Any,
    biases: Any,
    bans: Any,
    adjusted: Any,
    places: Any,
) -> None:
    """Set the adjusted rows [first, last) that are sampled from."""
    rows, counts, repetition, frequency, presence = penalties
    bias_start, bias_ids, bias = biases
    banned_start, banned = bans
    for i in range(*places):
        if logit_target[i] < 0:
            seq, row, out = logit_seq[i], logits[i], adjusted[i]
            for j in range(row.shape[0]):
                out[j] = number(row[j])
            for k in ragged(bias_start, seq):
                out[bias_ids[k]] += bias[k]
            if counts.shape[0] > 0:
                penalise_row(out, counts[rows[seq]], (repetition[seq], frequency[seq], presence[seq]))
            bits = out.view(np.uint32)
            for k in ragged(banned_start, seq):
                bits[banned[k]] = BANNED


SIGNATURE = (
    "void(f4[:,::1],i4[::1],i4[::1],i4[::1],i4[:,::1],f4[::1],f4[::1],f4[::1],i4[::1],i4[::1],f4[::1],"
    "i4[::1],i4[::1],f4[:,::1])"
)


@njit
def adjust_logits_cpu(
    logits: Any,  # float32[n, vocab_size]
    logit_seq: Any,  # int32[n], the sequence of each row
    logit_target: Any,  # int32[n], -1 = sampled from; other rows are left out
    rows: Any,  # int32[num_seqs], a sequence's row of counts
    counts: Any,  # int32[max_num_seqs, vocab_size], or [0, 0] where no sequence has penalties
    repetition_penalty: Any,  # float32[num_seqs] > 0, 1 = none; [0] without counts
    frequency_penalty: Any,  # float32[num_seqs], 0 = none; [0] without counts
    presence_penalty: Any,
    bias_start: Any,  # int32[num_seqs + 1], bias_ids[start : end] are a sequence's; [0] where none has a bias
    bias_ids: Any,  # int32, each once a sequence
    bias: Any,  # float32, of bias_ids
    banned_start: Any,  # int32[num_seqs + 1], likewise into banned; [0] where none has a ban
    banned: Any,  # int32
    adjusted: Any,  # float32[n, vocab_size]
) -> None:
    """Set the adjusted rows that are sampled from."""
    penalties = (rows, counts, repetition_penalty, frequency_penalty, presence_penalty)
    biases, bans = (bias_start, bias_ids, bias), (banned_start, banned)
    args = (logits, logit_seq, logit_target, penalties, biases, bans, adjusted)
    parallel_for(adjust_rows, logits.shape[0], num_chunks(logits.size, GRAIN), args)


@njit
def count_history_cpu(
    rows: Any,  # int32[num_seqs], and so flags and output_position
    flags: Any,
    output_position: Any,  # how many of the sequence's last ids are output
    history_start: Any,  # int32[num_seqs + 1]
    history: Any,  # int32, the ids of sequences that enter
    counts: Any,  # int32[max_num_seqs, vocab_size]
) -> None:
    """Set the row of counts of each sequence that enters (RESET) with a history."""
    for seq in range(rows.shape[0]):
        start, end = history_start[seq], history_start[seq + 1]
        if flags[seq] & RESET and end > start:
            row = counts[rows[seq]]
            row[:] = 0
            for k in range(start, end):
                if k < end - output_position[seq]:
                    row[history[k]] |= IN_PROMPT
                else:
                    row[history[k]] += 1


@njit
def count_sampled_cpu(
    rows: Any,  # int32[num_seqs], and so flags and token_ids
    flags: Any,
    token_ids: Any,  # what the step sampled
    counts: Any,  # int32[max_num_seqs, vocab_size]
) -> None:
    """Count the tokens of the sequences that sampled."""
    for seq in range(rows.shape[0]):
        if flags[seq] & SAMPLES:
            counts[rows[seq], token_ids[seq]] += 1


def adjust_logits_cuda(
    device: Device,
    logits: Array,
    logit_seq: Array,
    logit_target: Array,
    rows: Array,
    counts: Array | None,
    repetition_penalty: Array | None,
    frequency_penalty: Array | None,
    presence_penalty: Array | None,
    bias_start: Array | None,
    bias_ids: Array | None,
    bias: Array | None,
    banned_start: Array | None,
    banned: Array | None,
    adjusted: Array,
) -> None:
    """Set the adjusted rows that are sampled from; as adjust_logits_cpu, with None for its empty arrays."""
    num_rows, vocab_size = logits.shape
    sequences = (logit_seq, logit_target, rows)
    penalties = (repetition_penalty, frequency_penalty, presence_penalty)
    ragged = (bias_start, bias_ids, bias, banned_start, banned)
    args = (adjusted, logits, *sequences, counts, *penalties, *ragged, vocab_size, row_stride(logits))
    _kernel(device, "adjust_logits")((ceil_div(vocab_size, CHUNK), num_rows, 1), THREADS, args)


def count_history_cuda(
    device: Device,
    rows: Array,
    flags: Array,
    output_position: Array,
    history_start: Array,
    history: Array,
    counts: Array,
) -> None:
    """Set the row of counts of each sequence that enters (RESET) with a history."""
    vocab_size = counts.shape[1]
    args = (counts, rows, flags, output_position, history_start, history, vocab_size)
    _kernel(device, "count_history")((ceil_div(vocab_size, CHUNK), rows.shape[0], 1), THREADS, args)


def count_sampled_cuda(device: Device, rows: Array, flags: Array, token_ids: Array, counts: Array) -> None:
    """Count the tokens of the sequences that sampled."""
    num_seqs = rows.shape[0]
    args = (counts, rows, flags, token_ids, num_seqs, counts.shape[1])
    _kernel(device, "count_sampled")((ceil_div(num_seqs, THREADS), 1, 1), THREADS, args)


def _kernel(device: Device, name: str) -> Kernel:
    return device.kernel("adjust_logits", name, THREADS=THREADS, CHUNK=CHUNK)
