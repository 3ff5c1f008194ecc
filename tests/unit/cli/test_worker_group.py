"""The launcher's state machine, without processes, signals or a clock."""

import signal

import pytest

from ferrorpc.cli.launcher.worker_group import NO_DEADLINE, Done, FailurePolicy, Phase, Signal, Start, WorkerGroup


def running(size=3, *, elastic=False, **policy):
    group = WorkerGroup(size, FailurePolicy(grace_seconds=5, shutdown_seconds=30, **policy), elastic=elastic)
    group.begin()
    return group


def ends(group, worker, returncode, now=0.0, victim=False, outside=False):
    return group.exited(worker, returncode, victim=victim or returncode == 75, outside=outside, now=now)


def test_all_workers_are_started_together():
    assert WorkerGroup(3, FailurePolicy()).begin() == [Start((0, 1, 2), 0)]


def test_workers_that_all_end_well_end_the_job_without_a_failure():
    group = running(2)
    assert ends(group, 0, 0) == []
    assert group.deadline == NO_DEADLINE
    assert ends(group, 1, 0) == [Done()]
    assert group.first_failure is None


def test_ctrl_c_reaches_the_workers_as_the_signal_that_the_policy_names():
    assert running(2).signalled(signal.SIGINT, 0.0) == [Signal((0, 1), signal.SIGINT)]
    group = running(2, interrupt_number=signal.SIGTERM)
    assert group.signalled(signal.SIGINT, 0.0) == [Signal((0, 1), signal.SIGTERM)]
    assert group.interrupted == signal.SIGINT
    assert running(2, interrupt_number=signal.SIGTERM).signalled(signal.SIGHUP, 0.0) == [Signal((0, 1), signal.SIGHUP)]


def test_after_a_failure_the_others_have_the_grace_then_sigterm_then_sigkill():
    group = running(3)
    assert ends(group, 1, 1, now=10.0) == []
    assert group.deadline == 15.0
    assert group.tick(14.9) == []
    assert group.tick(15.0) == [Signal((0, 2), signal.SIGTERM)]
    assert group.deadline == 45.0
    assert ends(group, 0, -signal.SIGTERM, now=16.0) == []
    assert group.tick(45.0) == [Signal((2,), signal.SIGKILL)]
    assert group.deadline == NO_DEADLINE
    assert ends(group, 2, -signal.SIGKILL, now=45.1) == [Done()]
    assert group.first_failure.worker == 1
    assert [end.stopped for end in group.exits] == [False, True, True]


def test_the_first_failure_is_the_cause_even_when_a_victim_was_faster():
    group = running(3)
    ends(group, 0, 1, now=1.0, victim=True)
    ends(group, 1, 3, now=1.1)
    ends(group, 2, 1, now=1.2, victim=True)
    assert group.first_failure.worker == 1


def test_a_failure_counts_where_others_ended_well():
    group = running(3)
    ends(group, 0, 0, now=1.0)
    ends(group, 1, 3, now=2.0)
    ends(group, 2, 0, now=3.0)
    assert group.first_failure.worker == 1


def test_who_lost_a_member_explains_those_that_had_to_be_stopped():
    group = running(2)
    ends(group, 1, 75, now=1.0)
    group.tick(6.0)
    ends(group, 0, -signal.SIGTERM, now=6.1)
    assert group.first_failure.worker == 1


def test_a_signal_after_the_end_asks_for_nothing():
    group = running(1)
    ends(group, 0, 0)
    assert [group.signalled(signal.SIGTERM, 1.0) for _ in range(2)] == [[], []]


def test_where_all_are_victims_the_earliest_stands_for_them():
    group = running(2)
    ends(group, 1, 75, now=1.0)
    ends(group, 0, 75, now=1.1)
    assert group.first_failure.worker == 1


def test_a_signal_is_forwarded_and_the_second_one_kills():
    group = running(2)
    assert group.signalled(signal.SIGINT, 1.0) == [Signal((0, 1), signal.SIGINT)]
    assert group.deadline == 31.0
    assert group.signalled(signal.SIGINT, 1.5) == [Signal((0, 1), signal.SIGKILL)]
    assert group.interrupted == signal.SIGINT


@pytest.mark.parametrize(("first", "second"), [(signal.SIGHUP, signal.SIGHUP), (signal.SIGTERM, signal.SIGHUP)])
def test_two_signals_of_one_event_leave_the_workers_their_time(first, second):
    """As where a terminal is closed: its shell and the kernel both send SIGHUP."""
    group = running(2)
    assert group.signalled(first, 1.0) == [Signal((0, 1), first)]
    assert group.signalled(second, 1.1) == []
    assert (group.interrupted, group.deadline) == (first, 31.0)
    assert group.signalled(second, 2.5) == [Signal((0, 1), signal.SIGKILL)]


def test_a_job_that_cannot_go_on_stops_its_workers_as_any_other_and_is_not_restarted():
    group = running(2, max_restarts=3)
    assert group.give_up(75, 1.0) == [Signal((0, 1), signal.SIGTERM)]
    assert group.deadline == 31.0
    assert ends(group, 0, -signal.SIGTERM, now=1.1) == []
    assert ends(group, 1, -signal.SIGTERM, now=1.1) == [Done()]
    assert group.given_up == 75
    assert all(end.stopped for end in group.exits)


def test_a_job_that_stops_already_is_not_told_again_that_it_cannot_go_on():
    group = running(2)
    group.signalled(signal.SIGINT, 1.0)
    assert group.give_up(75, 2.0) == []
    assert group.deadline == 31.0


def test_a_signal_alone_becomes_sigkill_after_the_shutdown_time():
    group = running(1)
    group.signalled(signal.SIGTERM, 1.0)
    assert group.tick(31.0) == [Signal((0,), signal.SIGKILL)]


def test_a_signal_during_the_grace_is_forwarded_to_those_left():
    group = running(3)
    ends(group, 0, 1, now=1.0)
    assert group.signalled(signal.SIGTERM, 2.0) == [Signal((1, 2), signal.SIGTERM)]


def test_a_group_is_restarted_as_a_whole_once_all_have_ended():
    group = running(2, max_restarts=1)
    assert ends(group, 0, 1) == []
    again = ends(group, 1, 75)
    assert again == [Start((0, 1), 1)]
    assert again[0].cause.worker == 0, "the other one only lost a member"
    assert group.phase is Phase.RUNNING
    assert group.deadline == NO_DEADLINE
    assert group.exits == []
    ends(group, 0, 1)
    assert ends(group, 1, 75) == [Done()], "one restart was allowed"


def test_a_group_that_was_told_to_stop_is_not_restarted():
    group = running(1, max_restarts=5)
    group.signalled(signal.SIGINT, 0.0)
    assert ends(group, 0, -signal.SIGINT) == [Done()]


def test_with_scope_worker_the_failed_one_alone_is_replaced():
    group = running(3, max_restarts=1, scope="worker")
    assert ends(group, 1, 1) == [Start((1,), 1)]
    assert group.phase is Phase.RUNNING
    assert group.alive == {0, 1, 2}
    assert ends(group, 2, 1, now=2.0) == [], "the budget is spent"
    assert group.phase is Phase.FAILING


def test_with_scope_worker_nobody_is_replaced_who_was_told_to_stop():
    group = running(2, max_restarts=5, scope="worker")
    group.signalled(signal.SIGTERM, 0.0)
    assert ends(group, 0, -signal.SIGTERM) == []
    assert ends(group, 1, -signal.SIGTERM) == [Done()]


def test_bad_configuration_is_never_retried():
    group = running(2, max_restarts=5)
    ends(group, 0, 64)
    assert ends(group, 1, 75) == [Done()]
    group = running(2, max_restarts=5, scope="worker")
    assert ends(group, 0, 64) == []
    assert group.phase is Phase.FAILING


def test_with_scope_worker_good_ends_need_no_replacement():
    group = running(2, max_restarts=1, scope="worker")
    assert ends(group, 0, 0) == []
    assert ends(group, 1, 0) == [Done()]


def test_nobody_is_replaced_alone_in_a_world_that_has_begun_to_finish():
    """There would be nobody to form a group with."""
    group = running(2, max_restarts=1, scope="worker")
    ends(group, 0, 0)
    assert ends(group, 1, 1) == [Start((0, 1), 1)]
    group = running(3, max_restarts=5, scope="worker", elastic=True)
    ends(group, 0, 0)
    assert ends(group, 1, 1) == []
    assert (group.phase, group.alive) == (Phase.RUNNING, {2})
    assert ends(group, 2, 0) == [Done()]
    assert group.first_failure is None


def test_in_an_elastic_world_a_failure_stops_nobody():
    group = running(3, elastic=True)
    assert ends(group, 0, -signal.SIGKILL) == []
    assert group.phase is Phase.RUNNING
    ends(group, 1, 0)
    assert ends(group, 2, 0) == [Done()]
    assert group.first_failure is None, "the job finished with the members it had left"


def test_in_an_elastic_world_too_all_are_restarted_while_restarts_are_left():
    group = running(3, elastic=True, max_restarts=1)
    assert ends(group, 1, 3, now=10.0) == []
    assert group.tick(15.0) == [Signal((0, 2), signal.SIGTERM)]
    assert ends(group, 0, 0) == [], "it ended well, but only since it was told to end"
    assert ends(group, 2, -signal.SIGTERM) == [Start((0, 1, 2), 1)]
    assert ends(group, 1, 3) == []
    assert (group.phase, group.deadline) == (Phase.RUNNING, NO_DEADLINE), "no restart is left, so the others go on"


def test_an_elastic_world_that_begins_to_finish_after_a_failure_is_left_alone():
    group = running(3, elastic=True, max_restarts=1)
    ends(group, 1, 3, now=10.0)
    assert ends(group, 0, 0, now=11.0) == []
    assert group.tick(15.0) == []
    assert ends(group, 2, 0, now=20.0) == [Done()]
    assert group.first_failure is None


def test_in_an_elastic_world_bad_configuration_stops_nobody():
    group = running(2, elastic=True, max_restarts=1)
    assert ends(group, 0, 64) == []
    assert group.phase is Phase.RUNNING


def test_an_elastic_world_in_which_nobody_ends_well_has_failed():
    group = running(2, elastic=True)
    ends(group, 0, 1, now=1.0)
    ends(group, 1, 75, now=2.0)
    assert group.first_failure.worker == 0


@pytest.mark.parametrize("scope", ["gang", "worker"])
def test_an_elastic_world_has_failed_if_all_fail_that_went_on_after_one_had_left(scope: str):
    group = running(3, max_restarts=1, scope=scope, elastic=True)
    ends(group, 2, 0, now=1.0)
    assert ends(group, 0, 1, now=20.0) == []
    assert ends(group, 1, 75, now=20.0) == [Start((0, 1, 2), 1)]
    ends(group, 2, 0, now=30.0)
    ends(group, 1, 75, now=40.0)
    assert ends(group, 0, 1, now=40.0) == [Done()]
    assert group.first_failure.worker == 0


@pytest.mark.parametrize("returncode", [1, 75])
def test_an_elastic_world_has_finished_whatever_becomes_of_who_was_outside_it(returncode: int):
    """A replacement that came too late, or one that was declared dead and woke up."""
    group = running(3, max_restarts=5, scope="worker", elastic=True)
    assert ends(group, 1, -signal.SIGKILL) == [Start((1,), 1)]
    ends(group, 0, 0)
    ends(group, 2, 0)
    assert ends(group, 1, returncode, outside=True) == [Done()]
    assert group.first_failure is None


def test_a_replacement_that_was_admitted_counts_as_the_others_do():
    group = running(2, max_restarts=1, scope="worker", elastic=True)
    assert ends(group, 1, -signal.SIGKILL) == [Start((1,), 1)]
    ends(group, 0, 0)
    assert ends(group, 1, 75) == [Done()]
    assert group.first_failure.worker == 1
