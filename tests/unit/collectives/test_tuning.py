"""What choices rest on: the table in force, what a setting asks for, where hosts are; and that bits never rest on it."""

from __future__ import annotations

import pytest

from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.collectives.algorithms.algorithm import Order
from ferrorpc.collectives.call import Call, Operation, example
from ferrorpc.collectives.select import REFERENCE, explain, plan_for, select
from ferrorpc.collectives.tuning import Tuning, packaged_table, parse_algorithms, published
from ferrorpc.config import Config
from ferrorpc.errors import CodecError, ConfigError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.wire.cost_table import Costs, CostTable

SLOW_STARTS = CostTable("slow starts", {2: Costs(1.0, 0.0, 1e-12, 0.0)})
SLOW_BYTES = CostTable("slow bytes", {2: Costs(1e-9, 0.0, 1.0, 0.0)})
TABLES = (None, SLOW_STARTS, SLOW_BYTES)
BUSY = CostTable("busy senders", {2: Costs(0.0, 1.0, 0.0, 0.0)})


def test_the_packaged_can_be_read_and_supposes_that_no_processor_is_short():
    for ranks in (2, 64):
        assert packaged_table().costs(ranks).processors is None


def test_what_the_order_of_summation_refers_to_never_changes():
    assert Costs(90e-6, 0.0, 0.65e-9, 0.15e-9) == REFERENCE


@pytest.mark.parametrize("size", [2, 4, 16, 17, 24, 32, 33])
def test_a_table_never_changes_the_order_of_summation(size):
    for operation in ("all_reduce", "reduce", "reduce_scatter"):
        for nbytes in (4, 4096, 1 << 20, 16 << 20, 1 << 30):
            call = example(operation, nbytes, size)
            orders = {select(call, size, Tuning(table)).order for table in TABLES}
            layouts = {select(call, size, Tuning(hosts=hosts)).order for hosts in ((), (0,) * (size - 1) + (1,))}
            assert len(orders | layouts) == 1, (operation, nbytes)


def test_a_table_chooses_among_algorithms_of_equal_order():
    call = example("all_reduce", 1 << 20, 4)
    assert [select(call, 4, Tuning(table)).name for table in TABLES] == ["two_shot", "one_shot", "two_shot"]
    call = example("all_reduce", 1 << 20, 32)
    assert select(call, 32).order is Order.PAIRS
    chosen = [select(call, 32, Tuning(table)).name for table in TABLES]
    assert chosen == ["rabenseifner", "recursive_doubling", "rabenseifner"]


def test_messages_that_keep_their_sender_busy_count():
    assert select(Call(Operation.BARRIER), 8).name == "direct", "a move goes by no figure"
    call = example("broadcast", 1 << 20, 9)
    assert select(call, 9, Tuning(BUSY)).name == "tree"


def test_a_setting_asks_for_calls_that_ask_for_nothing():
    choices = Config({}, {"FERRORPC_ALGORITHM": "all_reduce=ring, barrier=dissemination"})["algorithm"]
    tuning = Tuning(algorithms=parse_algorithms(choices, "FERRORPC_ALGORITHM"))
    assert tuning.applied(example("all_reduce", 64, 2)).algorithm == "ring"
    assert tuning.applied(Call(Operation.BARRIER)).signature == "barrier(algorithm=dissemination)"
    assert tuning.applied(example("broadcast", 64, 2)).algorithm is None
    asked = Call(Operation.ALL_REDUCE, algorithm="tree")
    assert tuning.applied(asked) is asked
    compressed = Call(Operation.ALL_REDUCE, wire="bf16")
    assert tuning.applied(compressed) is compressed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ring", "OPERATION=ALGORITHM"),
        ("all_reduce=", "OPERATION=ALGORITHM"),
        ("all_reduce=ring,all_reduce=tree", "named twice"),
        ("all_reduse=ring", "no operation 'all_reduse'"),
        ("broadcast=ring", "broadcast has no algorithm 'ring'"),
    ],
)
def test_a_setting_that_means_nothing_is_refused_by_its_name(text, words):
    with pytest.raises(ConfigError, match=f"FERRORPC_ALGORITHM.*{words}"):
        parse_algorithms(Config({}, {"FERRORPC_ALGORITHM": text})["algorithm"], "FERRORPC_ALGORITHM")


def test_hosts_make_hierarchical_possible_where_there_are_several_with_several_ranks():
    asked = Call(Operation.ALL_REDUCE, example("all_reduce", 4096, 4).inputs, algorithm="hierarchical")
    layout = Tuning(hosts=(0, 0, 1, 1))
    assert select(asked, 4, layout).name == "hierarchical"
    for hosts in ((), (0, 0, 0, 0), (0, 1, 2, 3)):
        with pytest.raises(UsageError, match="on several hosts"):
            plan_for(asked, 0, 4, Tuning(hosts=hosts))
    assert layout.among([0, 2, 3]).hosts == (0, 1, 1)
    wanted = Tuning(algorithms=parse_algorithms([("all_reduce", "hierarchical")], "argument"), hosts=(0, 0, 1, 1))
    assert wanted.applied(example("all_reduce", 64, 4)).algorithm == "hierarchical"
    assert wanted.among([0, 1]).applied(example("all_reduce", 64, 2)).algorithm is None


def test_a_published_table_that_is_none_is_refused():
    assert published("") is None
    assert published(SLOW_BYTES.text()) == SLOW_BYTES
    with pytest.raises(CodecError, match="published a cost table"):
        published("{}")


def test_explain_says_by_which_table_and_what_was_asked_for():
    text = explain(example("all_reduce", 1 << 20, 4), 4, Tuning(SLOW_STARTS))
    assert "one_shot, in rank order" in text
    assert "by the cost table 'slow starts': 1e+06 us a round" in text
    tuning = Tuning(algorithms=((Operation.ALL_REDUCE, "ring"),))
    assert "(asked for by the setting algorithm)" in explain(example("all_reduce", 64, 2), 2, tuning)
    assert "(asked for)" not in explain(example("all_gather", 64, 2), 2)


def test_moves_take_an_algorithm_by_name():
    groups = [ProcessGroup(backend) for backend in SimulatedBackend.create_group(1)]
    with groups[0] as group:
        assert "dissemination" in group.explain("barrier", 0)
        with pytest.raises(UsageError, match="no algorithm 'ring'"):
            group.broadcast(1.0, algorithm="ring")
