"""A token that is replaced while a process runs: brought from then on, and the one before it still taken."""

from pathlib import Path

import pytest
from ferrorpc_coordinator.tokens import read_token_file

from ferrorpc.errors import ConfigError
from ferrorpc.wire.token import NO_TOKEN, Token


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("the-first-of-them\n")
    return path


def test_what_the_file_says_is_brought_and_what_it_said_before_is_taken_too(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not every process of a job sees a new file in the same moment."""
    token = Token(str(file))
    assert token.current() == "the-first-of-them"
    file.write_text("the-second-of-them\n")
    assert token.current() == "the-second-of-them"
    assert [token.accepts(f"the-{which}-of-them") for which in ("first", "second", "third")] == [True, True, False]
    file.write_text("the-third-of-them\n")
    assert [token.accepts(f"the-{which}-of-them") for which in ("first", "second", "third")] == [False, True, True]
    assert not token.accepts("")
    assert "of-them" not in caplog.text + repr(token)


def test_what_it_said_before_is_brought_beside_it_for_those_whose_file_is_still_the_old_one(file: Path) -> None:
    token, late = Token(str(file)), Token(fixed="the-first-of-them")
    assert token.both() == ("the-first-of-them",) * 2
    file.write_text("the-second-of-them")
    assert token.both() == ("the-second-of-them", "the-first-of-them")
    assert late.accepts(*token.both())
    file.write_text("the-third-of-them")
    assert not late.accepts(*token.both())


@pytest.mark.parametrize("content", [None, "", "two words"])
def test_a_file_that_cannot_be_used_leaves_it_as_it_was_and_is_told_of_once_each_time(
    file: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    token = Token(str(file))
    for times, before in enumerate(("first", "second"), 1):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        assert [token.current() for _ in range(3)] == [f"the-{before}-of-them"] * 3
        assert caplog.text.count("the token in use is kept") == times
        file.write_text("the-second-of-them")
        assert token.current() == "the-second-of-them"


def test_a_file_that_can_never_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Token(str(tmp_path / "none"))


def test_a_command_with_a_coordinators_list_is_told_whose_settings_it_needs(file: Path) -> None:
    file.write_text("observer the-first-of-them")
    with pytest.raises(ConfigError, match="lists several tokens or their roles") as caught:
        Token(str(file))
    assert "not the coordinator's" in str(caught.value)


@pytest.mark.parametrize("token", ["0123456789abcdef" * 2, "0123456789abcdef" * 20, "q83vEjRWeJC/rN3u/w=="])
def test_a_token_in_place_of_its_file_is_not_repeated(token: str) -> None:
    """Nor where it is so long that no file could have its name, or contains slashes."""
    for refuse in (lambda: Token(token), lambda: read_token_file(Path(token))):
        with pytest.raises(ConfigError, match=r"token.file cannot be read") as caught:
            refuse()
        assert token not in str(caught.value)


def test_a_path_that_leads_somewhere_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secrets").mkdir()
    for path in (str(tmp_path / "secret" / "token"), "secrets/token", "secrets"):
        with pytest.raises(ConfigError, match=f"token_file='{path}' cannot be read"):
            Token(path)


def test_without_a_file_there_is_none_or_one_that_stays() -> None:
    assert (NO_TOKEN.current(), NO_TOKEN.accepts(""), NO_TOKEN.accepts("guess")) == ("", True, False)
    assert Token(fixed="secret").accepts("secret")
    assert not Token(fixed="secret").accepts("")
