"""Beam searches whose results transformers gave once (tools/make_beam_goldens) and cupaged must give too.

Most run on a table: logits by the last token and the position, so that EOS comes early and often. The others
run on tiny models of tools/make_tiny_model, with some of their likely tokens as EOS.
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

    seed: int  # of the table or of the prompt
    prompt_token_ids: tuple[int, ...]
    beam_width: int
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()  # () = ignored
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    model: str = "table"  # or one of MODELS


BY_HAND = -1


def make_table(seed: int) -> NDArray[np.float32]:
    """Return logits [last token, position % TABLE_PERIOD, next token], the same on every platform."""
    shape = (TABLE_VOCAB, TABLE_PERIOD, TABLE_VOCAB)
    if seed == BY_HAND:
        # Two outputs end within two tokens. The best beam is better than the second of them, and soon is, but
        # would not be at max_tokens, if the search stopped for that; which no random table shows.
        by_hand = np.full(shape, -20, np.float32)
        by_hand -= np.arange(TABLE_VOCAB, dtype=np.float32)
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

# The tokenizer names EOS 4, so that it always is one; a model's config.json names all of them.
_MODEL_EOS = (4, 26, 32, 53, 80, 139, 144, 232)
MODELS: dict[str, dict[str, Any]] = {
    "llama": CHAT | {"eos_token_id": list(_MODEL_EOS)},
    "window": CHAT
    | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 19,
        "eos_token_id": list(_MODEL_EOS),
    },
}


def _model_case(model: str, seed: int) -> BeamCase:
    """Return a case whose prompt ends inside a block or, every fourth, with it."""
    prompt = np.random.Philox(key=seed).random_raw(5 + 9 * (seed % 4)) % np.uint64(CHAT["vocab_size"] - 5) + 5
    return BeamCase(
        seed=seed,
        prompt_token_ids=tuple(prompt.tolist()),
        beam_width=2 + seed % 7,
        max_tokens=(16, 24, 32, 1)[seed // 2 % 4],
        eos_token_ids=() if seed in (4, 9) else _MODEL_EOS,
        length_penalty=_PENALTIES[seed % 5],
        early_stopping=_STOPPINGS[seed % 3],
        temperature=1.7 if seed == 3 else 1.0,
        model=model,
    )


MODEL_CASES = {f"llama_{seed}": _model_case("llama", seed) for seed in (*range(5), *range(6, 12), 18)}
MODEL_CASES |= {f"window_{seed}": _model_case("window", seed) for seed in (1, 3, 5)}
