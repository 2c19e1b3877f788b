"""Does each stage take what the planner said? `--pipeline-split auto` on model W, predicted and measured beside each other.

The parts of the model are timed as a run times them at its start (training/measure.py), the layers are cut by those times,
and real steps follow whose actions are stamped. Part of benchmarks/pipeline_bubble.py.
"""

import statistics
from dataclasses import replace

import torch

from benchmarks.peers.ours import config_of
from benchmarks.peers.spec import SHAPES, Spec
from megatron_lite.comm.launch import keep_heap
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.comm.p2p import P2P
from megatron_lite.data.loader import Batch
from megatron_lite.pipeline.recorder import HostClock, Recorder
from megatron_lite.planner.automatic import stage_costs
from megatron_lite.training.measure import measure_costs
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.step import train_step

MICRO_BATCH, MICROBATCHES = 2, 8


def balance_rows(rank: int, ranks: int, shape_name: str, dtype: str, schedule: str, rounds: int) -> list[dict]:
    """A row for each stage of this rank: layers, and milliseconds of F + B + W of a microbatch, predicted and measured."""
    spec = Spec(name="balance", module="ours", group="pp", world=ranks, rank=rank, threads=1, micro_batch=MICRO_BATCH,
                global_batch=MICRO_BATCH * MICROBATCHES, dtype=dtype, weights="", rendezvous="", shape=SHAPES[shape_name],
                options={"schedule": schedule})  # fmt: skip
    config = config_of(spec)
    config = replace(config, parallel=replace(config.parallel, pipeline_split="auto"))
    mesh = build_mesh(grid_of(config, ranks), torch.device("cpu"))
    shape = (spec.shape.seq, MICRO_BATCH, spec.shape.hidden)
    costs = measure_costs(config, mesh, P2P(mesh.pp, mesh.device), shape)
    trainer = build_trainer(config, mesh, costs)
    recorder = trainer.executor.recorder = Recorder(HostClock())
    ids = torch.randint(spec.shape.vocab, (MICRO_BATCH, spec.shape.seq + 1), generator=torch.Generator().manual_seed(1))
    batches = [Batch(ids[:, :-1], ids[:, 1:], torch.ones(MICRO_BATCH, spec.shape.seq))] * MICROBATCHES
    taken: dict[tuple[int, str], list[float]] = {}
    for turn in range(rounds + 1):
        recorder.begin()
        result = train_step(trainer, batches, turn, 0).result
        recorder.end()
        waited = {action: end - start for action, start, end in result.waits}
        for action, start, end in recorder.actions if turn else ():
            taken.setdefault((action.chunk, action.kind), []).append(end - start - waited.get(action, 0.0))
    placement, layers = trainer.settled.pipeline.placement, trainer.settled.pipeline.layers
    predicted = stage_costs(costs, placement, layers)
    rows = []
    for chunk in range(placement.num_chunks):
        stage = placement.stage(rank, chunk)
        said = sum(price[stage] for price in (predicted.forward, predicted.input_grad, predicted.weight_grad))
        found = 1e3 * sum(statistics.median(times) for (of, _), times in taken.items() if of == chunk)
        rows.append({"schedule": schedule, "stage": stage, "rank": rank, "layers": len(layers[stage]),
                     "predicted_ms": said, "measured_ms": found, "off_percent": 100 * (said / found - 1)})  # fmt: skip
    return rows


def timed_rows(rank: int, *args) -> list[dict]:
    """The same in a process of its own, with the allocator and the threads of a run."""
    keep_heap()
    torch.set_num_threads(1)
    return balance_rows(rank, *args)


def balance_text(rows: list[dict]) -> str:
    """A line per stage."""
    lines = ["schedule       stage  rank  layers  predicted ms  measured ms  off %"]
    lines += [f"{r['schedule']:13}  {r['stage']:5}  {r['rank']:4}  {r['layers']:6}  {r['predicted_ms']:12.1f}  "
              f"{r['measured_ms']:11.1f}  {r['off_percent']:+5.1f}" for r in rows]  # fmt: skip
    return "\n".join(lines)
