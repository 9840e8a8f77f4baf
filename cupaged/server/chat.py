"""/v1/chat/completions: how messages become a prompt and what the answers look like."""

from dataclasses import dataclass
from typing import Any

import msgspec

from cupaged.engine.tokenizer import Tokenizer
from cupaged.outputs import CompletionOutput, Logprob, RequestOutput
from cupaged.server.protocol import BodyError, ChatBody
from cupaged.server.replies import Usage, finite, most_likely, prompt_logprobs_json


class TopLogprob(msgspec.Struct, kw_only=True):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """One entry for each token of the answer."""

    content: list[TokenLogprob]


class AssistantMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer, or what is new of it; the role comes with its beginning."""

    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """What is new of one answer."""

    index: int
    delta: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The body of a reply: an answer, or a chunk of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: Any = msgspec.UNSET


# What the body says elsewhere, or may not say yet.
_RESERVED = (
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
)


def chat_prompt(body: ChatBody, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of the conversation; ValueError if the template refuses it."""
    variables = body.chat_template_kwargs or {}
    for name in _RESERVED:
        if name in variables:
            raise BodyError(f"chat_template_kwargs cannot set {name}", f"chat_template_kwargs.{name}")
    for i, message in enumerate(body.messages):
        if message.tool_calls:
            raise BodyError("tool_calls is not supported yet; leave it out", f"messages[{i}].tool_calls")
        if message.content is None and message.role != "assistant":
            raise BodyError(f"a message of role {message.role} needs content", f"messages[{i}].content")
    text = tokenizer.render_chat(
        [message.for_template() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        **variables,
    )
    return tokenizer.encode(text, add_special_tokens=False)


@dataclass(kw_only=True)
class ChatFormat:
    """Turns the outputs of one request to /v1/chat/completions into its answers."""

    body: ChatBody
    id: str
    created: int
    model: str
    tokenizer: Tokenizer

    @property
    def generates(self) -> bool:
        """Return True: a chat is there to be answered."""
        return True

    def whole(self, choices: list[RequestOutput], usage: Usage) -> ChatCompletion:
        """Return the answer to a request that is not streamed."""
        answers = [
            ChatChoice(
                index=i,
                message=AssistantMessage(role="assistant", content=output.outputs[0].text),
                logprobs=self._logprobs(output.outputs[0]),
                finish_reason=output.outputs[0].finish_reason,
                stop_reason=output.outputs[0].stop_reason,
            )
            for i, output in enumerate(choices)
        ]
        reply = self._reply("chat.completion", answers, usage)
        if self.body.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs_json(choices[0].prompt_logprobs)
        return reply

    def chunk(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | msgspec.UnsetType
    ) -> ChatCompletion:
        """Return the chunk that carries what is new of choice `index`."""
        delta = output.outputs[0]
        choice = ChatChunkChoice(
            index=index,
            delta=AssistantMessage(role="assistant" if is_first else None, content=delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        return self._reply("chat.completion.chunk", [choice], usage)

    def usage_chunk(self, usage: Usage) -> ChatCompletion:
        """Return the last chunk of a stream with include_usage."""
        return self._reply("chat.completion.chunk", [], usage)

    def _reply(
        self, kind: str, choices: list[ChatChoice] | list[ChatChunkChoice], usage: Usage | msgspec.UnsetType
    ) -> ChatCompletion:
        return ChatCompletion(
            id=self.id, object=kind, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _logprobs(self, part: CompletionOutput) -> ChatLogprobs | None:
        if part.logprobs is None:
            return None
        content = []
        for token_id, entry in zip(part.token_ids, part.logprobs, strict=True):
            top = [
                TopLogprob(**self._token(i, token))
                for i, token in most_likely(entry, self.body.top_logprobs or 0)
            ]
            content.append(TokenLogprob(**self._token(token_id, entry[token_id]), top_logprobs=top))
        return ChatLogprobs(content=content)

    def _token(self, token_id: int, token: Logprob) -> dict[str, Any]:
        return {
            "token": token.decoded_token,
            "logprob": finite(token.logprob),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }
