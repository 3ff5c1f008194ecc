"""A job's status as the page reads it: each thing under its own name."""

from ferrorpc_coordinator.web import status_json as module
from ferrorpc_coordinator.web.status_json import status_json

from ferrorpc.v1 import identity_pb2, session_pb2

STATUS = session_pb2.StatusResponse(
    position={"cluster_id": "c", "epoch": 1, "generation": 2},
    job="j",
    version="v",
    durable=True,
    headline={"level": "warn", "title": "t", "details": ["d"]},
    store_keys=3,
    store_bytes=4,
    members=[
        identity_pb2.Member(
            name="m0",
            rank=5,
            state=identity_pb2.MEMBER_STATE_STALLED,
            host="h",
            address="h:1",
            labels=[{"name": "device", "value": "cuda:1"}, {"name": "other", "value": "x"}, {"name": "pid", "value": "77"}],
            step=6,
            beat_age_ms=7,
            reason="silent",
            activity="barrier",
            behind_ms=8,
            operation_ms=9,
            links=[{"peer_rank": 10, "kind": "grpc", "sent_bytes": 11}],
            training={"steps": 12, "compute_ms": 13, "exposed_ms": 14, "hidden_ms": 15},
        ),
        identity_pb2.Member(name="m1", rank=-1, state=identity_pb2.MEMBER_STATE_LEFT),
    ],
    barriers=[
        {
            "name": "b",
            "generation": 16,
            "ordinal": 17,
            "arrived_ranks": [18],
            "missing_ranks": [19],
            "age_ms": 20,
            "arrived_after_ms": [21],
        }
    ],
    generations=[
        {"generation": 22, "size": 23, "reason": "r", "end_reason": "e", "broken": True, "age_ms": 24, "lasted_ms": 25},
        {"generation": 26, "size": 27, "reason": "s", "age_ms": 0},
    ],
    occurrences=[{"number": 28, "kind": "dead", "text": "t", "rank": 29, "generation": 30, "age_ms": 31}],
    stragglers=[{"rank": 32, "barriers": 33, "waited_ms": 34}],
)
"""No two numbers are alike, so that none can stand for another."""

ENDED = {"generation": 22, "size": 23, "reason": "r", "end_reason": "e", "broken": True, "age_ms": 24, "lasted_ms": 25}
GOING_ON = {"generation": 26, "size": 27, "reason": "s", "end_reason": "", "broken": False, "age_ms": 0, "lasted_ms": None}
SHOWN = {
    "at_ms": 35,
    "job": "j",
    "version": "v",
    "durable": True,
    "cluster_id": "c",
    "epoch": 1,
    "generation": 2,
    "headline": {"level": "warn", "title": "t", "details": ["d"]},
    "store": {"keys": 3, "bytes": 4},
    "members": {
        "name": ["m0", "m1"],
        "rank": [5, -1],
        "state": ["stalled", "left"],
        "host": ["h", ""],
        "address": ["h:1", ""],
        "step": [6, 0],
        "beat_age_ms": [7, 0],
        "behind_ms": [8, 0],
        "operation_ms": [9, 0],
        "activity": ["barrier", ""],
        "reason": ["silent", ""],
        "training": [[12, 13, 14, 15], None],
        "pid": ["77", ""],
        "device": ["cuda:1", ""],
    },
    "links": [[5, 10, "grpc", 11]],
    "barriers": [
        {
            "name": "b",
            "generation": 16,
            "ordinal": 17,
            "age_ms": 20,
            "arrived": [18],
            "arrived_after_ms": [21],
            "missing": [19],
        }
    ],
    "generations": [ENDED, GOING_ON],
    "occurrences": [{"number": 28, "kind": "dead", "text": "t", "rank": 29, "age_ms": 31}],
    "stragglers": [{"rank": 32, "barriers": 33, "waited_ms": 34}],
}


def test_every_value_is_under_its_own_name():
    assert status_json(STATUS, 35) == SHOWN


def test_every_field_of_a_member_is_shown_or_left_out_on_purpose() -> None:
    with_a_form_of_their_own = {"state", "labels", "links", "training"}
    left_out = {"incarnation", "step_age_ms"}
    known = set(module._COLUMNS) | with_a_form_of_their_own | left_out
    assert {field.name for field in identity_pb2.Member.DESCRIPTOR.fields} == known
