"""Scripts written for torchrun run unchanged: torch.distributed with Gloo finds all it reads in the environment."""

from tests.integration.launching import needs, run, write_script

pytestmark = needs("torch")

SCRIPT = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    assert dist.is_torchelastic_launched()
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    print(dist.get_rank(), dist.get_world_size(), total.item())
    if len(sys.argv) > 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        sys.exit(3)
    dist.barrier()
    dist.destroy_process_group()
"""


def test_gloo_finds_its_ranks_and_its_store_also_after_a_restart(tmp_path):
    flags = ("--standalone", "--nproc_per_node", "2", "--max-restarts", "1")
    result = run(*flags, write_script(tmp_path, SCRIPT), "fail", timeout=100)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == sorted(["0: 0 2 1.0", "1: 1 2 1.0"] * 2)
