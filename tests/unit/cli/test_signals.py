"""Signals that can be selected on, and their names."""

import os
import select
import signal

from ferrorpc.cli.launcher.signals import SignalInbox, describe, exit_code


def test_signals_are_read_in_order_and_only_those_that_stop_are_in_a_hurry():
    stops = []
    with SignalInbox(lambda: stops.append("stop")) as inbox:
        assert inbox.read() == []
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGCHLD)
        assert (inbox.read(), stops) == ([signal.SIGUSR1, signal.SIGCHLD], [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert (inbox.read(), stops) == ([signal.SIGTERM], ["stop"])


def test_no_signal_is_lost_after_more_than_the_socket_holds():
    """As where hundreds of workers end while their output holds the launcher up."""
    with SignalInbox(lambda: None) as inbox:
        for _ in range(300):
            os.kill(os.getpid(), signal.SIGCHLD)
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([inbox], [], [], 0)[0]
        assert inbox.read()[-1] == signal.SIGTERM
        assert inbox.read() == []
        assert not select.select([inbox], [], [], 0)[0]


def test_everything_is_as_before_once_the_inbox_is_closed():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        with SignalInbox(lambda: None):
            assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert [signal.getsignal(number) for number in numbers] == before


def test_ends_have_the_names_and_the_codes_that_shells_give_them():
    assert [describe(code) for code in (3, -9, -40)] == ["exit code 3", "SIGKILL", "signal 40"]
    assert [exit_code(code) for code in (3, -9, -40)] == [3, 137, 168]
