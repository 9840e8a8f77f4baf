"""ChatTemplate: from a list of messages to the model's own prompt text, by its Jinja template.

The environment is transformers' one (sandbox, whitespace rules, extensions, globals), because that
is what template authors test against. Knows nothing about tokens.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]  # role and content, OpenAI's shape

# What Python raises when a template adds None to a string, indexes past an end, recurses for ever, ...
_RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
# The space tells whether the template strips the message it prints.
_CONTINUE_MARK = "<cupaged: continue here> "


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training; here it only prints them."""

    tags = {"generation"}  # noqa: RUF012  the base class declares a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The named chat templates of one model; `render` picks one."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Take sources by name and what `bos_token` and its like stand for in them."""
        self._sources = templates
        self._special_tokens = special_tokens
        self._compiled: dict[str, tuple[Template, bool]] = {}
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt; `chat_template` is a name or a template's text. ValueError says what failed."""
        if not messages:
            raise ValueError("messages is empty; a chat needs at least one message")
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message goes on with the last message but add_generation_prompt begins a new "
                "one; set add_generation_prompt=False"
            )
        source = self._source(chat_template, has_tools=bool(tools))
        try:
            template, takes_parts = self._compile(source)
            if not takes_parts:
                messages = [_flatten(message) for message in messages]
            if continue_final_message:
                messages = [*messages[:-1], _mark_end(messages[-1])]
            text = template.render(
                **self._special_tokens,
                messages=messages,
                tools=tools,
                documents=variables.pop("documents", None),
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except _RENDER_ERRORS as error:
            raise ValueError(f"chat template: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _source(self, chat_template: str | None, *, has_tools: bool) -> str:
        sources = self._sources
        if chat_template is not None:
            return sources.get(chat_template, chat_template)
        if has_tools and "tool_use" in sources:
            return sources["tool_use"]
        if "default" in sources:
            return sources["default"]
        if sources:
            raise ValueError(
                f"the model has chat templates {sorted(sources)} but no 'default'; name one in chat_template"
            )
        raise ValueError(
            "the model has no chat template; give one in chat_template, or complete a plain prompt instead"
        )

    def _compile(self, source: str) -> tuple[Template, bool]:
        if source in self._compiled:
            return self._compiled[source]
        compiled = self._environment.from_string(source), _takes_parts(self._environment.parse(source))
        if source in self._sources.values():  # a request's own template is not kept
            self._compiled[source] = compiled
        return compiled


def _takes_parts(tree: nodes.Template) -> bool:
    """Return whether the template loops over a message's content, so that it understands a list of parts."""
    aliases = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node)
    }
    return any(
        _is_content(node.iter) or (isinstance(node.iter, nodes.Name) and node.iter.name in aliases)
        for node in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and bool(node.arg.value == "content")
    )


def _flatten(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"content part {kind!r} is not text, and this model reads text only")
        if not isinstance(part.get("text"), str):
            raise ValueError("content part of type 'text' has no text")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def _mark_end(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_MARK}
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        last = {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}
        return {**message, "content": [*content[:-1], last]}
    raise ValueError("continue_final_message needs a last message that ends in text")


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_CONTINUE_MARK.rstrip())
    if end < 0:
        raise ValueError("continue_final_message: the chat template does not print the last message")
    # A template that strips messages would have stripped this one's own trailing space as well.
    return text[:end] if text.startswith(_CONTINUE_MARK, end) else text[:end].rstrip()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML, which a model never saw in training.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
