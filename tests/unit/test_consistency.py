"""Ranks that hold different things hear what differs."""

import pytest

from ferrorpc.consistency import require_same
from ferrorpc.errors import CollectiveMismatchError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_world


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("a", "a\n"), "rank 1 has '' where rank 0 has 'nothing'"),
        (("a\n\nb", "a\nb"), "rank 1 has 'b' where rank 0 has ''"),
        (("a\x0bb", "a\nb"), "rank 1 has 'a' where rank 0 has 'a\\x0bb', 'b' where rank 0 has 'nothing'"),
        (("", "x"), "rank 1 has 'x' where rank 0 has ''"),
    ],
)
def test_texts_that_differ_in_ends_of_lines_only_are_told_apart(texts: tuple[str, str], said: str) -> None:
    def compare(group: ProcessGroup) -> None:
        with pytest.raises(CollectiveMismatchError) as caught:
            require_same(group, "things", texts[group.rank])
        assert said in caught.value.message

    run_world(2, compare)


def test_the_same_text_everywhere_is_no_error() -> None:
    run_world(3, lambda group: require_same(group, "things", ""))
