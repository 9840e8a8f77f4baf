"""Tokenizer: text to token ids and back, as the checkpoint's tokenizer.json says.

Owns the special tokens and the chat template. Decoding here is of whole sequences; detokenizer.py
does the same text piece by piece.
"""

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel

from cupaged.engine.chat_template import ChatTemplate, Message

REPLACEMENT = "\ufffd"  # stands for bytes that are no UTF-8


class Tokenizer:
    """A checkpoint's tokenizer with its special tokens and chat template."""

    def __init__(self, backend: Backend, config: Mapping[str, Any], templates: Mapping[str, str]) -> None:
        """Take tokenizer.json loaded, tokenizer_config.json read, and chat templates by name."""
        self._backend = backend
        special = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
        self._special_tokens = {key: text for key, text in special.items() if text is not None}
        self._chat_template = ChatTemplate(templates, self._special_tokens)
        self.vocab_size: int = backend.get_vocab_size()
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_token_ids = frozenset(added)
        self._adds_bos: bool | None = config.get("add_bos_token")
        self._adds_eos: bool | None = config.get("add_eos_token")
        # Whether tokens are byte-level or bytes fall back to <0x..> is asked of the decoder, not its name.
        self._is_byte_level = self._decodes("Ġ", " ")
        # Whether a text is its tokens' bytes, one after the other, and nothing else.
        self.joins_bytes = isinstance(backend.decoder, ByteLevel)
        self._joined_bytes: dict[int, bytes] = {}
        self._byte_token_ids = self._find_byte_tokens() if self._decodes("<0x41>", "A") else ()
        self._byte_of = {token_id: byte for byte, token_id in enumerate(self._byte_token_ids)}
        self._anchor = backend.encode("a", add_special_tokens=False).ids
        self._token_texts: dict[int, str] = {}

    @classmethod
    def from_directory(cls, path: Path, chat_template: str | None = None) -> "Tokenizer":
        """Load from a checkpoint's directory; `chat_template` is a file or a text that replaces its own."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{path} has no tokenizer.json; save the tokenizer in the fast format "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...)) or name another directory"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the tokenizers package raises nothing narrower
            raise ValueError(f"{file} is no tokenizer: {error}") from error
        config = _read_json(path / "special_tokens_map.json") | _read_json(path / "tokenizer_config.json")
        if chat_template is not None:
            return cls(backend, config, {"default": _template_text(chat_template)})
        return cls(backend, config, _read_templates(path, config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, by default with the BOS (or EOS) that the checkpoint adds."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            bad = f"{text[error.start]!r} at character {error.start}"
            raise ValueError(f"the text has half a surrogate pair, {bad}; remove it") from None
        states_its_own = self._adds_bos is not None or self._adds_eos is not None
        by_backend = add_special_tokens and not states_its_own
        ids: list[int] = self._backend.encode(text, add_special_tokens=by_backend).ids
        if add_special_tokens and states_its_own:
            if self._adds_bos and self.bos_token_id is not None:
                ids.insert(0, self.bos_token_id)
            if self._adds_eos and self.eos_token_id is not None:
                ids.append(self.eos_token_id)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        ids = [int(token_id) for token_id in token_ids]
        if self._byte_of:
            valid = self.byte_fallback()
            shown = [token_id for token_id in ids if not self.is_skipped(token_id, skip_special_tokens)]
            ids = [i for token_id in shown for i in valid.feed(token_id)] + valid.flush()
        return self.decode_window(ids, skip_special_tokens)

    def is_skipped(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Return whether decoding leaves the token out: special, or a padding row of the vocabulary."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return True
        return self._backend.id_to_token(token_id) is None

    def decode_window(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Decode as the tokenizers package does: byte-fallback runs must be valid UTF-8 already."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def byte_fallback(self) -> "ByteFallback":
        """Return a new filter for the ids of one sequence."""
        return ByteFallback(self._byte_token_ids, self._byte_of)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token as it stands inside a text, for logprobs; U+FFFD for partial bytes."""
        if token_id not in self._token_texts:
            # Behind another token, because decoders strip the space that begins a text.
            anchored = self.decode([*self._anchor, token_id], skip_special_tokens=False)
            begin = self.decode(self._anchor, skip_special_tokens=False)
            self._token_texts[token_id] = anchored[len(begin) :]
        return self._token_texts[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, also where they are a part of a character."""
        if token_id in self._byte_of:
            return bytes([self._byte_of[token_id]])
        token = self._backend.id_to_token(token_id)
        if self._is_byte_level and token is not None and token_id not in self._added_token_ids:
            return _bytes_of(token)
        return self.token_text(token_id).encode()

    def joined_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to the bytes of a text, where these are joined."""
        found = self._joined_bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) or ""
            is_plain = _BYTE_OF_CHARACTER.keys() >= set(token)  # an added token may be any text
            found = _bytes_of(token) if is_plain else token.encode()
            self._joined_bytes[token_id] = found
        return found

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the prompt text of a chat, see ChatTemplate.render; encode it without special tokens."""
        return self._chat_template.render(messages, **options)

    def _special_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _decodes(self, token: str, text: str) -> bool:
        token_id = self._backend.token_to_id(token)
        return token_id is not None and self._backend.decode([token_id]) == text

    def _find_byte_tokens(self) -> tuple[int, ...]:
        ids = [self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        return tuple(i for i in ids if i is not None) if None not in ids else ()


class ByteFallback:
    """Lets byte tokens (<0x00> to <0xFF>) through as whole UTF-8 characters, invalid ones as U+FFFD's bytes.

    The tokenizers package turns a whole run of byte tokens into U+FFFD if any of it is invalid, also what
    was valid text a token ago; behind this filter text that has been shown stays as it was.
    """

    def __init__(self, token_ids: Sequence[int], byte_of: Mapping[int, int]) -> None:
        self._token_ids = token_ids
        self._byte_of = byte_of
        self.is_active = bool(byte_of)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> list[int]:
        """Return the ids that `token_id` completes: none inside a character."""
        byte = self._byte_of.get(token_id)
        if byte is None:
            return [*self.flush(), token_id]
        return self._to_ids(self._decoder.decode(bytes((byte,))))

    def flush(self) -> list[int]:
        """Return the ids of U+FFFD if a character was begun, else none."""
        return self._to_ids(self._decoder.decode(b"", final=True))

    def _to_ids(self, text: str) -> list[int]:
        return [self._token_ids[byte] for byte in text.encode()]


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()


def _bytes_of(token: str) -> bytes:
    """Return the bytes that a byte-level token's characters stand for."""
    return bytes(_BYTE_OF_CHARACTER[character] for character in token)


def _content(token: Any) -> str | None:
    """Return the text of a special token, which configs write as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return value


def _template_text(file_or_text: str) -> str:
    if "{" in file_or_text:  # no file name of a template has one, every template does
        return file_or_text
    file = Path(file_or_text)
    if not file.is_file():
        raise ValueError(f"chat_template {file_or_text!r} is neither a file nor a Jinja template")
    return file.read_text(encoding="utf-8")


def _read_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collect templates by name; of two places, the one that transformers prefers."""
    templates: dict[str, str] = {}
    for source in (config, _read_json(path / "chat_template.json")):
        value = source.get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates |= {entry["name"]: entry["template"] for entry in value}
    if (path / "chat_template.jinja").is_file():
        templates["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates
