"""Detokenizer: a sequence's text while its tokens arrive, cut at stop strings.

What it shows is final: never a part of a character, never the beginning of a stop string that may
still complete. Put together, the pieces are what decoding the whole sequence would give.
"""

from codecs import utf_8_decode
from collections.abc import Sequence

from cupaged.engine.tokenizer import REPLACEMENT, Tokenizer

_PROMPT_WINDOW = 8  # tokens of the prompt that give the output its context
_MAX_BEGUN = 3  # bytes of a character that lacks one
_MAX_WINDOW = 16  # tokens decoded again with each new one before the window is cut short


class Detokenizer:
    """The visible text of one output; `append` tokens, then read `text` or `take_delta()`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Stop strings that end within the first `min_tokens` tokens do not count."""
        stream = _ByteStream if tokenizer.joins_bytes else _TextStream
        self._stream = stream(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop = tuple(stop)
        self._includes_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._max_recent = max(map(len, self._stop), default=1) - 1
        # [0, num_recent_shown) of recent is shown, [num_recent_shown, end) held back.
        self._recent = ""
        self._num_recent_shown = 0
        self._taken: list[str] = []
        self._new: list[str] = []
        self.num_tokens = 0  # output tokens that count: up to the one that completed a stop string
        self.stop_string: str | None = None

    def append(self, token_ids: Sequence[int]) -> str | None:
        """Take new tokens; return the stop string that one of them completed (the rest is dropped)."""
        if not self._stop:
            feed = self._stream.feed
            self.num_tokens += len(token_ids)
            self._new += [feed(int(token_id)) for token_id in token_ids]
            return None
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            self._push(self._stream.feed(int(token_id)))
        return self.stop_string

    def finish(self) -> None:
        """Show what was held back; bytes that never became a character are one U+FFFD."""
        if self.stop_string is None:
            self._push(self._stream.flush())
        if self.stop_string is None:
            self._show(len(self._recent))

    @property
    def text(self) -> str:
        """Return all text shown so far."""
        self._taken, self._new = ["".join(self._taken)], ["".join(self._new)]
        return self._taken[0] + self._new[0]

    def take_delta(self) -> str:
        """Return the text shown since the last call."""
        delta = "".join(self._new)
        self._taken.append(delta)
        self._new = []
        return delta

    def _push(self, new: str) -> None:
        if not new:
            return
        begin = len(self._recent)
        self._recent += new
        found = None
        if self.num_tokens > self._min_tokens:
            found = _first_stop(self._recent, self._stop, begin)
        if found is not None:
            start, self.stop_string = found
            self._show(start + len(self.stop_string) if self._includes_stop else start)
            return
        held = 0 if self._includes_stop else _num_held(self._recent, self._stop)
        self._show(len(self._recent) - held)

    def _show(self, end: int) -> None:
        """Show recent[:end]; keep of it what a stop string may have begun in."""
        self._new.append(self._recent[self._num_recent_shown : end])
        drop = max(0, min(end, len(self._recent) - self._max_recent))
        self._recent = self._recent[drop:]
        self._num_recent_shown = end - drop


def _first_stop(text: str, stop: Sequence[str], begin: int) -> tuple[int, str] | None:
    """Return place and name of the stop string that ends first, of those that end behind `begin`.

    If two end at the same character, the longer one: it began first.
    """
    best: tuple[int, int, str] | None = None
    for candidate in stop:
        start = text.find(candidate, max(0, begin - len(candidate) + 1))
        if start >= 0 and (best is None or (start + len(candidate), start) < best[:2]):
            best = start + len(candidate), start, candidate
    return None if best is None else best[1:]


def _num_held(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a stop string."""
    held = 0
    for candidate in stop:
        start = text.find(candidate[0], max(0, len(text) - len(candidate) + 1))
        while start >= 0 and len(text) - start > held:
            if candidate.startswith(text[start:]):
                held = len(text) - start
            start = text.find(candidate[0], start + 1)
    return held


class _ByteStream:
    """Whole characters as tokens arrive that are bytes, the same ones wherever they stand."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skips_special: bool) -> None:
        self._bytes_of = tokenizer.joined_bytes
        self._skipped = tokenizer.special_token_ids if skips_special else frozenset()
        end = b""
        for token_id in reversed(prompt_token_ids):
            if len(end) >= _MAX_BEGUN:
                break
            end = self._bytes(int(token_id)) + end
        self._begun = end[utf_8_decode(end, "replace")[1] :]  # the bytes of a character that lacks some
        # What that is if it stays so: the prompt's own. Only if it becomes a character, this is ours.
        self._prompts = utf_8_decode(self._begun, "replace", True)[0]

    def feed(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        return self._decode(self._begun + self._bytes(token_id))

    def flush(self) -> str:
        """Return what is left: U+FFFD if the tokens end inside a character."""
        return self._decode(self._begun, is_all=True)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._bytes_of(token_id)

    def _decode(self, data: bytes, is_all: bool = False) -> str:
        text, end = utf_8_decode(data, "replace", is_all)
        self._begun = data[end:]
        if text and self._prompts:
            text, self._prompts = text.removeprefix(self._prompts), ""
        return text


class _TextStream:
    """Whole characters as tokens arrive, of any tokenizer.

    A token's text depends on what stands before it, so the new text is the difference between decoding a
    window of the last tokens with and without the new one. Half a character decodes to one U+FFFD at the
    end, which waits for the next token; text before it is final.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skips_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._byte_fallback = tokenizer.byte_fallback()
        self._holds = not self._byte_fallback.is_active  # else it has done so already
        self._window: list[int] = []
        self._shown = ""  # what the window's tokens have shown
        begin, size = len(prompt_token_ids), _PROMPT_WINDOW
        # Further back while the prompt's end shows nothing, for example only special tokens.
        while begin > 0 and not self._shown.strip(REPLACEMENT):
            begin, size = max(0, begin - size), 2 * size
            self._byte_fallback = tokenizer.byte_fallback()
            self._window = [i for token_id in prompt_token_ids[begin:] for i in self._whole(int(token_id))]
            self._shown = self._decode(self._window)
        self._num_whole = len(self._window)  # tokens of the window that end in a whole character

    def feed(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        ids = self._whole(token_id)
        return self._advance(ids, holds=self._holds) if ids else ""

    def flush(self) -> str:
        """Return what is left: U+FFFD if the tokens end inside a character."""
        return self._advance(self._byte_fallback.flush(), holds=False)

    def _whole(self, token_id: int) -> list[int]:
        if self._tokenizer.is_skipped(token_id, self._skips_special):
            return []
        return self._byte_fallback.feed(token_id)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode_window(token_ids, self._skips_special)

    def _advance(self, ids: list[int], *, holds: bool) -> str:
        window = self._window + ids
        text = self._decode(window)
        is_partial = holds and text.endswith(REPLACEMENT)
        end = len(text) - is_partial
        # Only a prompt that ends inside a character is shown differently afterwards: the character is ours.
        begin = len(self._shown) if text.startswith(self._shown) else len(self._shown) - 1
        self._window = window
        if end <= begin:
            return ""
        self._shown = text[:end]
        if len(window) > _MAX_WINDOW:
            self._window = window[self._num_whole :]
            tail = self._decode(self._window)
            self._shown = tail[: len(tail) - is_partial]
        # The U+FFFD that waits began with the last token: what was before it is known by now.
        self._num_whole = len(self._window) - (len(ids) if is_partial else 0)
        return text[begin:end]
