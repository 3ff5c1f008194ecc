"""The options say what they are meant to say; tests/integration/test_grpc_traps.py shows that they work."""

import pytest

from ferrorpc.wire import options

ENDS = [options.session_channel, options.control_server, options.data_channel, options.data_server]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_no_option_is_given_twice_and_no_size_is_unlimited(end) -> None:
    rows = end()
    assert len({name for name, _ in rows}) == len(rows)
    assert all(value >= 0 for _, value in rows)
    assert 0 < dict(rows)["grpc.max_receive_message_length"] <= 4 << 20


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_caller_may_change_its_copy(end) -> None:
    end().clear()
    assert end()


@pytest.mark.parametrize(
    ("modules", "environment", "sound"),
    [
        ({}, {}, True),
        ({"grpc": None}, {options.FORK_VARIABLE: "0"}, True),
        ({"grpc": None}, {options.FORK_VARIABLE: "false"}, True),
        ({"grpc": None}, {}, False),
        ({"grpc": None}, {options.FORK_VARIABLE: "1"}, False),
        ({}, {options.FORK_VARIABLE: "1"}, False),
    ],
)
def test_fork_support_is_a_problem_when_grpc_came_first_or_it_was_asked_for(modules, environment, sound: bool) -> None:
    problem = options.fork_problem(modules, environment)
    assert (problem is None) == sound
    assert sound or options.FORK_VARIABLE in problem
