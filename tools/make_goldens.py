"""Write tests/models/goldens/*.npz: what Hugging Face transformers computes for the tiny models.

    PYTHON -m tools.make_goldens [CASE ...]

PYTHON is one of an environment of its own with torch and transformers; nothing of cupaged is imported. Each
file holds the tokens of a prompt and of its greedy continuation, and the logits at every position: float32,
eager attention, use_cache=False, so that every step recomputes everything.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tools.make_tiny_model import CASES, LLAMA, ROPES, write_tiny_model

GOLDENS = Path(__file__).parent.parent / "tests" / "models" / "goldens"
NUM_PROMPT, NUM_OUTPUT = 56, 16  # tokens; together 72, three times the original length of the rope cases
ROPE_POSITIONS = (0, 1, 97, 8191, 20000)
NUM_SHORT = 24  # positions of the first few tokens alone, which dynamic rope treats apart


def make_golden(case: str) -> None:
    """Run one case, save its arrays and print how well they serve."""
    config = CASES[case]
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory), config)
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
    tokens = np.random.Generator(np.random.PCG64(1)).integers(5, config["vocab_size"], NUM_PROMPT).tolist()
    short_logits = _logits(model, tokens[:NUM_SHORT])
    # Dynamic rope keeps the base of the longest input so far: from here on that of all positions.
    _logits(model, [0] * (NUM_PROMPT + NUM_OUTPUT))
    for _ in range(NUM_OUTPUT):
        tokens.append(int(_logits(model, tokens)[-1].argmax()))
    logits = _logits(model, tokens)
    top2 = np.sort(logits, axis=1)[:, -2:]
    path = GOLDENS / f"{case}.npz"
    np.savez_compressed(
        path,
        tokens=np.array(tokens, np.int32),
        num_prompt=NUM_PROMPT,
        logits=logits,
        short_logits=short_logits,
    )
    gap = (top2[NUM_PROMPT - 1 : -1, 1] - top2[NUM_PROMPT - 1 : -1, 0]).min()
    print(f"{case:20} {path.stat().st_size:7} bytes  std of logits {logits.std():.2f}  least gap {gap:.1e}")


def make_rope_golden() -> None:
    """Save frequencies, and cosines and sines far out, of ROPES."""
    arrays: dict[str, Any] = {"positions": np.array(ROPE_POSITIONS)}
    for name, config in ROPES.items():
        rope = LlamaRotaryEmbedding(LlamaConfig(**LLAMA | config))
        cos, sin = rope(torch.zeros(1), torch.tensor([ROPE_POSITIONS]))
        half = config["head_dim"] // 2
        arrays[f"{name}_inv_freq"] = rope.inv_freq.numpy()
        arrays[f"{name}_cos_sin"] = np.concatenate((cos[0, :, :half], sin[0, :, :half]), axis=1)
    np.savez_compressed(GOLDENS / "rope.npz", **arrays)


def _logits(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    """Return float32[len(tokens), vocab_size]."""
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return logits


def main() -> None:
    """Make the goldens that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    GOLDENS.mkdir(parents=True, exist_ok=True)
    make_rope_golden()
    for case in parser.parse_args().cases:
        make_golden(case)


if __name__ == "__main__":
    main()
