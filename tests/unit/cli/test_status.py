"""What `ferrorpc status` makes of the coordinator's answer."""

import json

from ferrorpc.cli.status import as_json_text, as_text
from ferrorpc.cli.table import table
from ferrorpc.v1 import identity_pb2, session_pb2


def answer():
    return session_pb2.StatusResponse(
        position=identity_pb2.Position(cluster_id="c1", epoch=2, generation=5, revision=9),
        job="night",
        members=[
            identity_pb2.Member(name="spare", rank=-1, state=identity_pb2.MEMBER_STATE_WAITING, host="b", beat_age_ms=100),
            identity_pb2.Member(
                name="a-1", rank=1, state=identity_pb2.MEMBER_STATE_STALLED, host="a", step=12, beat_age_ms=4200,
                reason="no beat for 4.2 s", activity="all_reduce #12",
            ),
            identity_pb2.Member(name="a-0", rank=0, state=identity_pb2.MEMBER_STATE_ACTIVE, host="a", step=13, beat_age_ms=40),
        ],
        barriers=[
            session_pb2.BarrierStatus(name="epoch", generation=5, ordinal=3, arrived_ranks=[0], missing_ranks=[1], age_ms=1500)
        ],
        generations=[
            session_pb2.GenerationStatus(generation=4, size=3, reason="3 of 3 joined", end_reason="rank 2 was lost"),
            session_pb2.GenerationStatus(generation=5, size=2, reason="replaces generation 4: rank 2 was lost"),
        ],
        store_keys=2,
        store_bytes=30,
        durable=True,
        version="0.1.0",
        waiting_reason="1 of 2 joined",
    )  # fmt: skip


def test_the_page_shows_members_in_rank_order_with_what_is_known_of_each():
    lines = as_text(answer()).splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("rank"))
    rows = [line.split() for line in lines[header + 1 : header + 4]]
    assert [row[0] for row in rows] == ["0", "1", "-"]
    assert rows[1][:6] == ["1", "a-1", "stalled", "a", "12", "4.2"]
    assert "all_reduce #12" in lines[header + 2]
    assert lines[header + 2].endswith("no beat for 4.2 s")


def test_the_page_names_who_is_missing_at_a_barrier_and_why_generations_began_and_ended():
    text = as_text(answer())
    assert "epoch #3 of generation 5: 1 arrived, missing ranks 1, open for 1.5 s" in text
    assert "4: 3 members, 3 of 3 joined; ended: rank 2 was lost" in text
    assert "5: 2 members, replaces generation 4: rank 2 was lost" in text
    assert "waiting: 1 of 2 joined" in text
    assert "journal on disk" in text


def test_an_empty_job_says_so():
    assert "no members" in as_text(session_pb2.StatusResponse(job="x"))


def test_json_keeps_the_protocols_names_and_its_zeros():
    found = json.loads(as_json_text(answer()))
    assert found["members"][2]["rank"] == 0
    assert found["members"][1]["state"] == "MEMBER_STATE_STALLED"
    assert found["barriers"][0]["missing_ranks"] == [1]


def test_columns_are_as_wide_as_their_widest_cell():
    assert table(("a", "long"), [("xxx", "1")], right=frozenset({"long"})) == "a    long\nxxx     1"
