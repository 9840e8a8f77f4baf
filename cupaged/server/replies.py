"""The OpenAI answers as msgspec structs, whole or as chunks of a stream, and how they become bytes.

Owns what completions and chat have in common: usage, errors, log-probabilities that are valid JSON.
"""

from typing import Any, Literal

import msgspec

from cupaged.outputs import Logprob, Logprobs, RequestOutput

MIN_LOGPROB = -9999.0  # stands for -inf, which JSON cannot say

DONE = b"data: [DONE]\n\n"


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Of the tokens of the prompts, those found in the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens counted over all prompts, each once, and all choices of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)

    def add(self, output: RequestOutput) -> None:
        """Count an output; of one request's, only the first one has the prompt."""
        num_prompt = len(output.prompt_token_ids)
        num_completion = sum(len(completion.token_ids) for completion in output.outputs)
        self.prompt_tokens += num_prompt
        self.completion_tokens += num_completion
        self.total_tokens += num_prompt + num_completion
        if num_prompt:
            self.prompt_tokens_details.cached_tokens += output.num_cached_tokens


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong; `param` is the path of the bad field."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, kw_only=True):
    """Any failed request."""

    error: ErrorDetail


def error_reply(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> ErrorReply:
    """Return an error in OpenAI's shape; whose fault it is follows from the HTTP status."""
    kind: Literal["invalid_request_error", "server_error"] = "invalid_request_error"
    if status >= 500:
        kind = "server_error"
    return ErrorReply(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def sse(event: msgspec.Struct) -> bytes:
    """Return `event` as one server-sent event."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def finite(logprob: float) -> float:
    """Return `logprob`, or the floor for -inf and NaN."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def most_likely(entry: Logprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """Return the `num_top` most likely tokens of an entry, which may also hold a less likely chosen one."""
    top = [(token_id, token) for token_id, token in entry.items() if token.rank <= num_top]
    return sorted(top, key=lambda item: item[1].rank)[:num_top]  # ranks may tie


def prompt_logprobs_json(entries: list[Logprobs | None] | None) -> Any:
    """Return prompt log-probabilities by token id, as vLLM's clients know them; unset if there are none."""
    if entries is None:
        return msgspec.UNSET
    return [
        entry
        and {str(i): token._replace(logprob=finite(token.logprob))._asdict() for i, token in entry.items()}
        for entry in entries
    ]
