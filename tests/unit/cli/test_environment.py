"""The environment variables of a worker."""

from pathlib import Path

from ferrorpc.cli.launcher.environment import given_settings, launcher_environment, worker_environment
from ferrorpc.cli.launcher.plan import Plan
from ferrorpc.cli.launcher.worker_group import FailurePolicy


def plan(**changes):
    given = {
        "command": ("python", "train.py"),
        "processes": 4,
        "nodes": (1, 1),
        "world": (4, 4),
        "node_rank": 0,
        "node": "box",
        "coordinator": "127.0.0.1:4000",
        "owns_coordinator": True,
        "job": "j",
        "master": ("127.0.0.1", 4001),
        "policy": FailurePolicy(max_restarts=2),
    }
    return Plan(**{**given, **changes})


def environment(worker=2, attempt=0, base=None, **changes):
    return worker_environment(plan(**changes), worker, attempt, base or {}, Path("/errors"))


def test_torchruns_contract_is_complete():
    found = environment(attempt=1)
    assert {name: found[name] for name in found if not name.startswith(("FERRORPC", "GRPC", "PYTHON", "OMP"))} == {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4001",
        "TORCHELASTIC_RUN_ID": "j",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_ERROR_FILE": "/errors/box-2.json",
    }


def test_ferrorpcs_own_variables():
    found = environment()
    assert {name: value for name, value in found.items() if name.startswith("FERRORPC")} == {
        "FERRORPC_COORDINATOR": "127.0.0.1:4000",
        "FERRORPC_JOB": "j",
        "FERRORPC_NAME": "box-2",
        "FERRORPC_WORLD_SIZE": "4",
    }


def test_forks_are_safe_and_output_is_not_held_back():
    found = environment()
    assert found["GRPC_ENABLE_FORK_SUPPORT"] == "0"
    assert found["PYTHONUNBUFFERED"] == "1"


def test_the_second_node_of_a_fixed_world_continues_the_ranks():
    found = environment(worker=1, nodes=(2, 2), world=(8, 8), node_rank=1)
    assert (found["RANK"], found["WORLD_SIZE"], found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == ("5", "8", "1", "2")


def test_an_elastic_world_leaves_ranks_to_the_coordinator():
    found = environment(nodes=(1, 3), world=(4, 12), node_rank=2, base={"RANK": "7", "WORLD_SIZE": "9"})
    assert "RANK" not in found
    assert "WORLD_SIZE" not in found
    assert found["FERRORPC_WORLD_SIZE"] == "4:12"
    assert found["FERRORPC_RANK_HINT"] == "10"


def test_without_a_node_rank_there_is_no_hint_either():
    found = environment(nodes=(1, 3), world=(4, 12), node_rank=None)
    assert {"RANK", "GROUP_RANK", "FERRORPC_RANK_HINT"} & set(found) == set()
    assert found["LOCAL_RANK"] == "2"


def test_what_an_outer_launcher_set_is_not_inherited_but_the_users_settings_are():
    base = {"TORCHELASTIC_USE_AGENT_STORE": "True", "FERRORPC_RANK_HINT": "3", "FERRORPC_LEASE": "9", "PATH": "/bin"}
    found = environment(base=base)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in found
    assert "FERRORPC_RANK_HINT" not in found
    assert (found["FERRORPC_LEASE"], found["PATH"]) == ("9", "/bin")


def test_omp_num_threads_is_a_default_only():
    assert environment(base={"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert environment(processes=10_000)["OMP_NUM_THREADS"] == "1"


def test_a_launcher_in_a_worker_of_another_knows_that_workers_job_only_where_a_flag_names_a_job_or_a_coordinator():
    settings = {"FERRORPC_TRANSPORT": "grpc", "PATH": "/bin"}
    outer = {name: value for name, value in environment().items() if name.startswith("FERRORPC")} | settings
    meeting_place = {"FERRORPC_COORDINATOR": "127.0.0.1:4000", "FERRORPC_JOB": "j"}
    assert launcher_environment(outer, joins=False) == outer, "no launcher is around"
    outer |= {"FERRORPC_HTTP_PORT": "29701"}
    launcher = {"FERRORPC_LAUNCH": "0a1b2c3d", "FERRORPC_GIVEN": given_settings(outer)}
    inner = launcher | settings
    assert launcher_environment(outer | launcher, joins=False) == inner
    assert launcher_environment(outer | launcher, joins=True) == inner | meeting_place
    own = {"FERRORPC_COORDINATOR": "127.0.0.1:1", "FERRORPC_WORLD_SIZE": "1:2"}
    assert launcher_environment(outer | launcher | own, joins=False) == inner | own, "the worker has set these itself"
