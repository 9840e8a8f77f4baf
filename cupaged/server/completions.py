"""/v1/completions: what its answers look like."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from cupaged.engine.detokenizer import Detokenizer
from cupaged.engine.tokenizer import Tokenizer
from cupaged.outputs import Logprobs, RequestOutput
from cupaged.server.protocol import CompletionBody
from cupaged.server.replies import Usage, finite, most_likely, prompt_logprobs_json


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Four lists with an entry for each token of the text; the first token of a prompt has none, so null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters into the choice's text


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: Any = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The body of an answer or of a chunk; both are called text_completion."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET


@dataclass
class _Ruler:
    """Tells where in a text its tokens begin; one inside a character begins where the character does."""

    detokenizer: Detokenizer
    position: int = 0  # characters so far

    def measure(self, token_ids: list[int]) -> list[int]:
        """Return where each of the next tokens begins."""
        begins = []
        for token_id in token_ids:
            begins.append(self.position)
            self.detokenizer.append([token_id])
            self.position += len(self.detokenizer.take_delta())
        return begins


@dataclass(kw_only=True)
class CompletionFormat:
    """Turns the outputs of one request to /v1/completions into its answers."""

    body: CompletionBody
    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    rulers: dict[int, _Ruler] = field(default_factory=dict)  # by choice; each measures what is generated

    @property
    def generates(self) -> bool:
        """Return whether there is more to show than the prompt."""
        return self.body.generates

    def whole(self, choices: list[RequestOutput], usage: Usage) -> Completion:
        """Return the answer to a request that is not streamed."""
        shown = [self._choice(i, output, is_first=True) for i, output in enumerate(choices)]
        for choice, output in zip(shown, choices, strict=True):
            if self.body.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
        return self._reply(shown, usage)

    def chunk(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | msgspec.UnsetType
    ) -> Completion:
        """Return the chunk that carries what is new of choice `index`."""
        return self._reply([self._choice(index, output, is_first=is_first)], usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        """Return the last chunk of a stream with include_usage."""
        return self._reply([], usage)

    def _reply(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _choice(self, index: int, output: RequestOutput, *, is_first: bool) -> CompletionChoice:
        part = output.outputs[0]
        echo = bool(self.body.echo) and is_first
        ids: list[int] = part.token_ids
        entries: list[Logprobs | None] = list(part.logprobs or ())
        if echo and self.body.logprobs is not None:
            ids, entries = output.prompt_token_ids + ids, [*(output.prompt_logprobs or ()), *entries]
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = self._logprobs(ids, entries, self._offsets(index, output, echo=echo))
        return CompletionChoice(
            index=index,
            text=self._prompt_text(output) + part.text if echo else part.text,
            logprobs=logprobs,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _offsets(self, index: int, output: RequestOutput, *, echo: bool) -> list[int]:
        """Return where each token begins, going on where the last chunk of choice `index` ended."""
        prompt_ids, begins = output.prompt_token_ids, list[int]()
        if index not in self.rulers:
            skips = self.body.skip_special_tokens is not False
            detokenizer = Detokenizer(self.tokenizer, prompt_ids, skip_special_tokens=skips)
            self.rulers[index] = _Ruler(detokenizer)
            if echo:
                begins = self._prompt_offsets(output)
                self.rulers[index].position = len(self._prompt_text(output))
        return begins + self.rulers[index].measure(output.outputs[0].token_ids)

    def _prompt_offsets(self, output: RequestOutput) -> list[int]:
        ids, text = output.prompt_token_ids, self._prompt_text(output)
        # The BOS that the tokenizer adds is no part of the text that the user wrote.
        first = self.tokenizer.token_text(ids[0])
        is_added = ids[0] == self.tokenizer.bos_token_id and not text.startswith(first)
        ruler = _Ruler(Detokenizer(self.tokenizer, (), skip_special_tokens=False))
        return [0] * is_added + ruler.measure(ids[is_added:])

    def _logprobs(
        self, ids: list[int], entries: list[Logprobs | None], offsets: list[int]
    ) -> CompletionLogprobs:
        """Return the four lists for tokens `ids`."""
        result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=offsets)
        for token_id, entry in zip(ids, entries, strict=True):
            text = self.tokenizer.token_text(token_id) if entry is None else entry[token_id].decoded_token
            result.tokens.append(text)
            result.token_logprobs.append(None if entry is None else finite(entry[token_id].logprob))
            result.top_logprobs.append(None if entry is None else self._top(token_id, entry))
        return result

    def _top(self, token_id: int, entry: Logprobs) -> dict[str, float]:
        """Return the most likely tokens by text, always with the chosen one; of equal texts the likelier."""
        top: dict[str, float] = {}
        for _, token in [*most_likely(entry, self.body.logprobs or 0), (token_id, entry[token_id])]:
            top.setdefault(token.decoded_token, finite(token.logprob))
        return top
