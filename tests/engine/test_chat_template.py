from datetime import datetime
from typing import Any

import pytest

from cupaged.engine.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages, **options)


def test_generation_prompt_is_added_by_default_and_left_out_on_demand() -> None:
    assert render(CHATML) == "<|user|>Hi<|end|>\n<|assistant|>"
    assert render(CHATML, add_generation_prompt=False) == "<|user|>Hi<|end|>\n"


def test_block_tags_leave_no_newline_and_no_indentation() -> None:
    assert render("{% if true %}\n    {% set x = 1 %}\nA\n  {% endif %}\nB") == "A\nB"


def test_loop_controls_work() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_generation_tag_prints_what_it_encloses() -> None:
    assert render("{% generation %}{{ messages[0].content }}!{% endgeneration %}.") == "Hi!."


def test_tojson_escapes_neither_for_html_nor_to_ascii() -> None:
    message = {"role": "user", "content": {"b": "é<&>'", "a": 1}}

    assert render("{{ messages[0].content | tojson }}", [message]) == '{"b": "é<&>\'", "a": 1}'


def test_tojson_takes_an_indentation() -> None:
    assert render("{{ messages[0] | tojson(indent=1) }}") == '{\n "role": "user",\n "content": "Hi"\n}'


def test_strftime_now_gives_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year + n) for n in (-1, 0)}


def test_keyword_arguments_reach_the_template() -> None:
    source = "{{ enable_thinking }} {{ documents[0] }} {{ tools[0].name }}"

    assert render(source, enable_thinking=False, documents=["doc"], tools=[{"name": "f"}]) == "False doc f"


def test_absent_tools_and_documents_are_none() -> None:
    assert render("{{ tools is none and documents is none }}") == "True"


def test_raise_exception_is_a_value_error_with_its_message() -> None:
    with pytest.raises(ValueError, match="chat template: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ nothing.there }}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
        "{{ [][3].x }}",
        "{{ 'a' | nofilter }}",
    ],
)
def test_any_failure_inside_a_template_is_a_value_error(source: str) -> None:
    with pytest.raises(ValueError, match="chat template: "):
        render(source)


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"])
def test_sandbox_lets_nothing_be_changed_or_reached(source: str) -> None:
    with pytest.raises(ValueError, match="chat template: "):
        render(source)


def test_no_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="messages is empty"):
        render(CHATML, [])


def test_text_parts_become_one_string_where_the_template_wants_one() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    assert "one\ntwo<|end|>" in render(CHATML, [{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for part in messages[0]['content'] %}[{{ part.text }}]{% endfor %}",
        "{% set c = messages[0].content %}{% for part in c %}[{{ part.text }}]{% endfor %}",
    ],
)
def test_parts_stay_parts_where_the_template_loops_over_them(source: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    assert render(source, [{"role": "user", "content": parts}]) == "[one][two]"


def test_part_that_is_no_text_is_refused_by_its_type() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]

    with pytest.raises(ValueError, match="content part 'image_url' is not text"):
        render(CHATML, [{"role": "user", "content": parts}])


def test_text_part_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="content part of type 'text' has no text"):
        render(CHATML, [{"role": "user", "content": [{"type": "text"}]}])


def test_final_message_is_continued_at_its_exact_end() -> None:
    messages = [*USER, {"role": "assistant", "content": "The end of "}]

    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)

    assert text == "<|user|>Hi<|end|>\n<|assistant|>The end of "


def test_final_message_that_the_template_strips_is_continued_without_its_spaces() -> None:
    source = "{% for m in messages %}{{ m.content | trim }};{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": "a "}]

    text = render(source, messages, add_generation_prompt=False, continue_final_message=True)

    assert text == "Hi;a"


def test_final_message_in_parts_is_continued_too() -> None:
    messages = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "one"}]}]

    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)

    assert text.endswith("<|assistant|>one")


def test_continued_message_must_be_printed() -> None:
    with pytest.raises(ValueError, match="does not print the last message"):
        render("nothing", add_generation_prompt=False, continue_final_message=True)


def test_continued_message_must_hold_text() -> None:
    with pytest.raises(ValueError, match="needs a last message that ends in text"):
        render(
            CHATML,
            [{"role": "assistant", "content": None}],
            add_generation_prompt=False,
            continue_final_message=True,
        )


def test_continuing_and_beginning_a_message_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="set add_generation_prompt=False"):
        render(CHATML, continue_final_message=True)


def test_template_in_the_request_replaces_the_models() -> None:
    assert render(CHATML, chat_template="{{ bos_token }}mine") == "<s>mine"


def test_tool_template_is_taken_when_there_are_tools() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "with tools"}, {})

    assert [chat.render(USER), chat.render(USER, tools=[{"name": "f"}])] == ["plain", "with tools"]


def test_named_template_is_found_by_name() -> None:
    assert ChatTemplate({"default": "plain", "rag": "r"}, {}).render(USER, chat_template="rag") == "r"


def test_model_without_default_template_lists_what_it_has() -> None:
    with pytest.raises(ValueError, match=r"\['rag', 'tool_use'\] but no 'default'"):
        ChatTemplate({"rag": "r", "tool_use": "t"}, {}).render(USER)


def test_model_without_any_template_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="has no chat template; give one"):
        ChatTemplate({}, {}).render(USER)
