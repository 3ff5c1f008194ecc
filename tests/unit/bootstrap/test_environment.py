"""What each launcher's variables mean."""

import pytest

from ferrorpc.bootstrap.environment import (
    LaunchInfo,
    detect_launch,
    first_host,
    job_named_after,
    member_name,
    own_coordinator_address,
    run_label,
)
from ferrorpc.config import Config, plain_name
from ferrorpc.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run7",
}
PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "trainer-0-0",
    "PET_MASTER_PORT": "29400",
}
INDEXED = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3", "FERRORPC_JOB": "trial"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}


def launch_of(environment: dict[str, str], **arguments: object) -> LaunchInfo:
    return detect_launch(environment, Config(arguments, environment))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, LaunchInfo("nothing", (1, 1))),
        (TORCHRUN, LaunchInfo("RANK and WORLD_SIZE", (8, 8), 5, None, 1, 1, 4, "node0", "run7")),
        (  # what torchrun says where it was not told a name
            TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"},
            LaunchInfo("RANK and WORLD_SIZE", (8, 8), 5, None, 1, 1, 4, "node0", "node0.29500"),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            LaunchInfo("RANK and WORLD_SIZE", (2, 2), 0, master="a", run_id="a.1"),
        ),
        (PET, LaunchInfo("PET_NNODES and PET_NPROC_PER_NODE", (2, 2), 1, None, 0, 1, 1, "trainer-0-0", "trainer-0-0.29400")),
        (
            {f"PET_{name}": value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC")},
            LaunchInfo("PET_RANK and PET_WORLD_SIZE", (8, 8), 5, None, 1, 1, 4, "node0", "node0.29500"),
        ),
        (
            PET | {"PET_NPROC_PER_NODE": "4", "LOCAL_RANK": "2"},
            LaunchInfo("PET_NNODES and PET_NPROC_PER_NODE", (8, 8), 6, None, 2, 1, 4, "trainer-0-0", "trainer-0-0.29400"),
        ),
        (
            PET | {"PET_RDZV_ID": "trial"},
            LaunchInfo("PET_NNODES and PET_NPROC_PER_NODE", (2, 2), 1, None, 0, 1, 1, "trainer-0-0", "trial"),
        ),
        (
            {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"},
            LaunchInfo("PET_NNODES and PET_NPROC_PER_NODE", (8, 8), None, None, None, None, 4),
        ),
        (SLURM, LaunchInfo("SLURM_PROCID and SLURM_STEP_NUM_TASKS", (4, 4), 3, None, 1, 1, None, "gpu07", "4711.0")),
        (
            SLURM | {"SLURM_STEP_NUM_NODES": "1", "MASTER_ADDR": "gpu07-ib"},
            LaunchInfo("SLURM_PROCID and SLURM_STEP_NUM_TASKS", (4, 4), 3, None, 1, 1, 4, "gpu07-ib", "4711.0"),
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "4711", "ENVIRONMENT": "BATCH"},
            LaunchInfo("nothing", (1, 1)),
        ),
        ({"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}, LaunchInfo("nothing", (1, 1))),
        ({"SLURM_PROCID": "0", "ENVIRONMENT": "production"}, LaunchInfo("nothing", (1, 1))),  # a script that sets it itself
        ({"SLURM_NTASKS": "16", "SLURM_JOB_ID": "4711"}, LaunchInfo("nothing", (1, 1))),  # the shell of salloc
        (
            {"SLURM_PROCID": "2", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "gpu07"},
            LaunchInfo("SLURM_PROCID and SLURM_NTASKS", (16, 16), 2, master="gpu07", run_id="4711"),
        ),
        (OMPI, LaunchInfo("OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE", (2, 2), 1, None, 1, None, 2)),
        (
            OMPI | {"MASTER_ADDR": "a", "PMIX_NAMESPACE": "b@1"},
            LaunchInfo("OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE", (2, 2), 1, None, 1, None, 2, "a", "b@1"),
        ),
        (
            OMPI | {"OMPI_MCA_ess_base_jobid": "47"},
            LaunchInfo("OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE", (2, 2), 1, None, 1, None, 2, run_id="47"),
        ),
        (PMI, LaunchInfo("PMI_RANK and PMI_SIZE", (3, 3), 0, None, 0, None, 3, launcher_variable="PMI_RANK")),
        ({"FERRORPC_WORLD_SIZE": "4"}, LaunchInfo("FERRORPC_WORLD_SIZE", (4, 4))),
        ({"FERRORPC_WORLD_SIZE": "2:4", "FERRORPC_RANK_HINT": "3"}, LaunchInfo("FERRORPC_WORLD_SIZE", (2, 4), hinted_rank=3)),
        ({"FERRORPC_WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "2"}, LaunchInfo("FERRORPC_WORLD_SIZE", (4, 4), hinted_rank=2)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_each_launcher_is_understood(environment, expected):
    assert launch_of(environment) == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "a world of one: no launcher's variables are set"),
        (TORCHRUN, "rank 5 of 8, from RANK and WORLD_SIZE"),
        (TORCHRUN | {"FERRORPC_WORLD_SIZE": "8"}, "rank 5 of 8, from FERRORPC_WORLD_SIZE, RANK and WORLD_SIZE"),
        (TORCHRUN | {"FERRORPC_RANK_HINT": "0"}, "rank 5 of 8, from RANK and WORLD_SIZE"),
        ({"FERRORPC_WORLD_SIZE": "4"}, "a world of 4, from FERRORPC_WORLD_SIZE"),
        (
            {"FERRORPC_WORLD_SIZE": "2:4", "FERRORPC_RANK_HINT": "0"},
            "a world of 2 to 4, rank 0 if it is free, from FERRORPC_WORLD_SIZE",
        ),
    ],
)
def test_the_log_says_in_words_how_a_process_was_launched(environment, words):
    assert str(launch_of(environment)) == words


def test_the_first_that_speaks_wins():
    order = [{"FERRORPC_WORLD_SIZE": "8"}, TORCHRUN, PET, SLURM, OMPI, PMI]
    for first in range(1, len(order)):
        everything = {name: value for words in reversed(order[first:]) for name, value in words.items()}
        alone = launch_of(order[first])
        assert launch_of(everything).source == alone.source
        assert launch_of(everything).pinned_rank == alone.pinned_rank
    assert launch_of(order[0] | TORCHRUN).source == "FERRORPC_WORLD_SIZE, RANK and WORLD_SIZE"


def test_an_empty_variable_is_not_set():
    """As where a compose file passes on what nobody set."""
    empty = dict.fromkeys(TORCHRUN, "") | {"JOB_COMPLETION_INDEX": "", "PMI_RANK": ""}
    assert launch_of(empty).source == "nothing"
    assert launch_of(empty | SLURM) == launch_of(SLURM)


def test_a_launchers_rank_is_pinned_in_the_same_fixed_world_and_a_hint_in_another():
    same = launch_of(TORCHRUN | {"FERRORPC_WORLD_SIZE": "8"})
    assert (same.world, same.pinned_rank, same.hinted_rank) == ((8, 8), 5, None)
    elastic = launch_of(TORCHRUN | {"FERRORPC_WORLD_SIZE": "4:8"})
    assert (elastic.world, elastic.pinned_rank, elastic.hinted_rank) == ((4, 8), None, 5)
    other = launch_of(TORCHRUN | {"FERRORPC_WORLD_SIZE": "6"})
    assert (other.world, other.pinned_rank, other.hinted_rank) == ((6, 6), None, 5)


def test_a_member_of_an_elastic_world_knows_its_number_on_its_node_too():
    """Which is that of its GPU: `ferrorpc run` gives it no rank."""
    found = launch_of({"FERRORPC_WORLD_SIZE": "2:4", "FERRORPC_RANK_HINT": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"})
    assert (found.world, found.hinted_rank, found.local_rank) == ((2, 4), 3, 3)


@pytest.mark.parametrize("outer", [SLURM, OMPI, PMI, PET, INDEXED], ids=["slurm", "open_mpi", "pmi", "kubeflow", "index"])
def test_a_worker_of_our_launcher_is_not_taken_for_the_task_in_which_that_runs(outer):
    """As with `srun ferrorpc run --nnodes 2 -n 4 train.py`: every worker has SLURM_LOCALID=0 and would choose the first GPU."""
    ours = {"FERRORPC_LAUNCH": "0a1b2c3d", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    for text, world in (("8", (8, 8)), ("4:8", (4, 8))):
        found = launch_of(outer | ours | {"FERRORPC_WORLD_SIZE": text})
        assert (found.world, found.local_rank, found.pinned_rank, found.hinted_rank) == (world, 3, None, None)


def test_an_argument_comes_before_the_variables():
    assert launch_of({"FERRORPC_WORLD_SIZE": "4"}, world_size=(2, 2)).world == (2, 2)
    assert launch_of({"FERRORPC_WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "2"}, rank_hint=1).hinted_rank == 1


HALVES = ("WORLD_SIZE", "PET_WORLD_SIZE", "PET_NODE_RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@pytest.mark.parametrize("left", HALVES)
def test_our_own_variables_and_another_launchers_come_before_what_is_left_of_a_launcher(left):
    assert launch_of({left: "4", "FERRORPC_WORLD_SIZE": "1"}) == LaunchInfo("FERRORPC_WORLD_SIZE", (1, 1))
    other = PMI if left in OMPI else OMPI
    assert launch_of(other | {left: "4"}) == launch_of(other)
    with pytest.raises(ConfigError, match="set FERRORPC_WORLD_SIZE"):
        launch_of({left: "4"})


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "1"}, "RANK"),
        ({"RANK": "1", "FERRORPC_WORLD_SIZE": "2"}, "WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "99999999999"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "first"}, "LOCAL_RANK"),
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, "PET_NNODES"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2"}, r"PET_NODE_RANK=2 (.|\n)*from 0 to 1"),
        ({"PET_NODE_RANK": "0"}, "PET_NNODES"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID"),
        ({"SLURM_STEP_NUM_TASKS": "2", "ENVIRONMENT": "BATCH"}, "SLURM_PROCID"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK"),
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        ({"PMI_SIZE": "2"}, "PMI_RANK"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX"),
        ({"FERRORPC_COORDINATOR": "host:29700"}, "FERRORPC_WORLD_SIZE"),
        ({"FERRORPC_WORLD_SIZE": "4:2"}, "FERRORPC_WORLD_SIZE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_names_the_variable(environment, named):
    with pytest.raises(ConfigError, match=named):
        launch_of(environment)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, "node0:29700"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "127.0.0.1:29700"),
        (TORCHRUN | {"MASTER_ADDR": "fe80::1"}, "[fe80::1]:29700"),
        (SLURM, "gpu07:29700"),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, "127.0.0.1:29700"),
        (OMPI, "127.0.0.1:29700"),
    ],
)
def test_rank_0_starts_a_coordinator_where_the_launcher_says_it_is_but_never_on_the_master_port(environment, expected):
    assert own_coordinator_address(launch_of(environment), 29700) == expected


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, {"run": "0a1b"}),
        ({"FERRORPC_LAUNCH": ""}, {}),
        ({"LOCAL_WORLD_SIZE": "4"}, {}),
        ({"FERRORPC_WORLD_SIZE": "2:8"}, {}),
        ({"FERRORPC_WORLD_SIZE": "16"}, {}),
    ],
    ids=str,
)
def test_a_member_names_its_run_where_one_launcher_started_the_whole_of_a_fixed_world(changes, label):
    ours = TORCHRUN | {"LOCAL_WORLD_SIZE": "8", "FERRORPC_WORLD_SIZE": "8", "FERRORPC_LAUNCH": "0a1b/2c3d"} | changes
    assert run_label(ours, launch_of(ours)) == label


def test_a_run_may_have_a_name_that_no_job_may_have():
    """torchrun takes any: `--rdzv-id "my run/1"`."""
    runs = ["4711.0", "my run/1", "my run/2", "\u00fc", "\udcff", "r" * 125, "r" * 126]
    jobs = [job_named_after(run) for run in runs]
    assert [plain_name(job) for job in jobs] == jobs
    assert jobs[0] == "run-4711.0"
    assert len(set(jobs)) == len(runs), "runs that use one port by mistake do not mix"


@pytest.mark.parametrize("environment", [{"FERRORPC_WORLD_SIZE": "4"}, TORCHRUN | {"MASTER_ADDR": ""}])
def test_without_a_rank_or_a_master_a_coordinator_must_be_named(environment):
    with pytest.raises(ConfigError, match="FERRORPC_COORDINATOR"):
        own_coordinator_address(launch_of(environment), 29700)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FERRORPC_NAME": "me"} | TORCHRUN, "me"),
        (TORCHRUN, "host.1-1"),
        (TORCHRUN | {"GROUP_RANK": "0"}, "host-1"),
        (OMPI, "host-1"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "worker-3"}, "worker-3"),
        (INDEXED | {"HOSTNAME": "trial-3"}, "trial-3"),
        (INDEXED | {"HOSTNAME": "node-7"}, "trial-3"),  # the node's, as all its pods with hostNetwork have it
        ({"POD_NAME": "worker-4", "HOSTNAME": "worker-3"}, "worker-4"),
        ({"HOSTNAME": "laptop"}, "host-42"),
        ({}, "host-42"),
    ],
)
def test_a_members_name_stays_over_restarts_where_anything_does(environment, expected):
    config = Config({"world_size": (8, 8)}, environment)
    assert member_name(environment, config, detect_launch(environment, config), "host", 42) == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("", ""),
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3]", "gpu3"),
        ("a1,gpu[3-4]", "a1"),
        ("gpu[3,5]", "gpu3"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, expected):
    assert first_host(nodes) == expected
