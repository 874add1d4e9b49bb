"""Tier of each test file: which tests run for every change, and which only when a change reaches them.

`core` is what `scripts/test` runs; `.ci/run` adds each tier that the change reaches (`tests/support/impact.py`).
"""

from __future__ import annotations

CORE = "core"
TIERS = {
    CORE: "the decisions, the daemons and one whole fleet; in ten minutes on two cores",
    "clouds": "what a cloud's plugin does, on fakes of the cloud behind its real SDK",
    "engines": "what runs a job on the workers",
    "frameworks": "training libraries",
    "terraform": "Terraform's modules, alone and applied to a fake by the real provider",
    "attack": "hostile input and hostile neighbours",
    "image": "a ready image, made in a real Debian, and its Packer templates",
    "ray": "executors on a Ray cluster of several raylets",
    "machines": "namespaces, sshds, whole fleets in distress: many real processes",
}

# The longest prefix of a test file's path decides; core where there is none.
PLACES = {
    "tests/attack/": "attack",
    "tests/dispatcher/jobs/test_several_jobs.py": "engines",  # seconds of a daemon with agents
    "tests/dispatcher/jobs/test_training_jobs.py": "engines",  # the same
    "tests/dispatcher/cloud/test_groups.py": "engines",
    "tests/dispatcher/live/test_slow_hosts.py": "engines",
    "tests/dispatcher/cloud/test_demand_hosts.py": "engines",
    "tests/dispatcher/checkpoints/test_hosts_write_fleet.py": "engines",  # the same
    "tests/providers/aws/": "clouds",
    "tests/providers/aws/test_aws_gang_machines.py": "machines",
    "tests/providers/gcp/": "clouds",
    "tests/providers/contract/": "clouds",  # the contract on seven providers, two of them with real processes
    "tests/providers/local/test_local_daemon.py": "clouds",  # dozens of real processes
    "tests/cli/test_catalog_plans.py": "clouds",
    "tests/cli/test_launched_fleets.py": "machines",  # each waits for a fleet and its end
    "tests/fakes/": "clouds",
    "tests/fakes/test_aws_machines.py": "machines",
    "tests/fakes/test_gcp_machines.py": "machines",
    "tests/bootstrap/": "machines",
    "tests/cli/page/test_page_in_chromium.py": "machines",  # a browser
    "tests/terraform/": "terraform",
    "tests/image/": "image",
    "tests/network/": "machines",
    "tests/gpu/": "machines",
    "tests/ssh/test_shell_commands.py": "machines",
    "tests/sweep/": "machines",
    "tests/providers/ssh/": "machines",
    "tests/test_setup_script.py": "machines",  # real virtual environments, half a minute
    "tests/test_leftovers.py": "machines",  # test runs of their own
    "tests/harness/test_lanes.py": "machines",
    "tests/providers/ssh/test_ssh_discovery.py": CORE,  # these three start no sshd
    "tests/providers/ssh/test_ssh_listing.py": CORE,
    "tests/providers/ssh/test_ssh_machines.py": CORE,
    "tests/bench/test_gpu_parts.py": "machines",  # all parts of bench/gpu, three workers each
    "tests/ray/": "ray",
    "tests/ray/test_hypersched.py": CORE,  # these start no Ray
    "tests/ray/test_raylets.py": CORE,
    "tests/ray/test_ray_rules.py": CORE,
    "tests/ray/test_ray_coordinator.py": CORE,
    "tests/ray/test_tune_rules.py": CORE,
    "tests/habits/": "engines",  # a hundred loops on threads
    "tests/train/loops/": "engines",
    "tests/train/comm/test_order.py": "engines",
    "tests/train/comm/test_group.py": "engines",  # waits of seconds
    "tests/train/data/test_loaders.py": "engines",
    "tests/worker/test_stuck.py": "engines",
    "tests/train/data/test_counting.py": "engines",
    "tests/train/state/test_failure_points.py": "engines",
    "tests/train/state/test_kill_points.py": "engines",
    "tests/train/test_chaos_workers.py": "engines",
    "tests/train/test_recovery.py": "engines",  # dozens of losses, each with real workers
    "tests/habits/test_processes.py": "machines",  # three or four jobs of real workers for each loop
    "tests/containers/": "machines",
    "tests/foreign/": "machines",  # four jobs of real workers for each script
    "tests/verify/test_verify.py": "machines",  # six jobs of real workers for each script
    "tests/verify/test_fixes.py": "machines",
    "tests/e2e/": "machines",
    "tests/launched/": "machines",
    "tests/e2e/test_secrets.py": CORE,
    "tests/e2e/test_training.py": CORE,  # a whole fleet through interruptions
}

# Code that is one tier's own: a change to it always runs that tier, so its tests may be in it.
OWN_CODE = {
    "bench/gpu/": "machines",
    "scripts/setup": "machines",
    "scripts/smoke_": "clouds",
    "scripts/terraform_": "terraform",
    "spotfleet/agent/containers/": "machines",
    "spotfleet/bootstrap/": "machines",
    "spotfleet/bootstrap/image.py": "image",
    "spotfleet/bootstrap/provision.sh": "image",
    "spotfleet/interruptions/gcp.py": "clouds",
    "spotfleet/providers/aws/": "clouds",
    "spotfleet/providers/gcp/": "clouds",
    "spotfleet/providers/kit/": "clouds",
    "spotfleet/providers/ssh/": "machines",
    "spotfleet/ray/": "ray",
    "spotfleet/ssh/": "machines",
    "spotfleet/verify/": "machines",
    "terraform/": "terraform",
}

# Code whose every change reaches that tier by imports, which a rule of lint checks, so its tests may be in it, too.
REACHING = {"spotfleet/train/": "engines"}


def tier_of(file: str) -> str:
    """Return the tier of a test file, as "tests/fleet/cost/test_cost.py"."""
    return _longest(file, PLACES)


def owner_of(file: str) -> str:
    """Return the tier that a file of the product belongs to."""
    return _longest(file, OWN_CODE)


def tiers_run_for(file: str) -> set[str]:
    """Return the tiers that run for each change to a file of the product."""
    return {CORE, owner_of(file), _longest(file, REACHING)}


def _longest(file: str, table: dict[str, str]) -> str:
    return max(((len(prefix), tier) for prefix, tier in table.items() if file.startswith(prefix)), default=(0, CORE))[1]
