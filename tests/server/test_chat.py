"""What answers to /v1/chat/completions look like, whole and streamed, and how messages become a prompt."""

from pathlib import Path

from cupaged.engine.tokenizer import Tokenizer
from cupaged.server.chat import chat_prompt
from cupaged.server.protocol import ChatBody, parse_body
from tests.engine.conftest import ALPHABET
from tests.engine.scripted import continuation
from tests.engine.tiny_tokenizers import byte_level, write_directory
from tests.server.conftest import Client, MakeClient, text_after, usage


def test_an_answer_has_the_assistants_message_and_its_usage(client: Client) -> None:
    reply = client.chat(max_tokens=5).json()

    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": text_after("uhiA", 5)},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert reply["usage"] == usage(4, 5)


def test_n_answers_to_one_chat(client: Client) -> None:
    reply = client.chat(n=3, max_tokens=5, temperature=1).json()

    texts = [text_after("uhiA", 5, index=index) for index in range(3)]
    assert [choice["message"]["content"] for choice in reply["choices"]] == texts
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"] == usage(4, 15)


def test_each_of_n_streamed_answers_begins_with_the_role(client: Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chunks = client.stream("/v1/chat/completions", messages=messages, n=3, max_tokens=5, temperature=1)

    for index in range(3):
        deltas = [
            choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index
        ]
        assert "".join(delta["content"] for delta in deltas) == text_after("uhiA", 5, index=index)
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)


def test_without_max_tokens_the_answer_fills_the_window(make_client: MakeClient) -> None:
    reply = make_client(max_model_len=40).chat().json()

    assert reply["usage"] == usage(4, 36)


def test_a_template_with_bos_gives_exactly_one(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    model = write_directory(tmp_path, byte_level(), add_bos_token=True, chat_template=template)
    body = parse_body(b'{"messages": [{"role": "user", "content": "Paris"}]}', ChatBody)

    tokenizer = Tokenizer.from_directory(model)

    assert chat_prompt(body, tokenizer) == tokenizer.encode("Paris")


def test_the_template_gets_its_variables(client: Client) -> None:
    reply = client.chat(chat_template_kwargs={"tone": "xyz"}, max_tokens=3).json()

    assert reply["choices"][0]["message"]["content"] == text_after("uhixyzA", 3)


def test_the_final_message_can_be_continued(client: Client) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]

    reply = client.chat(
        messages, add_generation_prompt=False, continue_final_message=True, max_tokens=3
    ).json()

    assert reply["choices"][0]["message"]["content"] == text_after("uhiayes", 3)


def test_template_variables_cannot_stand_in_for_fields_of_the_body(client: Client) -> None:
    error = client.chat(chat_template_kwargs={"chat_template": "x"}).json()["error"]

    assert error["param"] == "chat_template_kwargs.chat_template"


def test_tool_calls_in_a_message_are_refused(client: Client) -> None:
    error = client.chat([{"role": "assistant", "tool_calls": [{"id": "call_1"}]}]).json()["error"]

    assert error["param"] == "messages[0].tool_calls"


def test_logprobs_are_a_list_of_tokens_with_bytes_and_alternatives(client: Client) -> None:
    choice = client.chat(max_tokens=1, logprobs=True, top_logprobs=1).json()["choices"][0]

    (first,) = continuation([ALPHABET.index(text) for text in "uhiA"], 1)
    assert choice["logprobs"] == {
        "content": [
            {
                "token": ALPHABET[first],
                "logprob": -first / 8,
                "bytes": [ord(ALPHABET[first])],
                "top_logprobs": [{"token": "<eos>", "logprob": 0.0, "bytes": list(b"<eos>")}],
            }
        ]
    }


def test_logprobs_without_top_logprobs_have_no_alternatives(client: Client) -> None:
    reply = client.chat(max_tokens=2, logprobs=True)

    assert reply.status_code == 200
    content = reply.json()["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in content] == [[], []]


def test_only_an_assistant_may_have_said_nothing(client: Client) -> None:
    error = client.chat([{"role": "user", "content": "hi"}, {"role": "user"}]).json()["error"]

    assert error["message"].startswith("a message of role user needs content")
    assert error["param"] == "messages[1].content"
    silent = [{"role": "user", "content": "hi"}, {"role": "assistant"}, {"role": "user", "content": "hi"}]
    assert client.chat(silent).status_code == 200


def test_the_role_comes_with_the_first_text_and_only_there(client: Client) -> None:
    chunks = client.stream("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=3)

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    text = text_after("uhiA", 3)
    assert deltas == [{"role": "assistant", "content": text[0]}, {"content": text[1]}, {"content": text[2]}]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_prompt_logprobs_stand_beside_the_choices(client: Client) -> None:
    reply = client.chat(prompt_logprobs=0, max_tokens=1).json()

    assert len(reply["prompt_logprobs"]) == 4
    assert reply["prompt_logprobs"][0] is None


def test_a_template_that_refuses_the_messages_is_a_400(make_client: MakeClient) -> None:
    client = make_client(chat_template="{{ raise_exception('roles must alternate') }}{{ messages }}")

    reply = client.chat()

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages"
    assert "roles must alternate" in reply.json()["error"]["message"]
