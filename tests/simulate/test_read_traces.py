"""Every format that records of spot markets come in, and what is said of files that are none. All files are made up."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfleet.errors import UsageError
from spotfleet.simulate import read as read_module
from spotfleet.simulate.read import read, traces_in
from spotfleet.simulate.values.trace import Trace


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes, name: str = "trace.json") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def pings(data: list, gap_s: object = 600, **more: object) -> str:
    return json.dumps({"metadata": {"gap_seconds": gap_s}, "data": data, **more})


def window(data: list) -> str:
    return json.dumps({"generator": "random_start_time", "original_trace": "data/us-west-2a_v100_1.json",
                       "metadata": {"gap_seconds": 600, "start_time": 1, "end_time": 4}, "data": data})


# ---- availability


def test_pings_count_the_hosts_that_are_available(write):
    path = write(pings([0, 2, 2, 1], prices=[0.918, 0.918, 0.92, 0.92]),
                 "aws-10-26-2022/us-west-2a_v100_1.json")
    assert read(path) == [Trace("us-west-2a_v100_1", 2400.0, ((0, 0), (600, 2), (1800, 1)),
                                ((0, 918_000), (1200, 920_000)), began_at=1666742400.0, provider="aws",
                                region="us-west-2", zone="us-west-2a", instance_type="p3.2xlarge", accelerator="V100")]


def test_a_window_of_frontier_cs_is_inverted_by_itself(write):
    [trace] = read(write(window([0, 1, 1, 0]), "17.json"))
    assert trace.capacity == ((0, 1), (600, 0), (1800, 1))
    assert (trace.zone, trace.accelerator) == ("us-west-2a", "V100")


def test_polarity_overrides_the_format_and_says_when_that_looks_wrong(write):
    messages: list[str] = []
    [trace] = read(write(window([0, 1]), "17.json"), "available", messages.append)
    assert trace.capacity == ((0, 0), (600, 1))
    assert ["a window of Frontier-CS, where 1 means unavailable" in line for line in messages] == [True]


def test_a_plain_trace_can_be_told_to_be_inverted(write):
    [trace] = read(write(pings([0, 1])), "unavailable")
    assert trace.capacity == ((0, 1), (600, 0))


def test_a_plain_trace_in_a_folder_of_inverted_ones_is_suspicious(write):
    messages: list[str] = []
    read(write(pings([0, 1]), "frontier-cs/a.json"), warn=messages.append)
    assert len(messages) == 1 and "--polarity unavailable" in messages[0]


def test_an_archive_holds_a_trace_for_each_json_but_not_what_macos_adds(tmp_path):
    path = tmp_path / "real.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("real/a/us-west-2a_v100_1/traces/random_start/3.json", window([0, 1])),
                           ("real/a/us-west-2a_v100_1/traces/random_start/._3.json", "\0\0"),
                           ("real/LICENSE", "MIT")):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    assert [(t.name, t.capacity) for t in read(path)] == [("a/us-west-2a_v100_1/3", ((0, 1), (600, 0)))]


def test_bamboo_writes_who_comes_and_goes(write):
    [trace] = read(write("0,add,node1\n0,add,node2\n60000,remove,node1\n120000,add,node3\n", "p3-trace.csv"))
    assert trace == Trace("p3-trace", 120.0, ((0.0, 2), (60.0, 1), (120.0, 2)), provider="aws")


def test_bamboos_counts_stand_there_three_times_each(write):
    [trace] = read(write("2021-12-10, 13:07:45, 8\n2021-12-10, 13:08:45, 8\n2021-12-10, 13:09:45, 8\n"
                         "2021-12-10, 13:08:45, 7\n2021-12-10, 13:09:45, 7\n2021-12-10, 13:10:45, 7\n"
                         "2021-12-10, 13:17:45, 8\n", "v100x1-east1c.txt"))
    assert (trace.capacity, trace.length_s) == (((0.0, 8), (60.0, 7), (600.0, 8)), 600.0)
    assert (trace.zone, trace.accelerator) == ("us-east1-c", "V100")


def test_parcae_writes_json_lines(write):
    text = ('[0, "add", {"nodes": ["a", "b"], "duration": 60000, "throughput_opt_strategy": [1, 2]}]\n'
            '[60000, "no-op", {"nodes": [], "duration": 60000}]\n'
            '[120000, "remove", {"nodes": ["a"], "duration": 60000}]\n')
    [trace] = read(write(text, "trace_hh.txt"))
    assert (trace.capacity, trace.length_s) == (((0.0, 2), (120.0, 1)), 180.0)


def test_a_log_of_probes_holds_a_pool_for_each_zone_and_type(write):
    text = """[2020-03-01T10:00:00.000Z] Created instance a with 1 GPU(s) of type nvidia-tesla-v100 in zone us-west1-b
[2020-03-01T10:00:10.000Z] Instance b creation failed
[2020-03-01T10:00:10.000Z] Instance b not running in zone us-west1-b
[2020-03-01T10:15:00.000Z] Instance a not running in zone us-west1-b
[2020-03-01T10:15:05.000Z] Successfully deleted instance a
[2020-03-01T10:15:10.000Z] Created instance b with 1 GPU(s) of type nvidia-tesla-k80 in zone us-west1-b
[2020-03-01T10:30:00.000Z] Created instance a with 1 GPU(s) of type nvidia-tesla-v100 in zone us-west1-b
[2020-03-01T10:30:10.000Z] Instance b running in zone us-west1-b
"""
    assert [(t.name, t.capacity, t.length_s) for t in read(write(text, "log.out"))] == [
        ("log/us-west1-b_k80_1", ((0.0, 0), (900.0, 1)), 1800.0),
        ("log/us-west1-b_v100_1", ((0.0, 1), (900.0, 0), (1800.0, 1)), 1800.0)]


def test_a_failure_that_names_no_zone_is_of_the_one_that_holds_none(write):
    text = """[2020-03-15T10:00:00.000Z] Created instance i-1 with 8 GPU(s) of type k80 in zone us-east-1b
[2020-03-15T10:01:00.000Z] Instance with 8 GPU(s) of type k80 creation failed
[2020-03-15T10:11:00.000Z] Instance i-1 running in zone us-east-1b
[2020-03-15T10:12:00.000Z] Created instance i-2 with 8 GPU(s) of type k80 in zone us-east-1c
[2020-03-15T10:21:00.000Z] Instance i-1 running in zone us-east-1b
[2020-03-15T10:22:00.000Z] Instance i-2 running in zone us-east-1c
"""
    assert [(t.name, t.capacity) for t in read(write(text, "log.out"))] == [
        ("log/us-east-1b_k80_8", ((0.0, 1),)), ("log/us-east-1c_k80_8", ((0.0, 0), (660.0, 1)))]


# ---- prices


def test_the_spot_price_history_of_aws_is_newest_first(write):
    def line(zone: str, price: str, at: str) -> dict:
        return {"AvailabilityZone": zone, "InstanceType": "p3.2xlarge", "ProductDescription": "Linux/UNIX",
                "SpotPrice": price, "Timestamp": at}

    text = json.dumps({"NextToken": "", "SpotPriceHistory": [
        line("us-west-2a", "0.986700", "2020-03-23T02:00:00.000Z"),
        line("us-west-2b", "1.042600", "2020-03-23T01:00:00.000Z"),
        line("us-west-2a", "0.993400", "2020-03-23T00:00:00.000Z")]})
    first, second = read(write(text, "p3.2xlarge.json"))
    assert first == Trace("p3.2xlarge/us-west-2a p3.2xlarge", 7200.0, (), ((0.0, 993_400), (7200.0, 986_700)),
                          began_at=1584921600.0, provider="aws", region="us-west-2", zone="us-west-2a",
                          instance_type="p3.2xlarge")
    assert (second.zone, second.length_s) == ("us-west-2b", 3600.0)


def test_azures_daily_prices_have_a_column_for_each_type(write):
    [trace, other] = read(write("Date,NC6,NC12s v2\n2/24/2020,$0.12276,$0.8\n2/25/2020,$0.13,$0.8\n", "us_east.csv"))
    assert trace == Trace("us_east/NC6", 172_800.0, (), ((0.0, 122_760), (86_400.0, 130_000)), began_at=1582502400.0,
                          provider="azure", region="us-east", instance_type="Standard_NC6")
    assert other.instance_type == "Standard_NC12s_v2"


def test_a_log_of_gcps_prices_holds_each_until_the_next(write):
    text = ("date,instance_type,region,on_demand_usd_h,spot_usd_h\n2023-05-08,a2-highgpu-1g,us-west1,3.67339,1.10202\n"
            "2023-05-10,a2-highgpu-1g,us-west1,3.5,1.2\n")
    assert read(write(text, "gcp.csv")) == [
        Trace("gcp/us-west1 a2-highgpu-1g", 259_200.0, (), ((0.0, 1_102_020), (172_800.0, 1_200_000)), 3_500_000,
              1683504000.0, "gcp", "us-west1", "", "a2-highgpu-1g")]


# ---- what is no trace

BAD = {  # name -> (file, text, what the message says)
    "empty": ("a.json", "", "a.json: is empty"),
    "binary": ("a.json", b"\xff\xfe\x00", "is no text"),
    "half a file": ("a.json", '{"metadata": {"gap_seconds": 600}, "data": [1,', "is no JSON"),
    "other json": ("a.json", '{"nodes": 3}', "has neither data nor SpotPriceHistory, but nodes"),
    "no gap": ("a.json", '{"metadata": {}, "data": [1]}', "metadata.gap_seconds is None"),
    "gap of zero": ("a.json", pings([1], 0), "metadata.gap_seconds is 0"),
    "no values": ("a.json", pings([]), "data is empty"),
    "a share": ("a.json", pings([1, 0.5]), "data[1]: 0.5 is a fraction"),
    "negative": ("a.json", pings([1, -1]), "data[1]: -1 is no number of hosts"),
    "not a number": ("a.json", '{"metadata": {"gap_seconds": 600}, "data": [1, NaN]}', "data[1]: nan is no number"),
    "a text": ("a.json", pings([1, "1"]), "data[1]: '1' is no number of hosts"),
    "true": ("a.json", pings([True]), "data[0]: True is no number of hosts"),
    "above its maximum": ("a.json", '{"metadata": {"gap_seconds": 600, "max_nodes": 4}, "data": [4, 5]}',
                          "data[1] is 5, above metadata.max_nodes, 4"),
    "inverted counts": ("a.json", window([0, 3]), "data[1] is 3, but where 1 means unavailable"),
    "odd polarity": ("a.json", '{"metadata": {"gap_seconds": 6, "polarity": "up"}, "data": [1]}',
                     "metadata.polarity is 'up'"),
    "too few prices": ("a.json", pings([1, 1], prices=[0.5]), "prices: 1 values for the 2 of data"),
    "no price": ("a.json", pings([1], prices=["x"]), "prices[0]: 'x' is no price"),
    "an unknown csv": ("a.csv", "x,y\n1,2\n", "a.csv:1: 'x,y' begins no known format"),
    "bamboo, no number": ("a.csv", "0,add,node1\nx,add,node2\n", "a.csv:2: 'x,add,node2' is no event"),
    "bamboo, removed twice": ("a.csv", "0,add,a\n1,remove,a\n2,remove,a\n", "a.csv:3: remove a: it is not there"),
    "bamboo, back in time": ("a.csv", "9,add,a\n1,add,b\n", "a.csv:2: 1 ms comes after 9 ms"),
    "bamboo, other event": ("a.csv", "9,add,a\n10,gone,b\n", "a.csv:2: 'gone' is no event"),
    "bamboo, no time": ("a.csv", "0,add,a\n", "covers no time"),
    "parcae, cut": ("a.txt", '[0, "add", {"nodes": ["a"]}]\n[60, "add"\n', "a.txt:2: "),
    "counts, negative": ("a.txt", "2021-12-10, 13:07:45, 8\n2021-12-10, 13:08:45, -8\n", "a.txt:2: -8.0 is no number"),
    "counts, cut": ("a.txt", "2021-12-10, 13:07:45, 8\n2021-12-10, 13\n", "a.txt:2: '2021-12-10, 13' is no count"),
    "log, cut": ("a.out", "[2020-03-01T10:00:00.000Z] Instance a running in zone z\n[2020-03-", "a.out:2: "),
    "aws, no price": ("a.json", '{"SpotPriceHistory": [{"AvailabilityZone": "a"}]}', "SpotPriceHistory[0]: lacks"),
    "azure, no price": ("a.csv", "Date,NC6\n2/24/2020,$x\n", "a.csv:2: NC6: '$x' is no price"),
    "azure, no date": ("a.csv", "Date,NC6\nMonday,$1\n", "a.csv:2: 'Monday' is no date"),
    "gcp, cut": ("a.csv", "date,instance_type,region,on_demand_usd_h,spot_usd_h\n2023-05-08,a2\n", "a.csv:2: 2 fields"),
    "a broken archive": ("a.tar.gz", b"\x1f\x8b\x08\x00broken", "the archive cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_is_named_with_the_place_and_a_fix(write, name):
    file, text, message = BAD[name]
    with pytest.raises(UsageError) as raised:
        read(write(text, file))
    assert message in str(raised.value) and file in str(raised.value)
    assert raised.value.hint


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path, message in ((tmp_path / "no.json", "there is no such file"), (tmp_path, "is a folder")):
        with pytest.raises(UsageError, match=message):
            read(path)


def test_what_has_no_end_is_not_read_to_it(write, monkeypatch):
    monkeypatch.setattr(read_module, "MOST_BYTES", 2 << 20)
    with pytest.raises(UsageError, match="/dev/zero: is larger than 2 MiB"):
        read("/dev/zero")
    path = write(pings([1]))
    monkeypatch.setattr(read_module, "MOST_BYTES", path.stat().st_size)
    assert read(path)


def test_an_unknown_polarity_is_refused(write):
    with pytest.raises(UsageError, match="polarity: 'up'"):
        read(write(pings([1])), "up")


def test_counts_that_are_told_to_be_inverted_are_refused(write):
    with pytest.raises(UsageError, match=r"data\[1\] is 4") as raised:
        read(write(pings([1, 4])), "unavailable")
    assert "--polarity available" in raised.value.hint


def test_a_folder_is_searched_for_files_but_not_for_licences(write, tmp_path):
    a, b = write(pings([1]), "x/a.json"), write("0,add,a", "b.csv")
    write("MIT", "x/LICENSE"), write("#", "README.md"), write("#", "SOURCE.md"), write("", ".DS_Store")
    assert traces_in(tmp_path) == [b, a]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=50), st.integers(1, 900))
def test_what_is_read_is_what_every_sample_says(data, gap_s):
    """A sample holds until the next one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.json")
        path.write_text(pings(data, gap_s))
        [trace] = read(path)
    assert [[n for at, n in trace.capacity if at <= (i + share) * gap_s][-1]
            for i in range(len(data)) for share in (0, 0.99)] == [n for n in data for _ in (0, 1)]
    assert trace.most == max(data)
    assert trace.length_s == gap_s * len(data)
