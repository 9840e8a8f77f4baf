"""Sampler: rows in chunks, greedy and seeded rows, log-probabilities only of those who asked."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.backend.base import Limits, MemoryUse
from cupaged.backend.cpu import ADJUSTED_ROWS, CpuBackend
from cupaged.batch import NUM_COUNTS, Batch, Bucket, Count, Flag, StepOutput, buffer_size, padding_batch, view
from cupaged.worker.sampler import LOGITS_CHUNK, Sampler

VOCAB_SIZE = 11


class HiddenIsLogits:
    """A model whose hidden states are its logits."""

    def __init__(self) -> None:
        self.rows_seen: list[int] = []

    def forward(self, batch: Batch, kv_cache: Any) -> Any:
        raise NotImplementedError

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        self.rows_seen.append(len(hidden))
        return hidden


def make_batch(
    num_seqs: int,
    targets: list[list[int]] | None = None,
    banned: list[list[int]] | None = None,
    *,
    num_decodes: int = 0,
) -> Batch:
    """Return greedy sequences; sequence i scores the prompt tokens targets[i], then samples but banned[i]."""
    banned = banned or [[] for _ in range(num_seqs)]
    banned_ids = [token for ids in banned for token in ids]
    targets = targets or [[] for _ in range(num_seqs)]
    num_logits = num_seqs + sum(map(len, targets))
    bucket = Bucket(num_logits, num_seqs, 1)
    buffer = np.zeros(buffer_size(bucket, len(banned_ids)), np.int32)
    arrays = view(buffer, bucket)
    arrays.counts[[Count.NUM_TOKENS, Count.NUM_SEQS, Count.NUM_LOGITS]] = num_logits, num_seqs, num_logits
    arrays.counts[[Count.NUM_BANNED, Count.NUM_DECODES]] = len(banned_ids), num_decodes
    arrays.banned_start[:] = np.cumsum([0, *map(len, banned)])
    arrays.tail[:] = banned_ids
    arrays.flags[:] = Flag.SAMPLES
    arrays.rows[:] = np.arange(num_seqs)
    arrays.num_logprobs[:] = -1
    arrays.num_prompt_logprobs[:] = -1
    arrays.logit_index[:] = np.arange(num_logits)
    arrays.logit_seq[:] = np.repeat(np.arange(num_seqs), [len(t) + 1 for t in targets])
    arrays.logit_target[:] = [target for t in targets for target in [*t, -1]]
    return Batch(buffer, bucket, np.zeros(num_seqs, np.int64))


def make_sampler(max_num_seqs: int) -> tuple[Sampler, HiddenIsLogits]:
    backend, model = CpuBackend("float32", num_threads=1), HiddenIsLogits()
    limits = Limits(num_tokens=1024, num_seqs=max_num_seqs, seq_len=64, block_size=16, num_slots=64)
    backend.allocate(limits, MemoryUse(weights=0, workspace=0, activations=1 << 20, reserve=0))
    return Sampler(backend, model, max_num_seqs), model


def random_logits(num_rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(3).standard_normal((num_rows, VOCAB_SIZE)).astype(np.float32)


def test_more_rows_than_a_chunk_are_sampled_chunk_by_chunk() -> None:
    num_seqs = 2 * LOGITS_CHUNK + 3
    sampler, model = make_sampler(num_seqs)
    hidden, batch = random_logits(num_seqs), make_batch(num_seqs)

    output = sampler.sample(hidden, batch, batch).result()

    assert model.rows_seen == [LOGITS_CHUNK, LOGITS_CHUNK, 3]
    assert output.token_ids[:, 0].tolist() == hidden.argmax(1).tolist()
    assert output.num_tokens.tolist() == [1] * num_seqs
    assert output.logprobs is None
    assert sampler.last_token.tolist() == hidden.argmax(1).tolist()


def test_a_sequence_that_does_not_sample_has_no_token() -> None:
    sampler, _ = make_sampler(2)
    batch = make_batch(2)
    batch.flags[1] = 0
    batch.arrays.counts[Count.NUM_LOGITS] = 1
    batch = Batch(batch.buffer, batch.bucket, batch.serials)

    output = sampler.sample(random_logits(2), batch, batch).result()

    assert output.num_tokens.tolist() == [1, 0]
    assert output.token_ids[1, 0] == -1


def test_padding_that_the_device_adds_is_cut_off() -> None:
    num_seqs, padded = LOGITS_CHUNK + 3, LOGITS_CHUNK + 8
    host = padding_batch(num_seqs, num_seqs, num_decodes=num_seqs, num_logits=num_seqs, table_width=1)
    host.logit_index[:] = host.logit_seq[:] = host.rows[:] = np.arange(num_seqs)
    host.logit_target[:], host.flags[:], host.num_logprobs[:] = -1, Flag.SAMPLES, 0
    device = padding_batch(padded, padded, num_decodes=padded, num_logits=padded, table_width=1)
    assert device.bucket == host.bucket
    device.buffer[NUM_COUNTS:] = host.buffer[NUM_COUNTS:]
    sampler, model = make_sampler(padded)
    hidden = random_logits(num_seqs)

    output = sampler.sample(hidden, device, host).result()

    assert model.rows_seen == [LOGITS_CHUNK, 8]
    assert output.token_ids[:, 0].tolist() == hidden.argmax(1).tolist()
    assert output.num_tokens.tolist() == [1] * num_seqs
    assert output.logprobs is not None
    assert output.logprobs.token_ids[:, 0].tolist() == hidden.argmax(1).tolist()


def test_bans_are_of_their_sequence_in_whichever_part_of_the_rows_it_is() -> None:
    num_seqs = 2 * ADJUSTED_ROWS + 3
    sampler, _ = make_sampler(num_seqs)
    hidden = random_logits(num_seqs)
    best = hidden.argmax(1).tolist()
    banned = [[token] if seq % 3 == 0 else [] for seq, token in enumerate(best)]
    batch = make_batch(num_seqs, banned=banned)

    output = sampler.sample(hidden, batch, batch).result()

    second = np.argsort(hidden, 1)[:, -2].tolist()
    expected = [second[seq] if banned[seq] else best[seq] for seq in range(num_seqs)]
    assert output.token_ids[:, 0].tolist() == expected


def test_the_output_is_the_callers_and_outlives_the_next_step() -> None:
    sampler, _ = make_sampler(2)
    hidden, batch = random_logits(2), make_batch(2)
    first = sampler.sample(hidden, batch, batch).result()
    before = first.token_ids.tolist()

    sampler.sample(-hidden, batch, batch).result()

    assert first.token_ids.tolist() == before


def test_only_rows_that_asked_report_log_probabilities() -> None:
    sampler, _ = make_sampler(3)
    batch = make_batch(3, [[], [4, 7], []])
    batch.num_logprobs[2] = 2
    batch.num_prompt_logprobs[1] = 0
    hidden = random_logits(5)

    logprobs = sampler.sample(hidden, batch, batch).result().logprobs

    assert logprobs is not None
    assert logprobs.seq.tolist() == [1, 1, 2]
    assert logprobs.is_prompt.tolist() == [True, True, False]
    assert logprobs.token_ids[:, 0].tolist() == [4, 7, int(hidden[4].argmax())]
    exact = hidden.astype(np.float64) - np.log(np.exp(hidden.astype(np.float64)).sum(1, keepdims=True))
    expected = [exact[1, 4], exact[2, 7], exact[4].max()]
    np.testing.assert_allclose(logprobs.logprobs[:, 0], expected, rtol=1e-5)
    assert logprobs.ranks.tolist() == [
        1 + int((hidden[1] > hidden[1, 4]).sum()),
        1 + int((hidden[2] > hidden[2, 7]).sum()),
        1,
    ]


def test_log_probabilities_of_many_chunks_stay_in_order() -> None:
    num_seqs = LOGITS_CHUNK + 5
    sampler, _ = make_sampler(num_seqs)
    hidden, batch = random_logits(num_seqs), make_batch(num_seqs)
    batch.num_logprobs[:] = 1

    logprobs = sampler.sample(hidden, batch, batch).result().logprobs

    assert logprobs is not None
    assert logprobs.seq.tolist() == list(range(num_seqs))
    assert logprobs.token_ids[:, 0].tolist() == hidden.argmax(1).tolist()
    assert (logprobs.logprobs[:, 0] == logprobs.logprobs[:, 1]).all()  # greedy: the token is the top one


def test_more_top_tokens_than_the_vocabulary_has_are_all_of_it() -> None:
    sampler, _ = make_sampler(1)
    batch = make_batch(1)
    batch.num_logprobs[:] = VOCAB_SIZE + 5

    logprobs = sampler.sample(random_logits(1), batch, batch).result().logprobs

    assert logprobs is not None
    assert sorted(logprobs.token_ids[0, 1:].tolist()) == list(range(VOCAB_SIZE))


def test_chunks_in_which_nobody_asked_are_left_out() -> None:
    num_seqs = 2 * LOGITS_CHUNK
    sampler, _ = make_sampler(num_seqs)
    hidden, batch = random_logits(num_seqs), make_batch(num_seqs)
    batch.num_logprobs[LOGITS_CHUNK + 3] = 0

    logprobs = sampler.sample(hidden, batch, batch).result().logprobs

    assert logprobs is not None
    assert logprobs.seq.tolist() == [LOGITS_CHUNK + 3]
    assert logprobs.token_ids[:, 0].tolist() == [int(hidden[LOGITS_CHUNK + 3].argmax())]


def test_only_flagged_sequences_have_log_probabilities_at_their_temperature() -> None:
    sampler, _ = make_sampler(2)
    batch = make_batch(2)
    batch.num_logprobs[:], batch.temperature[:] = 0, 0.5
    batch.flags[1] |= Flag.SCALED_LOGPROBS
    hidden = random_logits(2)

    output = sampler.sample(hidden, batch, batch).result()

    assert output.logprobs is not None
    logits = hidden.astype(np.float64) / [[1.0], [0.5]]
    exact = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = exact[[0, 1], output.token_ids[:, 0]]
    np.testing.assert_allclose(output.logprobs.logprobs[:, 0], expected, rtol=1e-5)


class Decoding:
    """A sampler that decodes in one buffer, step after step, with the same place for what goes in."""

    def __init__(self, num_seqs: int) -> None:
        self.sampler, self.model = make_sampler(num_seqs)
        self.batch = make_batch(num_seqs, banned=[[0]] * num_seqs, num_decodes=num_seqs)
        self.batch.temperature[:] = np.arange(num_seqs) % 2
        self.batch.top_p[:] = 1
        self.hidden = random_logits(num_seqs)

    def step(self, hidden: NDArray[np.float32], *, num_logits: int = 0, banned: bool = False) -> StepOutput:
        batch, num_seqs = self.batch, len(hidden)
        batch.arrays.counts[Count.NUM_LOGITS] = num_logits or num_seqs
        batch.arrays.counts[Count.NUM_BANNED] = num_seqs if banned else 0
        batch.output_position[:] += 1
        batch = Batch(batch.buffer, batch.bucket, batch.serials)
        self.hidden[:] = hidden
        self.sampler._backend.begin_forward()
        return self.sampler.sample(self.hidden, batch, batch).result()

    @property
    def num_runs(self) -> int:
        return len(self.model.rows_seen)


def in_another_buffer(batch: Batch) -> Batch:
    return Batch(batch.buffer.copy(), batch.bucket, batch.serials)


def several(num_steps: int, num_seqs: int) -> list[NDArray[np.float32]]:
    logits = np.random.default_rng(5).standard_normal((num_steps, num_seqs, VOCAB_SIZE))
    return list(logits.astype(np.float32))


@pytest.mark.parametrize("num_seqs", [1, 4, LOGITS_CHUNK + 3])
def test_tokens_of_replayed_steps_are_those_of_steps_that_are_not(
    num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed, other = Decoding(num_seqs), Decoding(num_seqs)
    steps = several(5, num_seqs)
    monkeypatch.setattr(other.sampler._backend, "run_sampling", lambda _batch, _hidden, sample: sample())

    for i, hidden in enumerate(steps):
        if i % 2:
            replayed.batch = in_another_buffer(replayed.batch)
        found, expected = replayed.step(hidden), other.step(hidden)

        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.token_ids[::2, 0].tolist() == hidden[::2].argmax(1).tolist()
        assert found.logprobs is None
        assert replayed.sampler.last_token.tolist() == found.token_ids[:, 0].tolist()

    chunks = -(-num_seqs // LOGITS_CHUNK)
    assert (replayed.num_runs, other.num_runs) == (chunks, chunks * len(steps))


def test_log_probabilities_between_replayed_steps_are_of_their_own_step() -> None:
    decoding, steps = Decoding(2), several(6, 2)
    wants = [False, False, True, False, True, False]
    for hidden, wanted in zip(steps, wants, strict=True):
        decoding.batch.num_logprobs[1] = 0 if wanted else -1

        output = decoding.step(hidden)

        assert output.token_ids[0, 0] == hidden[0].argmax()
        assert (output.logprobs is not None) == wanted
        if output.logprobs is not None:
            exact = hidden[1] - np.log(np.exp(hidden[1].astype(np.float64)).sum())
            token = output.token_ids[1, 0]
            assert output.logprobs.token_ids.tolist() == [[token]]
            np.testing.assert_allclose(output.logprobs.logprobs[0, 0], exact[token], rtol=1e-5)

    assert decoding.num_runs == 1 + wants.count(True)


def test_bans_between_replayed_steps_are_of_their_own_step() -> None:
    decoding, steps = Decoding(2), several(6, 2)
    bans = [False, False, True, False, True, False]
    for hidden, banned in zip(steps, bans, strict=True):
        hidden[0, 0] = 9  # the token that is banned in some of the steps

        output = decoding.step(hidden, banned=banned)

        assert output.token_ids[0, 0] == (1 + hidden[0, 1:].argmax() if banned else 0)

    assert decoding.num_runs == 1 + bans.count(True)


def test_a_step_in_which_not_all_sample_is_not_replayed() -> None:
    decoding, steps = Decoding(3), several(4, 3)
    for hidden, num_logits in zip(steps, (2, 3, 2, 3), strict=True):
        output = decoding.step(hidden, num_logits=num_logits)

        greedy = [0] if num_logits == 2 else [0, 2]
        assert output.token_ids[greedy, 0].tolist() == hidden[greedy].argmax(1).tolist()

    assert decoding.num_runs == 3


def test_prompts_are_not_replayed() -> None:
    decoding = Decoding(2)
    decoding.batch.arrays.counts[Count.NUM_DECODES] = 1

    for hidden in several(3, 2):
        assert decoding.step(hidden).token_ids[0, 0] == hidden[0].argmax()

    assert decoding.num_runs == 3
