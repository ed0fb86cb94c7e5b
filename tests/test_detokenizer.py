"""Streamed text is the decoded text: whole characters, and never a piece of a stop string."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from siftkv.engine.detokenizer import CONTEXT_TOKENS, MAX_STALLED_TOKENS, IncrementalDetokenizer, StopChecker

TEXT = "Hi there, 你好世界! 😀👩‍👩‍👧 naïve — שלום\n\tx = 1;  🇫🇷."
# In both tokenizers the ids 0 to 255 are the bytes.
TH = 256
HELLO, WORLD, EXCLAMATION = 256, 257, 258


def byte_level_tokenizer():
    """GPT-2's bytes as tokens, and one merge."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(shifted)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {"th": TH}, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def byte_fallback_tokenizer():
    """Llama 2 style: "▁" starts a word and is stripped at the start of the text; rare characters are bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"▁Hello": HELLO, "▁world": WORLD, "!": EXCLAMATION}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


BYTE_LEVEL, BYTE_FALLBACK = byte_level_tokenizer(), byte_fallback_tokenizer()


def pieces(tokenizer, token_ids, prompt_ids=(), **options):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, **options)
    return [*(detokenizer.append(token) for token in token_ids), detokenizer.flush()]


def test_multibyte_text_streams_character_by_character():
    token_ids = BYTE_LEVEL.encode(TEXT)
    assert TH in token_ids
    assert len(token_ids) > 1.5 * len(TEXT), "the text must have characters of several tokens"
    shown = [piece for piece in pieces(BYTE_LEVEL, token_ids) if piece]
    before, after = TEXT.split("th")
    assert shown == [*before, "th", *after]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
@pytest.mark.parametrize("prompt", ["", "a prompt", "提示"])
def test_each_character_appears_with_its_last_byte(tokenizer, prompt):
    text = "é你😀😀b"
    expected = []
    for character in text:
        expected += [""] * (len(character.encode()) - 1) + [character]
    assert pieces(tokenizer, list(text.encode()), list(prompt.encode())) == [*expected, ""]


@given(st.text(max_size=12), st.text(max_size=40))
@example("", "\ufffd\ufffd\ufffd\ufffd\ufffd a")
@example("\ufffd", "b\ufffd")
def test_streamed_text_is_the_decoded_text(prompt, text):
    assert "".join(pieces(BYTE_LEVEL, list(text.encode()), list(prompt.encode()))) == text


@given(st.lists(st.text(min_size=1, max_size=3) | st.sampled_from([HELLO, WORLD, EXCLAMATION]), max_size=20))
def test_words_and_bytes_stream_what_they_decode_to(parts):
    token_ids = [token for part in parts for token in (part.encode() if isinstance(part, str) else [part])]
    assert "".join(pieces(BYTE_FALLBACK, token_ids)) == BYTE_FALLBACK.decode(token_ids)


@given(st.lists(st.integers(0, 255) | st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE4, 0x41]), max_size=60))
@example([0xFF] * 7 + [0xF0, 0x9F, 0x98, 0x80])
@example([0xF0, 0x9F, 0x98] * 5)
def test_bytes_that_are_no_utf8_stream_what_they_decode_to(token_ids):
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == bytes(token_ids).decode(errors="replace")


def test_an_incomplete_character_is_shown_only_by_flush():
    assert pieces(BYTE_LEVEL, list("a😀".encode())[:-1]) == ["a", "", "", "", "\ufffd"]


def test_a_character_that_began_in_the_prompt():
    data = "x中".encode()
    assert pieces(BYTE_LEVEL, list(data[2:]), list(data[:2])) == ["", "中", ""]


def test_spaces_between_words_survive_the_window():
    token_ids = [HELLO, WORLD, EXCLAMATION, WORLD]
    assert pieces(BYTE_FALLBACK, token_ids) == ["Hello", " world", "!", " world", ""]
    assert pieces(BYTE_FALLBACK, token_ids, prompt_ids=[HELLO]) == [" Hello", " world", "!", " world", ""]


def test_special_tokens():
    eos = BYTE_FALLBACK.eos_token_id
    many = [eos] * (MAX_STALLED_TOKENS + CONTEXT_TOKENS)
    assert "".join(pieces(BYTE_FALLBACK, [HELLO, *many, WORLD])) == "Hello world"
    assert "".join(pieces(BYTE_FALLBACK, [HELLO, eos, WORLD], skip_special_tokens=False)) == "Hello<eos> world"


def test_the_decoded_window_stays_small():
    class Counting:
        longest = 0

        def decode(self, token_ids, **options):
            self.longest = max(self.longest, len(token_ids))
            return BYTE_LEVEL.decode(token_ids, **options)

    eos = BYTE_LEVEL.eos_token_id
    for token_ids in (list(TEXT.encode()) * 5, [0xFF] * 300, [eos] * 300, [0xF0, eos] * 150):
        counting = Counting()
        pieces(counting, token_ids, prompt_ids=list(range(97, 123)))
        assert counting.longest <= CONTEXT_TOKENS + 2 * MAX_STALLED_TOKENS


def stream(chunks, stop, include=False):
    """(pieces shown, stop reason)."""
    checker = StopChecker(stop, include)
    shown = []
    for chunk in chunks:
        shown.append(checker.append(chunk))
        if checker.stop_reason is not None:
            break
    else:
        shown.append(checker.close())
    assert checker.text == "".join(shown)
    return shown, checker.stop_reason


def test_a_stop_string_across_pieces_is_never_shown():
    assert stream(["Hi <", "/e", "nd", "> more"], ["</end>"]) == (["Hi ", "", "", ""], "</end>")
    assert stream(["Hi <", "/e", "ls", "e>"], ["</end>"]) == (["Hi ", "", "</els", "e>", ""], None)
    assert stream(["Hi <", "/e"], ["</end>"]) == (["Hi ", "", "</e"], None)


def test_a_stop_string_that_overlaps_itself():
    assert stream(["aa", "a", "ab", "c"], ["aab"]) == (["", "a", "a"], "aab")


def test_a_stop_string_inside_one_piece_cuts_what_follows():
    assert stream(["one\n\ntwo\n\nthree"], ["\n\n"]) == (["one"], "\n\n")


def test_included_stop_strings_are_shown_without_holding_back():
    assert stream(["Hi <", "/e", "nd> more"], ["</end>"], include=True) == (["Hi <", "/e", "nd>"], "</end>")
    assert stream(["Hi <", "/e"], ["</end>"], include=True) == (["Hi <", "/e", ""], None)


def test_the_first_complete_stop_string_wins_then_the_longest():
    assert stream(["xabcd"], ["abcd", "bc"]) == (["xa"], "bc")
    assert stream(["xabc"], ["bc", "abc"]) == (["x"], "abc")


def test_no_stop_strings_shows_everything_at_once():
    assert stream(["a", "", "b"], []) == (["a", "", "b", ""], None)


def test_the_flushed_rest_may_complete_a_stop_string():
    checker = StopChecker(["end\ufffd"])
    assert checker.append("the end") == "the "
    assert checker.close("\ufffd") == ""
    assert checker.stop_reason == "end\ufffd"


def test_stop_strings_are_plain_text_before_min_tokens():
    checker = StopChecker(["ab", "b"])
    assert checker.append("ab.", may_stop=False) == "ab."
    assert checker.append("a", may_stop=False) == ""
    assert checker.append("c") == "ac", "no stop string ends after the first tokens"
    assert checker.append("xb") == "x"
    assert checker.stop_reason == "b"


def test_a_stop_string_may_begin_before_min_tokens():
    checker = StopChecker(["abc"])
    assert checker.append("xab", may_stop=False) == "x"
    assert checker.append("c") == ""
    assert (checker.stop_reason, checker.text) == ("abc", "x")


@given(
    st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.booleans(), st.data()
)
def test_pieces_do_not_change_the_result(text, stop, include, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    shown, reason = stream(chunks, stop, include)

    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(one) for one in stop)]
    expected = None
    if ends:
        text = text[: ends[0]]
        expected = max((one for one in stop if text.endswith(one)), key=len)
        text = text if include else text.removesuffix(expected)
    assert ("".join(shown), reason) == (text, expected)
