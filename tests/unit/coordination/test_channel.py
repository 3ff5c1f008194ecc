"""Channels to a coordinator: no token leaves this machine in clear text."""

from pathlib import Path

import pytest

from ferrorpc.config import Config
from ferrorpc.coordination.channel import token_for
from ferrorpc.errors import ConfigError


@pytest.fixture
def token(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text("the-token-of-an-admin")
    return {"FERRORPC_TOKEN_FILE": str(tmp_path / "token")}


@pytest.mark.parametrize("address", ["10.1.2.3:29700", "coordinator.example:29700", "[fd00::1]:29700"])
def test_a_token_is_not_sent_in_clear_text_to_another_machine(token: dict[str, str], address: str) -> None:
    with pytest.raises(ConfigError, match="could read the token") as caught:
        token_for(address, Config(environment=token))
    assert address in caught.value.message
    assert "FERRORPC_INSECURE" in caught.value.hint


@pytest.mark.parametrize(
    ("address", "settings"),
    [
        ("127.0.0.1:29700", {}),
        ("localhost:29700", {}),
        ("[::1]:29700", {}),
        ("10.1.2.3:29700", {"FERRORPC_INSECURE": "1"}),
        ("10.1.2.3:29700", {"FERRORPC_TLS_CA": "ca.pem"}),
    ],
)
def test_one_may_be_sent_on_this_machine_over_tls_or_where_that_is_allowed(
    token: dict[str, str], address: str, settings: dict[str, str]
) -> None:
    assert token_for(address, Config(environment=token | settings)).current() == "the-token-of-an-admin"


def test_who_has_no_token_needs_no_tls() -> None:
    assert token_for("10.1.2.3:29700", Config(environment={})).current() == ""
