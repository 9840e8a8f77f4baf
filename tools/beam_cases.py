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


def make_table(seed: int) -> NDArray[np.float32]:
    """Return logits [last token, position % TABLE_PERIOD, next token], the same on every platform."""
    shape = (TABLE_VOCAB, TABLE_PERIOD, TABLE_VOCAB)
    words = np.random.Philox(key=seed).random_raw(int(np.prod(shape)))
    uniform = (words >> np.uint64(40)).astype(np.float32) / np.float32(2**24)  # [0, 1)
    table: NDArray[np.float32] = 3 * uniform.reshape(shape)
    return table


_PENALTIES = (1.0, 0.0, 2.0, -1.0, 0.6)
_STOPPINGS: tuple[bool | Literal["never"], ...] = (False, True, "never")
_EOS = ((3, 8), (13,), (0, 5, 9), (2, 6, 7, 13), ())


def _table_case(seed: int) -> BeamCase:
    """Return a case whose settings meet in ever new ways: the lengths of the lists have no common factor."""
    return BeamCase(
        seed=seed,
        prompt_token_ids=tuple((3 * seed + 5 * i) % TABLE_VOCAB for i in range(1 + seed % 4)),
        beam_width=1 + seed % 8,
        max_tokens=(16, 1, 24, 20, 3, 9, 30)[seed % 7],
        eos_token_ids=_EOS[seed // 3 % 5],
        length_penalty=_PENALTIES[seed % 5],
        early_stopping=_STOPPINGS[seed % 3],
    )


_NEAR_TIES = (39, 45, 62, 87)  # where a choice hangs on float32's rounding
TABLE_CASES = {f"table_{seed}": _table_case(seed) for seed in range(100) if seed not in _NEAR_TIES}

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
