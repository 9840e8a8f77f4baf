"""Small tokenizers of the kinds that models use, trained here on a few sentences."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = (
    "Paris is the capital of France, and Rome is the capital of Italy.",
    "The alphabet: A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    "The alphabet again: ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "Once upon a time there was a small engine that read books.",
    "Prices: 3.14, 2.72, 10007; naïve café, señor, ďábel.",
)
SPECIAL = ["<unk>", "<s>", "</s>"]


@cache
def byte_level() -> Tokenizer:
    """Return a byte-level BPE as GPT-2, Llama 3 and Qwen have it: any byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Return a BPE as Llama 2 and Mistral have it: "▁" is a space, unknown characters are <0x..> tokens."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL + byte_tokens, show_progress=False)
    trained.train_from_iterator(SENTENCES, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


@cache
def byte_level_in_sequence() -> Tokenizer:
    """Return a byte-level BPE whose decoder may do more than join bytes, for all that one can see."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_level_in_sequence": byte_level_in_sequence,
}


def write_directory(path: Path, backend: Tokenizer, **config: Any) -> Path:
    """Write what a checkpoint has of a tokenizer; `config` is tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(names | config), encoding="utf-8")
    return path
