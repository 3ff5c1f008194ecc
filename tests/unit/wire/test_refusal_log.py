"""Of many refusals some are told and the rest counted, and no name breaks or fills a line."""

from ferrorpc.wire.refusal_log import LOG_INTERVAL_NS, LOGGED_MAX, QUOTED_CHARACTERS, RefusalLog, quoted


def test_of_many_refusals_some_are_told_and_the_rest_counted() -> None:
    refusals = RefusalLog()
    told = [refusals.message("no", 0) for _ in range(3 * LOGGED_MAX)]
    assert told == ["no"] * LOGGED_MAX + [None] * (2 * LOGGED_MAX)
    assert refusals.message("no", LOG_INTERVAL_NS) == f"no ({2 * LOGGED_MAX} earlier refusals were not told)"
    assert refusals.message("no", LOG_INTERVAL_NS) == "no"


def test_a_name_stays_on_its_line_and_is_cut_where_none_is_longer() -> None:
    assert quoted("a") == "'a'"
    assert quoted("eve\nall is well") == r"'eve\nall is well'"
    assert quoted("x" * 3_000_000) == f"'{'x' * QUOTED_CHARACTERS}'..."
