"""Beam searches whose results transformers gave once (tools/make_beam_goldens) and cupaged must give too.

Half of them run on a table: logits by the last token and the position, so that EOS comes early and often. The
others run on the tiny llama of tools/make_tiny_model, with some of its likely tokens as EOS.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tools.make_tiny_model import CHAT

GOLDENS = Path(__file__).parent.parent / "tests" / "engine" / "goldens" / "beam_search.json"

TABLE_VOCAB = 14
TABLE_PERIOD = 7  # positions after which the table repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamCase:
    """One search."""

    seed: int  # of the table or of the llama's prompt
    prompt_token_ids: tuple[int, ...]
    beam_width: int
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()  # () = ignored
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0


BY_HAND = -1


def make_table(seed: int) -> NDArray[np.float32]:
    """Return logits [last token, position % TABLE_PERIOD, next token], the same on every platform."""
    shape = (TABLE_VOCAB, TABLE_PERIOD, TABLE_VOCAB)
    if seed == BY_HAND:
        # Two outputs end within two tokens. The best beam is better than the second of them, and soon is, but
        # would not be at max_tokens, if the search stopped for that; which no random table shows.
        by_hand = np.full(shape, -20, np.float32) - np.arange(TABLE_VOCAB, dtype=np.float32)
        by_hand[1, 0, :3] = np.log((0.37, 0.55, 0.08))
        by_hand[1, 1, :2] = np.log((0.07, 0.93))
        by_hand[1, 2, :2] = np.log((0.25, 0.75))
        by_hand[2, 1, :4] = np.log((0.25, 0.26, 0.24, 0.25))
        return by_hand
    words = np.random.Philox(key=seed).random_raw(int(np.prod(shape)))
    uniform = (words >> np.uint64(40)).astype(np.float32) / np.float32(2**24)  # [0, 1)
    table: NDArray[np.float32] = 3 * uniform.reshape(shape)
    return table


_PENALTIES = (1.0, 0.0, 2.0, -1.0, 0.6)
_STOPPINGS: tuple[bool | Literal["never"], ...] = (False, True, "never")
_EOS = ((3, 8), (13,), (0, 5, 9), (2, 6, 7, 13), ())


_LENGTHS = (1, 2, 3, 9, 16, 20, 24, 30)


def _table_case(seed: int) -> BeamCase:
    """Return a case whose settings are drawn."""
    draws = (int(word >> 32) for word in np.random.Philox(key=1000 + seed).random_raw(9).tolist())
    return BeamCase(
        seed=seed,
        beam_width=1 + next(draws) % 8,
        max_tokens=_LENGTHS[next(draws) % len(_LENGTHS)],
        eos_token_ids=_EOS[next(draws) % len(_EOS)],
        length_penalty=_PENALTIES[next(draws) % len(_PENALTIES)],
        early_stopping=_STOPPINGS[next(draws) % len(_STOPPINGS)],
        prompt_token_ids=tuple(draw % TABLE_VOCAB for draw in draws),
    )


HAND_CASE = BeamCase(
    seed=BY_HAND,
    prompt_token_ids=(1,),
    beam_width=2,
    max_tokens=12,
    eos_token_ids=(0,),
    length_penalty=-1.0,
    early_stopping="never",
)
_NEAR_TIES = (30, 32, 38, 56, 58, 65)  # a choice hangs on float32's rounding
# early_stopping False and "never" differ, which is rare.
_SEEDS = [*(seed for seed in range(90) if seed not in _NEAR_TIES), 142, 210, 219, 245, 273, 320]
TABLE_CASES = {f"table_{seed}": _table_case(seed) for seed in _SEEDS} | {"by_hand": HAND_CASE}

# The llama's tokenizer names EOS 4, so that it always is one; the config of a case names all of them.
LLAMA_EOS = (4, 31, 77, 150, 201)


def _llama_case(seed: int) -> BeamCase:
    prompt = np.random.Philox(key=seed).random_raw(5 + 9 * (seed % 4)) % np.uint64(CHAT["vocab_size"] - 5) + 5
    return BeamCase(
        seed=seed,
        prompt_token_ids=tuple(prompt.tolist()),
        beam_width=2 + seed % 7,
        max_tokens=(16, 9, 24, 1)[seed % 4],
        eos_token_ids=LLAMA_EOS if seed % 5 else (),
        length_penalty=_PENALTIES[seed % 5],
        early_stopping=_STOPPINGS[seed % 3],
        temperature=1.7 if seed == 6 else 1.0,
    )


LLAMA_CASES = {f"llama_{seed}": _llama_case(seed) for seed in range(12)}


def llama_config() -> dict[str, Any]:
    """Return the config.json of the cases' llama."""
    return CHAT | {"eos_token_id": list(LLAMA_EOS)}
