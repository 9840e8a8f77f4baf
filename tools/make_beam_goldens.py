"""Write tests/engine/goldens/beam_search.json: what transformers' beam search gives for tools/beam_cases.

    PYTHON -m tools.make_beam_goldens

PYTHON is one of an environment of its own with torch and transformers; nothing of cupaged is imported. The
file holds by case the outputs, best first, without the prompt, and their scores (one beam is greedy search,
which has none), and how near a tie the search came: near enough for rounding to decide is refused.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from tools.beam_cases import (
    GOLDENS,
    MODEL_CASES,
    MODELS,
    TABLE_CASES,
    TABLE_PERIOD,
    TABLE_VOCAB,
    BeamCase,
    make_table,
)
from tools.beam_reference import Logprobs, Reference, log_softmax
from tools.make_tiny_model import write_tiny_model


class Table(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Logits by the last token and the position."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, config: PretrainedConfig) -> None:
        """Begin with an empty table."""
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.zeros(TABLE_VOCAB, TABLE_PERIOD, TABLE_VOCAB))
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        """Return the logits at every position of [batch, length]."""
        positions = torch.arange(input_ids.shape[1]) % TABLE_PERIOD
        return CausalLMOutput(logits=self.table[input_ids, positions])


def search(model: Any, case: BeamCase) -> dict[str, Any]:
    """Return transformers' outputs and scores."""
    model.generation_config = GenerationConfig(
        num_beams=case.beam_width,
        num_return_sequences=case.beam_width,
        max_new_tokens=case.max_tokens,
        eos_token_id=list(case.eos_token_ids) or None,
        pad_token_id=0,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        do_sample=False,
        use_cache=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    prompt = torch.tensor([case.prompt_token_ids])
    with torch.no_grad():
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt))
    outputs = found.sequences[:, prompt.shape[1] :].tolist()
    if case.beam_width == 1:
        return {"token_ids": outputs, "scores": []}
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()  # behind them is padding
    token_ids = [output[:length] for output, length in zip(outputs, lengths, strict=True)]
    return {"token_ids": token_ids, "scores": found.sequences_scores.tolist()}


def least_gap(model: Any, case: BeamCase) -> float:
    """Return how near a tie the search comes, as a share of the values."""

    def logprobs_after(output: tuple[int, ...]) -> Logprobs:
        with torch.no_grad():
            logits = model(torch.tensor([[*case.prompt_token_ids, *output]]), use_cache=False).logits
        return log_softmax(logits[0, -1].numpy())

    return Reference(logprobs_after, case).least_gap


def load(case: BeamCase) -> Any:
    """Return the case's model."""
    if case.model == "table":
        table = Table(PretrainedConfig(vocab_size=TABLE_VOCAB))
        table.table.data = torch.from_numpy(make_table(case.seed))
        return table
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory), MODELS[case.model])
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
    model.lm_head.weight.data /= case.temperature
    return model


def main() -> None:
    """Run all cases and write the file."""
    lines = []
    for name, case in (TABLE_CASES | MODEL_CASES).items():
        model = load(case)
        gap, limit = least_gap(model, case), 1e-5 if case.model == "table" else 1e-4
        if gap < limit:
            raise ValueError(f"{name} comes within {gap:.1e} of a tie, least is {limit}; take another seed")
        lines.append(f"{json.dumps(name)}: {json.dumps(search(model, case) | {'least_gap': gap})}")
    GOLDENS.parent.mkdir(parents=True, exist_ok=True)
    GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{GOLDENS.stat().st_size} bytes, {len(lines)} cases")


if __name__ == "__main__":
    main()
