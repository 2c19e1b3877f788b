"""What a run will meet on a cluster, as text: whether it fits, what its wires carry, how long a step takes."""

from collections import Counter

from megatron_lite.config import Config
from megatron_lite.planner.cluster import GIB, Cluster
from megatron_lite.planner.memory import buffer_bytes, stage_memory
from megatron_lite.planner.pipeline import Pipeline
from megatron_lite.planner.timing import step_time, wire
from megatron_lite.planner.traffic import Transfer, axis_size, bytes_by_axis, rank_transfers, wire_share
from megatron_lite.planner.units import size

# comm/mesh.py's axes by what they are to a reader
LABELS = {"tp": "tp", "dp_cp": "dp", "zero_shard": "dp", "zero_replica": "dp (replicas)", "mirror": "pp (both places)",
          "pp": "pp", "embedding": "first and last stage", "tp_pp": "tp x pp"}  # fmt: skip


def outlook(config: Config, pipeline: Pipeline, cluster: Cluster) -> str:
    """A few lines: what --dry-run adds with --cluster."""
    parts = [cluster.describe(), *device_lines(config, cluster), memory_line(config, pipeline, cluster)]
    if without := uncounted(config):
        return "\n".join([*parts, f"bytes on the wires and time of a step: {without}"])
    return "\n".join(parts + [wire_table(config, pipeline, cluster), time_lines(config, pipeline, cluster)])


def uncounted(config: Config) -> str | None:
    """Why there is no plan of a run's bytes and time; None where there is one."""
    flags = {"--context-parallel-size": config.parallel.cp > 1, "--num-experts": config.model.num_experts is not None}
    named = " and ".join(flag for flag, given in flags.items() if given)
    return f"not planned yet with {named}" if named else None


def device_lines(config: Config, cluster: Cluster) -> list[str]:
    """A line where the cluster has too few devices."""
    world = config.grid.world_size
    most = None if cluster.nodes is None else cluster.nodes * cluster.gpus_per_node
    return [] if most is None or world <= most else [f"  too few devices: the run has {world} ranks, the cluster {most}"]


def memory_line(config: Config, pipeline: Pipeline, cluster: Cluster) -> str:
    """The largest rank beside its device."""
    largest = max(stage_memory(config, pipeline=pipeline), key=lambda stage: stage.total)
    need = largest.total + buffer_bytes(config)
    verdict = "fits" if need <= cluster.usable_memory else "does not fit"
    return (f"memory: {need / GIB:.1f} GiB on stage {largest.stage}, {buffer_bytes(config) / GIB:.2g} of it for communication; "
            f"{cluster.usable_memory / GIB:.1f} of {cluster.memory / GIB:.4g} can be used: {verdict}")  # fmt: skip


def transfers_of_ranks(config: Config, pipeline: Pipeline) -> list[list[Transfer]]:
    """Of every pipeline rank, what its tp ranks take part in during a step."""
    lists = pipeline.actions(pipeline.planned(config.num_microbatches))
    return [rank_transfers(config, pipeline, rank, actions) for rank, actions in enumerate(lists)]


def wire_table(config: Config, pipeline: Pipeline, cluster: Cluster) -> str:
    """Bytes that a rank sends in a step over each axis, on the stage with most."""
    most: Counter[str] = Counter()
    for transfers in transfers_of_ranks(config, pipeline):
        large = [each for each in transfers if each.what != "scalars"]
        for axis, sent in bytes_by_axis(config, large).items():
            most[axis] = max(most[axis], sent)
    rows = []
    for axis, sent in sorted(most.items(), key=lambda item: -item[1]):
        where, together, ranks = wire(config, cluster, axis)
        place = "within a node" if where == "within" else f"between nodes, {together} of a node"
        rows.append(f"  {LABELS[axis]:<22}{size(sent):>12}   {ranks} ranks {place}")
    return "\n".join(["bytes that a rank sends in a step, on the stage with most:", *(rows or ["  none"])])


def transfer_table(config: Config, transfers: list[Transfer]) -> str:
    """Every kind of transfer of one rank."""
    together: Counter[tuple[str, str, str]] = Counter()
    calls: Counter[tuple[str, str, str]] = Counter()
    for each in transfers:
        key = LABELS[each.axis], each.op, each.what
        together[key] += each.calls * each.size * wire_share(each.op, axis_size(config, each.axis))
        calls[key] += each.calls
    lines = [f"  {'axis':<22}{'operation':<16}{'of':<32}{'calls':>9}{'sent':>12}"]
    for (label, op, what), sent in together.items():
        lines.append(f"  {label:<22}{op:<16}{what:<32}{calls[label, op, what]:>9.6g}{size(sent):>12}")
    return "\n".join(lines)


def time_lines(config: Config, pipeline: Pipeline, cluster: Cluster) -> str:
    """The step by parts."""
    time = step_time(config, cluster, pipeline)
    parts = {"compute": time.compute, "tp": time.tensor, "bubble": time.bubble, "dp": time.data, "optimizer": time.optimizer}
    shares = ", ".join(f"{name} {seconds / time.seconds:.1%}" for name, seconds in parts.items())
    devices = config.parallel.tp * config.parallel.pp * config.data_parallel_size
    return (f"step: {time.seconds:.4g} s, {time.mfu:.1%} MFU, {time.tokens_per_second:,.0f} tokens/s, "
            f"{time.tokens_per_second / devices:,.0f} per device\n  {shares}")  # fmt: skip

