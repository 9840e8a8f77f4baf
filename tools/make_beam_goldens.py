"""Write tests/engine/goldens/beam_search.json: what transformers' beam search gives for tools/beam_cases.

    PYTHON -m tools.make_beam_goldens

PYTHON is one of an environment of its own with torch and transformers; nothing of cupaged is imported. The
file holds by case the outputs, best first, without the prompt, and their scores (one beam is greedy search,
which has none).
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
    LLAMA_CASES,
    TABLE_CASES,
    TABLE_PERIOD,
    TABLE_VOCAB,
    BeamCase,
    llama_config,
    make_table,
)
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


def main() -> None:
    """Run all cases and write the file."""
    goldens = {}
    table = Table(PretrainedConfig(vocab_size=TABLE_VOCAB))
    for name, case in TABLE_CASES.items():
        table.table.data = torch.from_numpy(make_table(case.seed))
        goldens[name] = search(table, case)
    for name, case in LLAMA_CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            write_tiny_model(Path(directory), llama_config())
            llama = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager"
            )
        llama.lm_head.weight.data /= case.temperature
        goldens[name] = search(llama, case)
    GOLDENS.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(golden)}" for name, golden in goldens.items()]
    GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{GOLDENS.stat().st_size} bytes, {len(goldens)} cases")


if __name__ == "__main__":
    main()
