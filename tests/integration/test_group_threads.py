"""Threads that each have a group of their own, or a tag, beside each other in real processes."""

from __future__ import annotations

import pytest

from tests.integration.launching import run, write_script

RANKS = 2
SCRIPT = """
    import threading
    import numpy as np
    import ferrorpc

    with ferrorpc.init_process_group(timeout=40) as group:
        groups = [group.subgroup(range(group.size)) for _ in range(3)]
        key = f"rounds/{group.generation}"
        wrong = []

        def work(number):
            own, others = groups[number], range(group.size)
            right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
            try:
                for turn in range(60):
                    x = np.full(10 ** (turn % 5) + number, own.rank + number + turn, np.float64)
                    if not (own.all_reduce(x) == sum(rank + number + turn for rank in others)).all():
                        wrong.append(f"sum {turn} of thread {number}")
                    own.barrier()
                    sent = group.send(x, right, tag=number, async_op=True)
                    if not (group.recv(left, tag=number) == left + number + turn).all():
                        wrong.append(f"message {turn} of thread {number}")
                    sent.wait()
                    group.store.add(key)
            except Exception as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        group.barrier()
        print(wrong, group.store.get(key).decode())
"""


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_threads_with_groups_and_tags_of_their_own_do_not_meet(tmp_path, transport):
    result = run("-n", str(RANKS), write_script(tmp_path, SCRIPT), FERRORPC_TRANSPORT=transport)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"{rank}: [] {RANKS * 3 * 60}" for rank in range(RANKS)]
