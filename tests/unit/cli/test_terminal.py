"""What fits a row of a terminal."""

import pytest

from ferrorpc.cli.terminal import cells, cut


@pytest.mark.parametrize(
    ("text", "most", "shown"),
    [
        ("a" * 9, 8, "a" * 8),
        ("a" * 8, 8, "a" * 8),
        ("学習中です", 7, "学習中"),
        ("学習中です", 10, "学習中です"),
        ("🚀 10%", 4, "🚀 1"),
        ("e\u0301e\u0301e\u0301", 2, "e\u0301e\u0301"),
        ("\x1b[32mdone\x1b[0m", 4, "\x1b[32mdone\x1b[0m"),
        ("\x1b[32m####\x1b[0m", 3, "###"),
        ("\x1b[38;2;100;100;100mab\x1b[K", 1, "a"),
        ("\x1b]8;;https://example.org\x07run\x1b]8;;\x07 ###", 3, "run"),
        ("abc\x1b(Bdef", 4, "abcd"),
        ("a\tb", 3, "a  "),
        ("ab", 0, ""),
        ("", 0, ""),
    ],
)
def test_a_text_is_cut_by_what_it_takes_and_never_within_an_escape_sequence(text: str, most: int, shown: str) -> None:
    assert cut(text, most) == shown
    assert cells(shown) <= most
