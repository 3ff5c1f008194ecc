"""Of many refusals some are told and the rest counted, and no name breaks or fills a line."""

from ferrorpc.wire.refusals import SHOWN_CHARACTERS, TOLD_EACH_NS, TOLD_MAX, Refusals, shown


def test_of_many_refusals_some_are_told_and_the_rest_counted() -> None:
    refusals = Refusals()
    told = [refusals.words("no", 0) for _ in range(3 * TOLD_MAX)]
    assert told == ["no"] * TOLD_MAX + [None] * (2 * TOLD_MAX)
    assert refusals.words("no", TOLD_EACH_NS) == f"no ({2 * TOLD_MAX} earlier refusals were not told)"
    assert refusals.words("no", TOLD_EACH_NS) == "no"


def test_a_name_stays_on_its_line_and_is_cut_where_none_is_longer() -> None:
    assert shown("a") == "'a'"
    assert shown("eve\nall is well") == r"'eve\nall is well'"
    assert shown("x" * 3_000_000) == f"'{'x' * SHOWN_CHARACTERS}'..."
