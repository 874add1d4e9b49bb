"""The dispatcher carries its fleet's policy out: markets, deadlines, limits, as told at birth or later."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from spotfleet.codec import to_json
from spotfleet.dispatcher import policy as policy_module
from spotfleet.dispatcher.policy import PolicyController
from spotfleet.errors import UsageError
from spotfleet.fleet.domain.events import GenerationFormed, JobProgress, JobResumed
from spotfleet.fleet.domain.state import fold
from spotfleet.fleet.policy.budget import ENDING_S
from spotfleet.model import FleetSpec, JobSpec, Need, Nodes, PolicySpec
from spotfleet.providers.local.market.pools import ZONES
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 10_000


async def status(stage: Stage) -> dict:
    return (await stage.call("GET", "/v1/status"))[1]


async def markets(stage: Stage) -> list[str]:
    hosts = (await status(stage))["hosts"]
    return sorted(h["pool"].rpartition("/")[2] for h in hosts if h["role"] == "worker" and h["state"] == "up")


async def stand(stage: Stage, *expected: str) -> None:
    async def look() -> bool:
        return await markets(stage) == list(expected)

    await stage.until(f"hosts {expected}", look)


async def decided(stage: Stage) -> list[tuple[int, int, str]]:
    return [(e["spot"], e["on_demand"], e["rule"]) for e in await stage.events("PolicyDecided")]


async def told(stage: Stage, policy: PolicySpec) -> None:
    await stage.call("PUT", "/v1/policy", to_json(policy))


async def submit(stage: Stage, deadline_s: float, work_s: float, *, workers: int = 2, ok: bool = True,
                 wait: bool = True) -> tuple[int, dict]:
    stage.world.scripts["train"] = Script(LONG)
    job = JobSpec("train", argv=("train.py",), min_workers=workers, max_workers=workers, deadline_s=deadline_s,
                  work_s=work_s)
    return await stage.call("POST", "/v1/jobs", {"spec": to_json(job), "secrets": {}, "wait": wait}, ok=ok)


def test_what_is_decided_is_written_once_also_across_a_restart(play):
    async def scene(stage: Stage) -> None:
        await stand(stage, "spot", "spot")
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        await stand(stage, "spot", "spot")

        async def look() -> bool:
            return (await status(stage))["policy"] is not None

        await stage.until("the restarted dispatcher has decided", look)
        assert await decided(stage) == [(2, 0, "auto")]
        shown = (await status(stage))["policy"]
        assert (shown["spot"], shown["on_demand"], shown["why"]) == (2, 0, "spot hosts are available")

    play(scene, spec(policy=PolicySpec("auto")))


def test_a_fleet_without_a_policy_decides_nothing(play):
    async def scene(stage: Stage) -> None:
        await stand(stage, "spot", "spot")
        assert await decided(stage) == [] and (await status(stage))["policy"] is None

    play(scene)


def test_another_policy_is_taken_over_at_once_and_no_host_goes_before_its_successor_works(play):
    async def scene(stage: Stage) -> None:
        await stand(stage, "spot", "spot")
        await told(stage, PolicySpec("on-demand"))
        await stage.until("an on-demand host", lambda: sees(stage, "on-demand"))
        await stand(stage, "on-demand", "on-demand")
        assert (await decided(stage))[0] == (2, 2, "on-demand") and (await decided(stage))[-1] == (0, 2, "on-demand")
        assert (await stage.events("PolicyChanged"))[0]["why"] == "asked by `spotfleet up`"
        await told(stage, PolicySpec(on_demand_base=1))
        await stand(stage, "on-demand", "spot")
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        await stand(stage, "on-demand", "spot")  # as it was told last, not as it was made

    play(scene)


async def sees(stage: Stage, market: str) -> bool:
    found = await markets(stage)
    assert len(found) >= 2, "a host went before its successor worked"
    return market in found


def test_a_fleet_goes_on_demand_while_spot_costs_no_less_and_says_so_and_comes_back(play, monkeypatch):
    monkeypatch.setattr(policy_module, "OFFERS_S", 0.1)

    async def scene(stage: Stage) -> None:
        def sells(micros_h: int) -> None:
            with stage.cloud.lock:
                for zone in ZONES:
                    stage.cloud.market.set_price(f"local/{zone}/cpu.small/spot", micros_h, stage.cloud.clock())

        await stand(stage, "spot", "spot")
        sells(85_000)
        await stand(stage, "on-demand", "on-demand")
        shown = (await status(stage))["policy"]
        assert (shown["spot"], shown["on_demand"], shown["rule"]) == (0, 2, "auto")
        dear = [e for e in await stage.events("PolicyDecided") if e["shun"]]
        assert dear and all(e["why"].startswith("spot costs no less than on demand: $0.085") for e in dear)
        sells(31_000)
        await stage.until("spot is wanted again", lambda: wants(stage, 2))

    async def wants(stage: Stage, spot: int) -> bool:
        return (await status(stage))["policy"]["spot"] == spot

    play(scene, spec(policy=PolicySpec("auto")))


def test_on_demand_hosts_go_while_no_job_runs_but_nodes_min_and_come_for_the_next_job(play, monkeypatch):
    async def scene(stage: Stage) -> None:
        await stand(stage, "on-demand", "on-demand")
        monkeypatch.setattr(policy_module, "IDLE_S", 0.0)
        await stand(stage, "on-demand")
        why = (await status(stage))["policy"]["why"]
        assert why.startswith("no job runs or waits, so on-demand hosts fill in up to nodes.min, 1, alone: no spot ")
        job = (await submit(stage, 0.0, 0.0, wait=False))[1]["job"]
        await stand(stage, "on-demand", "on-demand")
        await stage.at_version(job, 5)

    dear = Need(instance_type="cpu.small", max_micros_h=1)  # no spot host is on sale at this
    play(scene, replace(spec(policy=PolicySpec("auto")), any_of=(dear,)))


def test_nonsense_is_no_policy(play):
    async def scene(stage: Stage) -> None:
        for wrong in (replace(PolicySpec(), spot_policy="maybe"), PolicySpec(max_micros=-1)):
            code, said = await stage.call("PUT", "/v1/policy", to_json(wrong), ok=False)
            assert code == 400 and "spot_policy" in said["error"]

    play(scene)


def test_a_job_with_little_time_left_is_given_on_demand_hosts_and_its_status_says_when_it_is_due(play):
    async def scene(stage: Stage) -> None:
        await stand(stage, "spot", "spot")
        code, said = await submit(stage, 3600.0, 3601.0, ok=False)
        assert code == 400 and said["error"].startswith("the deadline is impossible: ")
        job = (await submit(stage, 3602.0, 3600.0))[1]["job"]
        await stand(stage, "on-demand", "on-demand")
        found = await stage.job(job)
        assert 3500 < found.deadline_in_s < 3602 and found.work_left_s <= 3600
        assert (await decided(stage))[-1][1:] == (2, "deadline")
        assert (await stage.events("JobSubmitted"))[0]["work_s"] == 3600.0

    play(scene)


def test_work_in_hours_is_that_of_the_target_at_its_submission_however_large_the_fleet_is_later(play):
    async def scene(stage: Stage) -> None:
        await stand(stage, "spot", "spot")
        job = (await submit(stage, 100 * 3600.0, 10 * 3600.0))[1]["job"]
        assert (await stage.events("JobSubmitted"))[0]["work_host_s"] == 20 * 3600.0
        for target, hours in ((4, 5.0), (1, 20.0)):
            await stage.call("PUT", "/v1/nodes", to_json(Nodes(1, target, 4)))
            left_s = (await stage.job(job)).work_left_s
            assert hours - 0.1 < left_s / 3600 <= hours  # at the target of now

    play(scene)


def test_steps_that_are_left_take_what_steps_took_with_all_that_was_between_them():
    formed = GenerationFormed(0.0, "j", 1, ("a/0/1", "b/0/1"), "start", "", 0)
    trained = [formed, JobResumed(0.0, "j", 1, 0, 0, 0.0), JobProgress(200.0, "j", 100, 1.0)]
    minder = PolicyController(SimpleNamespace(journal=SimpleNamespace(state=fold(trained))), None, None)  # type: ignore[arg-type]
    job = SimpleNamespace(id="j", spec=JobSpec("j", work_steps=1000), record=SimpleNamespace(version=0))
    assert minder._work_left(job) == 900 * 2.0 * 2  # type: ignore[arg-type]


def test_a_deadline_is_judged_by_the_hosts_that_the_job_can_use(play):
    async def scene(stage: Stage) -> None:
        await stand(stage, "spot", "spot")
        code, said = await submit(stage, 5000.0, 3600.0, workers=1, ok=False)
        assert code == 400 and said["error"].startswith("the deadline is impossible: the work takes 1 host 2 h ")
        await submit(stage, 0.0, 0.0, workers=1)  # without a deadline: it keeps its host
        job = (await submit(stage, 7202.0, 3600.0, workers=1))[1]["job"]
        await stand(stage, "on-demand", "on-demand")
        assert (await status(stage))["policy"]["why"].startswith(f"{job}, on 1 of 2 hosts: ")

    play(scene)


def test_a_fleet_that_launches_all_hosts_at_once_or_none_takes_no_deadline(play):
    async def scene(stage: Stage) -> None:
        await stand(stage, "spot", "spot")
        code, said = await submit(stage, 90_000.0, 3600.0, ok=False)
        assert code == 400 and said["error"].startswith("a deadline is kept by mixing both markets")
        await submit(stage, 0.0, 3600.0)

    play(scene, spec(all_or_nothing=True))


def test_a_fleet_of_hosts_of_any_kind_on_aws_takes_no_deadline():
    fleet = FleetSpec("f", provider="aws", any_of=(Need(),))
    minder = PolicyController(SimpleNamespace(boot=SimpleNamespace(spec=fleet)), None, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the fleet file names no kind of host"):
        minder.check(JobSpec("j", deadline_s=7200.0, work_s=3600.0))


def test_a_fleet_near_its_max_cost_warns_once_and_then_ends_by_itself(play):
    async def scene(stage: Stage) -> None:
        await stand(stage, "spot", "spot")

        async def counted() -> bool:
            return bool((await status(stage))["spent_micros"])

        await stage.until("a first count", counted)
        burn = (await status(stage))["burn_micros_h"]
        await told(stage, PolicySpec(max_micros=int(burn * (ENDING_S + 2.0) / 3600)))
        await stage.until("the end", lambda: not stage.cloud.living())
        assert stage.daemon.dispatcher.shutdown.decision.limited  # hosts get little time to send results
        warned = [(e["limit"], e["percent"]) for e in await stage.events("BudgetReached")]
        assert warned == sorted(set(warned)) and warned[-1] == ("max_cost", 100)  # 80 first, if time was lost
        assert "are spent, and a clean shutdown takes up to" in (await status(stage))["why"]

    play(scene)


def test_max_hourly_cost_bounds_the_hosts_and_the_status_says_why(play):
    async def scene(stage: Stage) -> None:
        await stand(stage, "spot")
        await stage.until("a reason", lambda: says(stage, "max_hourly_cost leaves"))
        assert len(await stage.events("LaunchIntended")) == 1  # none that had to be given back

    async def says(stage: Stage, words: str) -> bool:
        return words in (await status(stage))["why"]

    play(scene, spec(policy=PolicySpec(max_micros_h=85_000 + 50_000)))  # a dispatcher, and one and a half hosts
