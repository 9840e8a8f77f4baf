"""The OpenAI request bodies as msgspec structs, and what they mean in SamplingParams.

Owns parsing and refusing: a bad field is a BodyError that ends with the field's path. Options that a later
version brings pass at their neutral value and are refused otherwise; fields nobody defines are ignored.
"""

import re
from reprlib import repr as shorten
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from cupaged.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams

MAX_MESSAGE = 500  # characters of an error


class BodyError(ValueError):
    """A request that cannot be served: an OpenAI-shaped 400 naming `param`, the path of the bad field."""

    def __init__(self, message: str, param: str | None) -> None:
        self.param = param
        if len(message) > MAX_MESSAGE:  # it may quote a value of any length
            message = message[:MAX_MESSAGE] + "..."
        super().__init__(f"{message} - at `$.{param}`" if param else message)


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    """What completions and chat have in common; null is absent."""

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    best_of: int | None = None

    priority: int | None = None  # lower goes first
    cache_salt: str | None = None  # only requests of the same salt share cached prefixes

    # SamplingParams refuses these at any but their neutral value.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    spaces_between_special_tokens: bool | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """The body of /v1/completions; `prompt` is one text, some texts, token ids, or some lists of them."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def generates(self) -> bool:
        """Return False for echo with max_tokens 0, which wants the prompt alone, perhaps scored."""
        return not (self.echo and self.max_tokens == 0)


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content: text, until a later version reads more."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, kw_only=True):
    """One turn of a chat; a developer speaks as the system does."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it; an assistant's may have no content."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": msgspec.to_builtins(self.content or "")}
        return message if self.name is None else {**message, "name": self.name}


class ChatBody(SamplingBody, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


Body = TypeVar("Body", CompletionBody, ChatBody)

# What later versions bring, with the values that ask for nothing; null always does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "detokenize": (True,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "response_format": ({"type": "text"},),
    "lora_request": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "stream_interval": (1,),
    "vllm_xargs": ({},),
}
_NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "echo": (False,),
    "add_special_tokens": (False,),
}

_PATH = re.compile(r"(.*?)(?: - at `\$\.?([^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")


def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """Parse a request's JSON; BodyError names the field that is wrong."""
    try:
        values = msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.ValidationError:
        raise BodyError("the body must be a JSON object", None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"the body is not valid JSON: {error}", None) from None
    neutral = _NEUTRAL_CHAT if kind is ChatBody else _NEUTRAL_COMPLETION
    for name in neutral.keys() & values.keys():
        value = values[name]
        if value is not None and value not in neutral[name]:
            raise BodyError(f"{name}={shorten(value)} is not supported yet; leave it out", name)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _with_path(str(error)) from None


def completion_params(body: CompletionBody, defaults: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a completion; `defaults` are the model's own."""
    options: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        options["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if not body.generates:
        options["max_tokens"] = 1  # the engine's least; the answer leaves it out
    return _params(body, defaults, options)


def chat_params(body: ChatBody, defaults: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a chat's answer, which may fill the model's window."""
    if body.top_logprobs and not body.logprobs:
        raise BodyError("top_logprobs needs logprobs=true", "top_logprobs")
    options: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    if body.max_completion_tokens is not None:
        options["max_tokens"] = body.max_completion_tokens
    elif body.max_tokens is None:
        options["max_tokens"] = None
    return _params(body, defaults, options)


def salted(prompt: str | list[int], body: SamplingBody) -> dict[str, Any]:
    """Return the prompt as the engine takes it, with the body's salt."""
    name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {name: prompt, "cache_salt": body.cache_salt}


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    if not body.prompt:
        raise BodyError("the list of prompts is empty; give at least one", "prompt")
    kind = type(body.prompt[0])
    for i, item in enumerate(body.prompt):
        if type(item) is not kind:
            raise BodyError("prompts must be all texts or all token ids, not a mixture", f"prompt[{i}]")
    if kind is int:
        return [[item for item in body.prompt if isinstance(item, int)]]
    return [item for item in body.prompt if not isinstance(item, int)]


def blame(error: ValueError, body: SamplingBody, otherwise: str | None) -> BodyError:
    """Return `error` as a BodyError: the engine's messages begin with the field's name, if it is one."""
    if isinstance(error, BodyError):
        return error
    name = re.split(r"\W", str(error), maxsplit=1)[0]
    if name == "max_tokens" and isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        name = "max_completion_tokens"
    return BodyError(str(error), name if name in body.__struct_fields__ else otherwise)


def _params(body: SamplingBody, defaults: dict[str, Any], options: dict[str, Any]) -> SamplingParams:
    """Build SamplingParams from the model's defaults, then the body, then `options`."""
    values = {name: value for name, value in defaults.items() if name != "max_tokens"}
    shared = set(SamplingParams.__dataclass_fields__) & set(SamplingBody.__struct_fields__)
    values |= {name: value for name in shared if (value := getattr(body, name)) is not None}
    values |= options
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    if body.stream and body.prompt_logprobs is not None:
        raise BodyError("prompt_logprobs cannot be streamed; leave out stream", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise BodyError("stream_options needs stream=true", "stream_options")
    try:
        return SamplingParams(**values, output_kind=kind)
    except ValueError as error:
        raise blame(error, body, None) from None


def _with_path(message: str) -> BodyError:
    """Return msgspec's error with its path as `param`; a missing field is part of the path too."""
    match = _PATH.fullmatch(message)
    assert match is not None, message
    path = match[2] or ""
    missing = _MISSING.search(message)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
    return BodyError(match[1], path or None)
