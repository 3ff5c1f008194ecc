"""The actions that copy an operation's arrays from and to a GPU, and what they wait for."""

from __future__ import annotations

import numpy as np

from ferrorpc.collectives.algorithms import direct
from ferrorpc.collectives.algorithms.plan import Buffer, Copy, Plan, Receive, Region, Send
from ferrorpc.collectives.dependencies import UNBOUNDED, bound, dependencies_of
from ferrorpc.collectives.device_transfers import transfers_for, with_transfers
from ferrorpc.collectives.fusion import DownloadInput, UploadResult, fused

COUNT = 90


def test_host_arrays_need_no_transfers() -> None:
    x = np.zeros(3)
    assert transfers_for([x], [x], 1) is None
    assert transfers_for([], None, 0) is None


def test_every_input_is_downloaded_and_every_slice_of_a_result_is_uploaded_by_itself() -> None:
    tasks = with_transfers(fused(direct.all_reduce_two_shot(COUNT, 0, 3)), 1)
    assert tasks[0] == DownloadInput(Region(Buffer.IN, 0))
    uploaded = [task.region for task in tasks if isinstance(task, UploadResult)]
    assert uploaded == [Region(Buffer.OUT, 0, start, start + 30) for start in (0, 30, 60)]


def test_parts_that_overlap_are_uploaded_as_one() -> None:
    parts = (Region(Buffer.OUT, 0, 10, 30), Region(Buffer.OUT, 0, 0, 20))
    plan = Plan(tuple(Receive(1, slot, region) for slot, region in enumerate(parts)))
    assert with_transfers(plan.actions, 0)[-1] == UploadResult(Region(Buffer.OUT, 0, 0, 30))
    whole = Plan((Receive(1, 0, Region(Buffer.OUT, 0, 5, 9)), Copy(Region(Buffer.IN), Region(Buffer.OUT))))
    assert with_transfers(whole.actions, 0)[-1] == UploadResult(Region(Buffer.OUT))


def test_a_send_goes_as_far_as_its_input_is_downloaded_and_a_part_is_uploaded_as_far_as_it_is_written() -> None:
    tasks = with_transfers(fused(direct.all_reduce_two_shot(COUNT, 0, 3)), 1)
    steps = dependencies_of(tasks, 0)
    done = [0] * len(tasks)
    sends = [index for index, task in enumerate(tasks) if isinstance(task, Send) and task.region.buffer is Buffer.IN]
    starts = {index: tasks[index].region.start for index in sends}
    done[0] = 50
    assert {starts[index]: bound(steps[index].waits, done) for index in sends} == {30: 20, 60: 0}
    receive = next(index for index, task in enumerate(tasks) if isinstance(task, Receive) and task.region.start == 60)
    upload = next(index for index, task in enumerate(tasks) if isinstance(task, UploadResult) and task.region.start == 60)
    done[0], done[receive] = UNBOUNDED, 7
    assert bound(steps[upload].waits, done) == 7
    done[receive] = UNBOUNDED
    assert bound(steps[upload].waits, done) == UNBOUNDED
