"""TraceRecorder: a scheduler that writes down what it is asked and what it plans, as it happens.

What it plans is the scheduler's own; a record is written after the call that it tells of has succeeded, so a
replay of the same calls in the same order meets the same states.
"""

import hashlib
import json
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict
from math import gcd

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch, StepOutput, padding_batch
from cupaged.scheduler.scheduler import Scheduler, Update
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.sequence import NOT_FINISHED, FinishReason, Sequence, SequenceGroup
from cupaged.trace.chains import Chains, append_outputs, begin, create_chains, create_key
from cupaged.trace.plan_encoder import PlanEncoder
from cupaged.trace.plan_state import create_plan_state
from cupaged.trace.records import REQUEST_DEFAULTS, Kind, TraceFile
from cupaged.trace.varint import MAX_BYTES, encode_ints

PIECE = 16  # tokens that one hash stands for, where the block size is a multiple of it


class TraceRecorder(Scheduler):
    """A scheduler that writes its calls, their times and its plans to a file."""

    def __init__(
        self, config: SchedulerConfig, counters: NDArray[np.int64] | None, trace_file: TraceFile
    ) -> None:
        """Begin a new scheduler in the file, which may have had others before it."""
        super().__init__(config, counters)
        self._file = trace_file
        self._with_text = trace_file.with_text
        self._piece = 1 if self._with_text else gcd(PIECE, config.block_size)
        self._key = create_key()
        self._chains = self._create_chains(config.max_num_seqs)
        self._beam_chains: dict[int, Chains] = {}  # by the group's arrival
        self._plans = PlanEncoder(create_plan_state(config))
        self._compile()
        self._time = time.perf_counter_ns() // 1000
        head = {"with_text": self._with_text, "piece": self._piece}
        self._file.write(Kind.SCHEDULER, json.dumps(head | {"config": asdict(config)}).encode())

    def add(self, group: SequenceGroup) -> None:
        """Queue a group, as a scheduler does."""
        super().add(group)
        params = group.params
        fields = {
            "time": self._elapsed(),
            "arrival": group.arrival,
            "num_prompt_tokens": len(group.prompt_token_ids),
            "max_total_tokens": group.max_total_tokens,
            "num_sequences": group.num_sequences,
            "is_beam": group.is_beam,
            "num_candidates": group.num_candidates,
            "priority": group.priority,
            "salts": [[kind, self._salt(text)] for kind, text in group.cache_salts],
            "seed": group.seed,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "logprobs": params.logprobs,
            "prompt_logprobs": params.prompt_logprobs,
            "min_tokens": params.min_tokens,
            "num_banned": len(group.banned_token_ids),
        }
        if self._with_text:
            fields["stop_token_ids"] = list(group.stop_token_ids)
        values = np.empty(len(group.prompt_token_ids) // self._piece, np.int64)
        begin(self._create_chains(1), 0, group.prompt_token_ids, values)
        fields = {name: value for name, value in fields.items() if REQUEST_DEFAULTS.get(name, ...) != value}
        head = json.dumps(fields, separators=(",", ":")).encode()
        self._file.write(Kind.ADD, head + b"\n" + encode_ints(values.tolist()))

    def schedule(self) -> Batch | None:
        """Plan the next step, as a scheduler does."""
        batch = super().schedule()
        if batch is None:
            self._file.write(Kind.IDLE, encode_ints([self._elapsed()]))
        else:
            self._file.write(Kind.PLAN, encode_ints([self._elapsed()]) + self._plans.encode(batch))
        return batch

    def update(self, batch: Batch, output: StepOutput) -> Update:
        """Take a step back, as a scheduler does."""
        elapsed = self._elapsed()
        update = super().update(batch, output)
        is_new = self._chains.serial[batch.rows] != batch.serials
        for i in np.flatnonzero(is_new & (update.num_tokens > 0)).tolist():
            seq = update.sequences[i]
            assert seq is not None, "tokens of a sequence that nobody has"
            self._find_chain(seq, int(batch.rows[i]), int(batch.output_position[i]))
            self._chains.serial[batch.rows[i]] = batch.serials[i]
        pieces = self._entries(self._chains, batch.rows, update.num_tokens, output.token_ids)
        head = [elapsed, 0]
        for i in np.flatnonzero(update.finish_reasons != NOT_FINISHED).tolist():
            seq = update.sequences[i]
            assert seq is not None, "the end of a sequence that nobody has"
            head[1] += 1
            length = int(self._chains.length[batch.rows[i]])
            head += [seq.group.arrival, seq.index, int(update.finish_reasons[i]), length]
        self._file.write(Kind.UPDATE, encode_ints(head) + pieces)
        return update

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence, as a scheduler does."""
        if seq.finish_reason is not None:
            super().finish(seq, reason)
            return
        length = self._length(seq)
        super().finish(seq, reason)
        self._forget_beams(seq.group)
        values = [self._elapsed(), seq.group.arrival, int(reason), seq.index, length]
        self._file.write(Kind.FINISH, encode_ints(values))

    def finish_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        """End what is unfinished of a group, as a scheduler does."""
        ended = [number for seq in group.unfinished for number in (seq.index, self._length(seq))]
        super().finish_group(group, reason)
        if ended:
            self._forget_beams(group)
            values = [self._elapsed(), group.arrival, int(reason), *ended]
            self._file.write(Kind.FINISH_GROUP, encode_ints(values))

    def continue_beams(self, group: SequenceGroup, parents: Seq[int], token_ids: Seq[int]) -> None:
        """Go on with the beams that the engine chose, as a scheduler does."""
        super().continue_beams(group, parents, token_ids)
        chains = self._beam_chains.get(group.arrival)
        if chains is None:
            chains = self._beam_chains[group.arrival] = self._create_chains(group.num_sequences)
            num_prompt = len(group.prompt_token_ids)
            begin(chains, 0, group.prompt_token_ids, np.empty(num_prompt, np.int64))
            chains.arrival[:] = group.arrival
            chains.seq_index[:] = np.arange(group.num_sequences)
        for array in (chains.chain, chains.pending, chains.num_pending, chains.length):
            array[: len(parents)] = array[list(parents)]
        chosen = np.array(token_ids, np.int32).reshape(-1, 1)
        pieces = self._entries(
            chains, np.arange(len(parents), dtype=np.int32), np.ones_like(chosen[:, 0]), chosen
        )
        head = [self._elapsed(), group.arrival, len(parents), *map(int, parents)]
        self._file.write(Kind.CONTINUE_BEAMS, encode_ints(head) + pieces)

    def reset_prefix_cache(self) -> None:
        """Forget what is cached, as a scheduler does."""
        super().reset_prefix_cache()
        self._file.write(Kind.RESET_PREFIX_CACHE, encode_ints([self._elapsed()]))

    def _compile(self) -> None:
        """Compile what records, so that no request waits for it."""
        encode_ints([0])
        nothing = padding_batch(1, 0, num_decodes=0, num_logits=0, table_width=1)
        PlanEncoder(create_plan_state(self.config)).encode(nothing)
        chains = self._create_chains(1)
        begin(chains, 0, np.zeros(1, np.int32), np.empty(1, np.int64))
        self._entries(chains, np.zeros(1, np.int32), np.ones(1, np.int32), np.zeros((1, 1), np.int32))

    def _elapsed(self) -> int:
        """Return the microseconds since the last record."""
        now = time.perf_counter_ns() // 1000
        elapsed, self._time = now - self._time, now
        return elapsed

    def _create_chains(self, num_rows: int) -> Chains:
        return create_chains(num_rows, self._piece, self._key, with_text=self._with_text)

    def _find_chain(self, seq: Sequence, row: int, length: int) -> None:
        """Let the row's chain be that of `seq` with `length` tokens of output, wherever it was until now."""
        chains = self._chains
        if not self._has_chain(seq, row) or chains.length[row] != length:
            # It is new, or comes back from being preempted: then it says itself what it knew.
            num_known = len(seq.group.prompt_token_ids) + length
            begin(chains, row, seq.token_ids[:num_known], np.empty(num_known, np.int64))
            chains.length[row] = length
            chains.arrival[row], chains.seq_index[row] = seq.group.arrival, seq.index

    def _has_chain(self, seq: Sequence, row: int) -> bool:
        chains = self._chains
        return bool(chains.arrival[row] == seq.group.arrival and chains.seq_index[row] == seq.index)

    def _length(self, seq: Sequence) -> int:
        """Return how many tokens of output a sequence has; of a beam, perhaps fewer."""
        known = len(seq.token_ids) - len(seq.group.prompt_token_ids)
        if seq.row >= 0 and self._has_chain(seq, seq.row):
            known = max(known, int(self._chains.length[seq.row]))
        return max(known, 0)

    def _entries(
        self,
        chains: Chains,
        rows: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        token_ids: NDArray[np.int32],
    ) -> bytes:
        """Append tokens to chains; return the values of the pieces that they complete."""
        out = np.empty(3 * MAX_BYTES * token_ids.size, np.uint8)  # touched only as far as it is written
        return out[: append_outputs(chains, rows, num_tokens, token_ids, out)].tobytes()

    def _forget_beams(self, group: SequenceGroup) -> None:
        if not group.unfinished:
            self._beam_chains.pop(group.arrival, None)

    def _salt(self, text: str) -> str:
        """Return a name that is the same for the same salt and says nothing of it."""
        if self._with_text:
            return text
        return hashlib.blake2b(text.encode(), key=self._key.tobytes(), digest_size=8).hexdigest()
