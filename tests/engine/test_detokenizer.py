from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupaged.engine.detokenizer import Detokenizer
from cupaged.engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import KINDS, write_directory

REPLACEMENT = "\ufffd"


@cache
def load(kind: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.from_directory(write_directory(Path(folder), KINDS[kind]()))


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load(request.param)


def output_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids that a model would write for `text` behind a prompt."""
    return tokenizer.encode("x" + text)[len(tokenizer.encode("x")) :] if text else []


def split_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return ids of single bytes, so that every character but ASCII comes in parts."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    if b"\xf0" not in single:
        raise AssertionError("the tiny tokenizers have all bytes")
    return [single[bytes([byte])] for byte in text.encode()]


def deltas(tokenizer: Tokenizer, ids: list[int], prompt: str = "x", **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, tokenizer.encode(prompt), **options)
    pieces = []
    for token_id in ids:
        detokenizer.append([token_id])
        pieces.append(detokenizer.take_delta())
    detokenizer.finish()
    pieces.append(detokenizer.take_delta())
    assert "".join(pieces) == detokenizer.text
    return pieces


# Streaming: pieces are whole characters and make up the whole text.


def test_text_streams_token_by_token(tokenizer: Tokenizer) -> None:
    ids = output_ids(tokenizer, " Paris is the capital")

    pieces = deltas(tokenizer, ids)

    assert "".join(pieces) == " Paris is the capital"
    assert all(pieces[:-1])
    assert pieces[-1] == ""


@pytest.mark.parametrize("text", ["😀", "ď", "a😀b漢", "😀😀😀", "é" * 40])
def test_no_piece_holds_a_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    pieces = deltas(tokenizer, split_ids(tokenizer, text))

    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces)


def test_character_appears_with_its_last_byte(tokenizer: Tokenizer) -> None:
    assert deltas(tokenizer, split_ids(tokenizer, "é")) == ["", "é", ""]


def test_character_cut_off_at_the_end_is_one_replacement(tokenizer: Tokenizer) -> None:
    pieces = deltas(tokenizer, split_ids(tokenizer, "a😀")[:-1])

    assert pieces == ["a", "", "", "", REPLACEMENT]


def test_byte_that_begins_no_character_is_one_replacement(tokenizer: Tokenizer) -> None:
    begin, *_, rest = split_ids(tokenizer, "😀")
    letter = split_ids(tokenizer, "a")

    assert "".join(deltas(tokenizer, [*letter, rest, *letter])) == f"a{REPLACEMENT}a"
    assert "".join(deltas(tokenizer, [*letter, begin, *letter])) == f"a{REPLACEMENT}a"


def test_endless_invalid_bytes_do_not_stall_the_stream(tokenizer: Tokenizer) -> None:
    rest = split_ids(tokenizer, "😀")[-1]

    pieces = deltas(tokenizer, [rest] * 50)

    assert "".join(pieces) == REPLACEMENT * 50
    assert all(pieces[2:50])


@pytest.mark.parametrize("num_invalid", range(12, 30))
def test_character_after_many_invalid_bytes_is_whole(tokenizer: Tokenizer, num_invalid: int) -> None:
    character = split_ids(tokenizer, "😀")

    pieces = deltas(tokenizer, character[-1:] * num_invalid + character)

    assert "".join(pieces) == REPLACEMENT * num_invalid + "😀"


def test_valid_text_before_an_invalid_byte_stays(tokenizer: Tokenizer) -> None:
    ids = split_ids(tokenizer, "€") + split_ids(tokenizer, "😀")[:1] + split_ids(tokenizer, "!")

    assert "".join(deltas(tokenizer, ids)) == f"€{REPLACEMENT}!"


def test_replacement_character_in_the_text_is_shown(tokenizer: Tokenizer) -> None:
    assert "".join(deltas(tokenizer, split_ids(tokenizer, f"a{REPLACEMENT}b"))) == f"a{REPLACEMENT}b"


def test_output_goes_on_where_the_prompt_ends(tokenizer: Tokenizer) -> None:
    ids = output_ids(tokenizer, " is")

    assert "".join(deltas(tokenizer, ids, prompt="Paris")) == " is"


def test_output_behind_an_empty_prompt_is_what_decode_gives(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" Paris is")

    assert "".join(deltas(tokenizer, ids, prompt="")) == tokenizer.decode(ids)


def test_prompt_that_ends_in_special_tokens_still_gives_context(tokenizer: Tokenizer) -> None:
    prompt = [*tokenizer.encode("Paris"), *[2, 1] * 30]
    detokenizer = Detokenizer(tokenizer, prompt)

    detokenizer.append(output_ids(tokenizer, " is"))

    assert detokenizer.text == " is"


def test_character_that_the_prompt_began_belongs_to_the_output(tokenizer: Tokenizer) -> None:
    ids = split_ids(tokenizer, "a😀b")
    detokenizer = Detokenizer(tokenizer, ids[:3])

    detokenizer.append(ids[3:])

    assert detokenizer.text == "😀b"


def test_replacement_character_that_ends_the_prompt_is_not_repeated(tokenizer: Tokenizer) -> None:
    ids = split_ids(tokenizer, f"a{REPLACEMENT}b")
    detokenizer = Detokenizer(tokenizer, ids[:-1])

    detokenizer.append(ids[-1:])

    assert detokenizer.text == "b"


def test_special_tokens_are_hidden_or_shown(tokenizer: Tokenizer) -> None:
    ids = [*output_ids(tokenizer, " is"), 2, 2]

    assert "".join(deltas(tokenizer, ids)) == " is"
    assert "".join(deltas(tokenizer, ids, skip_special_tokens=False)) == " is</s></s>"


def test_padding_rows_of_the_vocabulary_show_nothing(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.vocab_size + 3, *output_ids(tokenizer, " is"), tokenizer.vocab_size + 3]

    assert "".join(deltas(tokenizer, ids)) == " is"


# Stop strings: cut at the exact character, nothing leaks, nothing is lost.


def stopped(tokenizer: Tokenizer, text: str, **options: Any) -> tuple[str, str | None]:
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("x"), **options)
    reason = None
    for token_id in output_ids(tokenizer, text):
        reason = reason or detokenizer.append([token_id])
    detokenizer.finish()
    return detokenizer.text, reason


def test_beginning_of_a_stop_string_is_never_shown(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("x"), stop=["DEFGHIJ"])
    for letter in "ABCDEFGHIJKL":
        detokenizer.append(split_ids(tokenizer, letter))
        assert detokenizer.text == "ABC"[: len(detokenizer.text)]

    assert (detokenizer.text, detokenizer.stop_string) == ("ABC", "DEFGHIJ")


def test_stop_string_inside_a_token_cuts_it(tokenizer: Tokenizer) -> None:
    assert stopped(tokenizer, " the capital of", stop=["pit"]) == (" the ca", "pit")


def test_stop_string_across_tokens_is_found(tokenizer: Tokenizer) -> None:
    assert stopped(tokenizer, " N O P Q R", stop=["O P Q"]) == (" N ", "O P Q")


def test_stop_string_matches_text_not_tokens(tokenizer: Tokenizer) -> None:
    assert stopped(tokenizer, " is Paris", stop=["Pari"]) == (" is ", "Pari")


def test_stop_string_of_one_digit_is_left_out(tokenizer: Tokenizer) -> None:
    assert stopped(tokenizer, " 10007", stop=["7"]) == (" 1000", "7")


def test_stop_string_is_included_on_demand_and_nothing_behind_it(tokenizer: Tokenizer) -> None:
    text, reason = stopped(tokenizer, " is Paris", stop=["Pari"], include_stop_str_in_output=True)

    assert (text, reason) == (" is Pari", "Pari")


def test_included_stop_string_holds_no_text_back(tokenizer: Tokenizer) -> None:
    pieces = deltas(tokenizer, split_ids(tokenizer, "ABCD"), stop=["BCD"], include_stop_str_in_output=True)

    assert pieces == ["A", "B", "C", "D", ""]


def test_text_held_back_for_a_stop_that_never_comes_is_flushed(tokenizer: Tokenizer) -> None:
    pieces = deltas(tokenizer, split_ids(tokenizer, "ABC"), stop=["BCD"])

    assert pieces == ["A", "", "", "BC"]


def test_text_held_back_is_shown_when_the_stop_is_ruled_out(tokenizer: Tokenizer) -> None:
    assert deltas(tokenizer, split_ids(tokenizer, "ABCX"), stop=["BCD"]) == ["A", "", "", "BCX", ""]


def test_held_text_may_begin_the_stop_string_anew(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [], stop=["AAB"])

    assert detokenizer.append(split_ids(tokenizer, "AAAAB")) == "AAB"
    assert detokenizer.text == "AA"


def test_stop_that_is_never_hit_changes_nothing(tokenizer: Tokenizer) -> None:
    assert stopped(tokenizer, " is Paris", stop=["zzz", "Parisian"]) == (" is Paris", None)


def test_of_several_stop_strings_the_first_to_end_wins(tokenizer: Tokenizer) -> None:
    assert stopped(tokenizer, " the capital", stop=["capital", "pit"]) == (" the ca", "pit")


def test_of_stop_strings_that_end_together_the_longer_wins(tokenizer: Tokenizer) -> None:
    assert stopped(tokenizer, " the capital", stop=["tal", "capital"]) == (" the ", "capital")


def test_stop_strings_that_end_within_min_tokens_do_not_count(tokenizer: Tokenizer) -> None:
    ids = split_ids(tokenizer, "ABAB")

    detokenizer = Detokenizer(tokenizer, [], stop=["AB"], min_tokens=2)

    assert detokenizer.append(ids) == "AB"
    assert (detokenizer.text, detokenizer.num_tokens) == ("AB", 4)


def test_stop_string_that_begins_within_min_tokens_counts(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [], stop=["BC"], min_tokens=2)

    assert detokenizer.append(split_ids(tokenizer, "ABCD")) == "BC"
    assert detokenizer.text == "A"


def test_tokens_behind_the_stop_string_do_not_count(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [], stop=["B"])

    detokenizer.append(split_ids(tokenizer, "ABCD"))
    detokenizer.finish()

    assert (detokenizer.text, detokenizer.num_tokens) == ("A", 2)


def test_stop_string_of_characters_in_parts_is_found(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [], stop=["漢😀"])

    assert detokenizer.append(split_ids(tokenizer, "a漢😀b")) == "漢😀"
    assert detokenizer.text == "a"


def test_stop_set_gives_no_piece_twice(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [], stop=["zzz"])
    detokenizer.append(split_ids(tokenizer, "AB"))

    assert [detokenizer.take_delta(), detokenizer.take_delta()] == ["AB", ""]


# Any text, any split, any tokens.

TEXTS = st.text(alphabet=st.sampled_from("aAB \n7éď漢😀▁") | st.characters(codec="utf-8"), max_size=40)


@given(kind=st.sampled_from(sorted(KINDS)), text=TEXTS, in_bytes=st.booleans())
def test_any_text_comes_back_in_whole_characters(kind: str, text: str, in_bytes: bool) -> None:
    tokenizer = load(kind)
    text = text.replace("▁", "") if kind == "byte_fallback" else text  # there it is a space
    ids = split_ids(tokenizer, text) if in_bytes else output_ids(tokenizer, text)

    pieces = deltas(tokenizer, ids)

    assert "".join(pieces) == text
    assert "".join(pieces).count(REPLACEMENT) == text.count(REPLACEMENT)


@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), skips=st.booleans())
def test_any_tokens_give_what_decoding_all_of_them_gives(data: st.DataObject, kind: str, skips: bool) -> None:
    tokenizer = load(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    num_prompt = data.draw(st.integers(0, len(ids)))
    prompt_text = tokenizer.decode(ids[:num_prompt], skips)
    detokenizer = Detokenizer(tokenizer, ids[:num_prompt], skip_special_tokens=skips)

    detokenizer.append(ids[num_prompt:])
    detokenizer.finish()

    if not prompt_text.endswith(REPLACEMENT):
        assert prompt_text + detokenizer.text == tokenizer.decode(ids, skips)


@given(data=st.data(), skips=st.booleans())
def test_bytes_give_the_same_text_joined_or_decoded(data: st.DataObject, skips: bool) -> None:
    joining, decoding = load("byte_level"), load("byte_level_in_sequence")
    partial = split_ids(joining, "aé€😀�")
    surrogate = {joining.token_bytes(i): i for i in range(joining.vocab_size)}[b"\xed"]
    ids = data.draw(st.lists(st.sampled_from([*partial, surrogate, 2]), max_size=30))
    num_prompt = data.draw(st.integers(0, len(ids)))
    texts = []
    for tokenizer in (joining, decoding):
        detokenizer = Detokenizer(tokenizer, ids[:num_prompt], skip_special_tokens=skips)
        detokenizer.append(ids[num_prompt:])
        detokenizer.finish()
        texts.append(detokenizer.text)

    assert joining.joins_bytes > decoding.joins_bytes
    assert texts[0] == texts[1]


@given(
    kind=st.sampled_from(sorted(KINDS)),
    text=st.text(alphabet="AB", max_size=20),
    stop=st.lists(st.text(alphabet="ABC", min_size=1, max_size=4), min_size=1, max_size=3),
    includes=st.booleans(),
)
def test_any_stop_strings_cut_where_the_first_of_them_ends(
    kind: str, text: str, stop: list[str], includes: bool
) -> None:
    tokenizer = load(kind)
    expected, reason = text, None
    for end in range(len(text) + 1):
        hits = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if hits:
            reason = max(hits, key=len)
            expected = text[: end if includes else end - len(reason)]
            break
    detokenizer = Detokenizer(tokenizer, [], stop=stop, include_stop_str_in_output=includes)

    shown = ""
    for token_id in split_ids(tokenizer, text):
        detokenizer.append([token_id])
        shown += detokenizer.take_delta()
        assert expected.startswith(shown)
    detokenizer.finish()

    assert (detokenizer.text, detokenizer.stop_string) == (expected, reason)
