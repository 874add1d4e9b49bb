"""Metrics in OpenMetrics' form, and a dashboard that asks for them alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

from spotfleet.dispatcher.live.metrics import METRICS, Counters, text
from spotfleet.protocol.messages import FleetStatus, GpuReading, HostStatus, JobStatus, PolicyStatus, SlowWorker

DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana.json"
GPU = GpuReading(0, 50, 1024, 2048, 60, 1)
STATUS = FleetStatus(
    "f", "up", "", 1, 3, 3, spent_micros=2_500_000, on_demand_spent_micros=7_000_000, burn_micros_h=300_000,
    on_demand_burn_micros_h=900_000, policy=PolicyStatus(0, 0, "", max_micros=9_000_000), tick_s=0.25,
    hosts=(HostStatus("f-d-0", "dispatcher", "up", "aws/a/t/on-demand", 0, 1, 1),
           HostStatus("f-0", "worker", "up", "aws/a/t/spot", 1, 1, 1, gpus=(GPU, GpuReading(1, why="lost"))),
           HostStatus('f-"1\\', "worker", "draining", "aws/a/t/spot", 1, 1, 1, gpus=(GpuReading(0, None, 3),))),
    jobs=(JobStatus("a-1", "a", "succeeded", "", version=900),
          JobStatus("b-2", "b", "running", "", world_size=2, version=70, step_s=0.5, repeated=3,
                    slow=(SlowWorker("f-0/0/1", 1, 0.2, 0.1, 60),))))
COUNTERS = Counters({"rebalance": 2}, 4, {("b-2", "death"): 3}, {"b-2": 1.5})
SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (\d[0-9.e+-]*)')


def samples() -> dict[str, float]:
    return {f"{m[1]}{{{m[2]}}}": float(m[3]) for line in text(STATUS, COUNTERS).splitlines()
            if (m := SAMPLE.fullmatch(line))}


def test_every_line_is_openmetrics_and_each_metrics_lines_stand_together():
    lines = text(STATUS, COUNTERS).split("\n")
    assert lines[-2:] == ["# EOF", ""]
    for metric in METRICS:
        name = f"spotfleet_{metric.name}"
        begin = lines.index(f"# TYPE {name} {metric.kind}")
        assert not metric.unit or (lines[begin + 1] == f"# UNIT {name} {metric.unit}" and name.endswith(metric.unit))
        body = lines[begin + (2 if metric.unit else 1):]
        assert body[0].startswith(f"# HELP {name} ")
        own = [line for line in body[1:] if not line.startswith("#")]
        until = next(n for n, line in enumerate(body[1:]) if line.startswith("#"))
        for line in own[:until]:
            found = SAMPLE.fullmatch(line)
            assert found and found[1] == metric.sample_name, line
        assert all(not line.startswith(f"{metric.sample_name}{{") for line in own[until:])


def test_hosts_jobs_dollars_and_gpus_are_counted():
    found = samples()
    expected = {
        'spotfleet_hosts{fleet="f",state="up",market="spot"}': 1,
        'spotfleet_hosts{fleet="f",state="draining",market="spot"}': 1,
        'spotfleet_hosts{fleet="f",state="launching",market="spot"}': 0,
        'spotfleet_hosts_wanted{fleet="f"}': 3,
        'spotfleet_notices_total{fleet="f",kind="interruption"}': 0,
        'spotfleet_notices_total{fleet="f",kind="rebalance"}': 2,
        'spotfleet_hosts_taken_total{fleet="f"}': 4,
        'spotfleet_jobs{fleet="f",state="running"}': 1,
        'spotfleet_job_steps{fleet="f",job="a-1"}': 900,
        'spotfleet_job_steps{fleet="f",job="b-2"}': 70,
        'spotfleet_job_slow_workers{fleet="f",job="b-2"}': 1,
        'spotfleet_job_changes_total{fleet="f",job="b-2",cause="death"}': 3,
        'spotfleet_job_paused_seconds_total{fleet="f",job="b-2"}': 1.5,
        'spotfleet_spent_dollars_total{fleet="f"}': 2.5,
        'spotfleet_on_demand_dollars_total{fleet="f"}': 7,
        'spotfleet_burn_dollars_per_hour{fleet="f"}': 0.3,
        'spotfleet_budget_dollars{fleet="f"}': 9,
        'spotfleet_gpu_used_ratio{fleet="f",host="f-0",gpu="0"}': 0.5,
        'spotfleet_gpu_memory_bytes{fleet="f",host="f-0",gpu="0"}': 2048 << 20,
        'spotfleet_gpu_memory_used_bytes{fleet="f",host="f-\\"1\\\\",gpu="0"}': 3 << 20,
        'spotfleet_gpu_uncorrected_errors{fleet="f",host="f-0",gpu="0"}': 1,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert not any('gpu="1"' in name or ('job="a-1"' in name and "step_seconds" in name) for name in found)


def test_the_dashboard_asks_for_metrics_that_exist_and_for_all_of_them():
    board = json.loads(DASHBOARD.read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    queries += [variable["query"] for variable in board["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"\bspotfleet_\w+", query)}
    assert asked == {metric.sample_name for metric in METRICS}
    labels = {label for query in queries for braces in re.findall(r"\{([^}]*)\}", query)
              for label in re.findall(r"(\w+)=", braces)}
    assert labels <= {"fleet", "state"}
