"""Clusters: presets, files, this machine; and every number that is missing or absurd, in words."""

import json

import pytest

from megatron_lite.planner import cluster as clusters
from megatron_lite.planner.cluster import GB, GIB, PRESETS, ClusterError, cluster_of, read_cluster, this_machine

WHOLE = PRESETS["a100"] | {"nodes": 4}


def test_presets_are_their_data_sheets():
    for name, memory, half, single in (("a100", 79, 312, 19.5), ("h100", 79, 989, 67), ("h200", 139, 989, 67),
                                       ("b200", 178, 2250, 75)):  # fmt: skip
        found = read_cluster(name)
        assert (found.memory, found.flops("bfloat16"), found.flops("float32")) == (memory * GIB, half * 1e12, single * 1e12)
        assert found.gpus_per_node == 8 and found.nodes is None and found.between.bandwidth < found.within.bandwidth
        assert found.usable_memory < found.memory and name in found.describe()
    with pytest.raises(ClusterError, match="no peak_tflops for float8; it has bfloat16"):
        read_cluster("a100").flops("float8")


def test_a_file_says_what_it_says(tmp_path):
    line = {"bandwidth_gbs": 100, "latency_us": 7}
    path = tmp_path / "c.json"
    path.write_text(json.dumps(WHOLE | {"name": "mine", "overlap": 0.5, "collectives": {"within_node": {"all_reduce": line}}}))
    found = read_cluster(str(path))
    assert (found.name, found.nodes, found.overlap) == ("mine", 4, 0.5)
    assert found.measured == {("within", "all_reduce"): (100 * GB, pytest.approx(7e-6))}


@pytest.mark.parametrize(("change", "words"), [
    ({"memory_gib": None}, "memory_gib is missing; an H100 has 79"),
    ({"memory_gib": -3}, "memory_gib = -3 is out of range; nearest that is taken: 0.01"),
    ({"memory_gib": 80e9}, "memory_gib = 8e+10 is out of range; nearest that is taken: 100000"),
    ({"gpus_per_node": 0}, "gpus_per_node = 0 is out of range; nearest that is taken: 1; usually 8"),
    ({"gpus_per_node": 7.5}, "gpus_per_node = 7.5 is not a whole number"),
    ({"memory_bandwidth_gbs": "fast"}, "memory_bandwidth_gbs = 'fast' is not a number"),
    ({"peak_tflops": {}}, "peak_tflops is missing"),
    ({"peak_tflops": {"bfloat16": float("nan")}}, "peak_tflops.bfloat16 = nan is not a number"),
    ({"within_node": None}, "within_node is missing"),
    ({"between_nodes": {"bandwidth_gbs": 0, "latency_us": 5}}, "between_nodes.bandwidth_gbs = 0 is out of range"),
    ({"between_nodes": {"latency_us": 5}}, "between_nodes.bandwidth_gbs is missing"),
    ({"overlap": 1.5}, "overlap = 1.5 is out of range; nearest that is taken: 1"),
    ({"memory": 80}, "unknown: memory; known are"),
    ({"collectives": {"here": {}}}, "collectives.here: expected within_node or between_nodes"),
    ({"collectives": {"within_node": {"all_reduce": {"bandwidth_gbs": 4}}}}, "all_reduce.latency_us is missing"),
])  # fmt: skip
def test_what_is_wrong_is_said(change, words):
    description = {key: value for key, value in (WHOLE | change).items() if value is not None}
    with pytest.raises(ClusterError) as error:
        cluster_of(description, "mine.json")
    assert words in str(error.value) and str(error.value).startswith("--cluster mine.json: ")
    assert len(str(error.value).splitlines()) == 1


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    with pytest.raises(ClusterError) as error:
        cluster_of({"memory_gib": -1, "nodes": 0}, "x")
    assert len(str(error.value).splitlines()) == 7  # nodes, memory, bandwidth, peaks, two wires, devices
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for name, words in (("missing.json", "no such file and no preset; presets are a100"), ("bad.json", "no JSON"),
                        ("list.json", "expected an object")):  # fmt: skip
        with pytest.raises(ClusterError, match=words):
            read_cluster(str(tmp_path / name))


def test_one_node_needs_no_wires_between():
    alone = {key: value for key, value in (WHOLE | {"nodes": 1}).items() if key != "between_nodes"}
    assert cluster_of(alone, "x").between == cluster_of(alone, "x").within


def test_this_machine(tmp_path, monkeypatch):
    found = cluster_of(this_machine(2), "this")
    assert found.gpus_per_node == 2 and found.memory > 0.1 * GIB and found.overlap == 0.0
    assert set(found.peak) == {"bfloat16", "float16", "float32", "float64"}
    for index in range(4):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    real = clusters.Path
    monkeypatch.setattr(clusters, "Path", lambda path: tmp_path if "nvidia" in str(path) else real(path))
    found = cluster_of(this_machine(), "this")
    assert (found.gpus_per_node, found.nodes, found.memory) == (4, 1, 139 * GIB)
