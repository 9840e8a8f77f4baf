import json
from pathlib import Path

import pytest

from cupaged.engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import KINDS, SENTENCES, byte_fallback, byte_level, write_directory


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(write_directory(tmp_path, KINDS[request.param]()))


def test_directory_without_tokenizer_json_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json; save the tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_broken_tokenizer_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")

    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")

    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_directory(tmp_path)


def test_tokenizer_config_that_is_no_object_is_named(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("[]", encoding="utf-8")

    with pytest.raises(ValueError, match="must hold a JSON object"):
        Tokenizer.from_directory(tmp_path)


def test_special_token_ids_are_read_as_string_or_object(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_token_ids >= {0, 1, 2}


def test_special_tokens_map_fills_in_what_the_config_lacks(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level(), eos_token=None)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")

    tokenizer = Tokenizer.from_directory(tmp_path)

    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 2)


@pytest.mark.parametrize("text", [*SENTENCES, "", " two  spaces ", "emoji 😀 and 漢字\n\ttabs"])
def test_decode_undoes_encode(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)

    assert max(ids, default=0) < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text


def test_stated_bos_and_eos_are_added_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(
        write_directory(tmp_path, byte_level(), add_bos_token=True, add_eos_token=True)
    )

    ids = tokenizer.encode("Paris")

    assert ids == [1, *tokenizer.encode("Paris", add_special_tokens=False), 2]
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_refused_bos_overrules_tokenizer_json(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level(), add_bos_token=False)
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(values), encoding="utf-8")

    without = Tokenizer.from_directory(tmp_path).encode("Paris")
    (tmp_path / "tokenizer_config.json").unlink()

    assert Tokenizer.from_directory(tmp_path).encode("Paris") == [1, *without]


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode("Rome"), 2]

    assert tokenizer.decode(ids) == "Rome"
    assert tokenizer.decode(ids, skip_special_tokens=False).strip() != "Rome"


def test_padding_rows_of_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("Rome"), tokenizer.vocab_size + 7]) == "Rome"


def test_token_text_keeps_the_space_that_begins_it(tokenizer: Tokenizer) -> None:
    texts = [tokenizer.token_text(i) for i in tokenizer.encode("capital Paris")]

    assert "".join(texts).lstrip(" ") == "capital Paris"
    assert any(text.startswith(" ") for text in texts[1:])


def test_token_text_of_a_partial_character_is_one_replacement(tokenizer: Tokenizer) -> None:
    first = next(i for i in tokenizer.encode("😀") if tokenizer.token_bytes(i) == b"\xf0")

    assert tokenizer.token_text(first) == "\ufffd"


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 😀 ďábel 漢"

    joined = b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text))

    assert joined.decode().lstrip(" ") == text


def test_token_bytes_of_an_added_token_are_its_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(2) == b"</s>"


def test_valid_bytes_before_invalid_ones_are_kept(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_fallback()))
    byte = [tokenizer.encode("😀")[-4] - 0xF0 + b for b in range(256)]

    assert tokenizer.decode([byte[b] for b in "€".encode() + b"\xf0\x9f"]) == "€\ufffd"


def test_template_file_overrules_the_models_own(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level(), chat_template="own")
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}!", encoding="utf-8")

    tokenizer = Tokenizer.from_directory(tmp_path, str(file))

    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi!"


def test_missing_template_file_is_named(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level())

    with pytest.raises(ValueError, match=r"'nowhere\.jinja' is neither a file nor a Jinja template"):
        Tokenizer.from_directory(tmp_path, "nowhere.jinja")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer_config.json", json.dumps({"chat_template": "found"})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": "found"}]})),
        ("chat_template.json", json.dumps({"chat_template": "found"})),
        ("chat_template.jinja", "found"),
    ],
)
def test_template_is_found_where_checkpoints_keep_it(tmp_path: Path, file: str, text: str) -> None:
    write_directory(tmp_path, byte_level())
    (tmp_path / file).write_text(text, encoding="utf-8")

    assert Tokenizer.from_directory(tmp_path).render_chat([{"role": "user", "content": "Hi"}]) == "found"


def test_template_of_a_file_comes_before_that_of_the_config(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level(), chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new", encoding="utf-8")

    assert Tokenizer.from_directory(tmp_path).render_chat([{"role": "user", "content": "Hi"}]) == "new"


def test_additional_templates_are_found_by_name(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level(), chat_template="plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("with documents", encoding="utf-8")
    tokenizer = Tokenizer.from_directory(tmp_path)

    text = tokenizer.render_chat([{"role": "user", "content": "Hi"}], chat_template="rag")

    assert text == "with documents"


def test_templates_see_the_special_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level(), chat_template=template))

    text = tokenizer.render_chat([{"role": "user", "content": "Hi"}])

    assert text == "<s>Hi</s>"
    assert tokenizer.encode(text, add_special_tokens=False).count(1) == 1


def test_half_a_surrogate_pair_is_refused_with_its_place(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level()))

    with pytest.raises(ValueError, match=r"half a surrogate pair, '\\ud800' at character 3"):
        tokenizer.encode("abc\ud800")
