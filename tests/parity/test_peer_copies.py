"""A run that goes on from copies in peers has the bits of one that was never stopped; what is not its own state is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch
from layouts import GLOBAL_BATCH, GPT, assert_same_bits, config_for, merge, replace, run_steps, slow

from megatron_lite.checkpoint.claim import Claim
from megatron_lite.checkpoint.peers import Peers
from megatron_lite.checkpoint.places import Place
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.training.saving import Saver
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.state import Home, Progress, restore, save

CPU = torch.device("cpu")
BEFORE, AFTER = 2, 2
LAYOUTS = {"zero1_dp2": (2, {"zero_stage": 1}), "tp2": (2, {"tp": 2}), "pp2": (2, {"pp": 2}), "zero3_dp2": (2, {"zero_stage": 3}),
           "zero1_tp2_dp2": (4, {"tp": 2, "sp": True, "zero_stage": 1}), "dp2_zbv": (4, {"pp": 2, "pipeline_schedule": "zbv"}),
           "powersgd_dp2": (2, {"grad_compression": "powersgd"})}  # fmt: skip


def home_of(mesh, folder, tracked=None):
    """Two hosts, each half of the ranks."""
    host = Path(folder) / f"host{mesh.world.rank * 2 // mesh.world.size}"
    return Home(Claim("run"), Peers(mesh, Place(host.name, host / "memory/u/f/run", host / "disk/u/f/run")), tracked)


def trainer_of(config, world):
    return build_trainer(config, build_mesh(grid_of(config, world), CPU))


def copy_and_go_on(rank, world, config, folder):
    """Two steps, a copy, two more: (what the copy said, what the resumed run is compared with)."""
    trainer, said = trainer_of(config, world), []
    run_steps(trainer, range(BEFORE))
    progress = Progress(BEFORE, BEFORE * GLOBAL_BATCH, "a-wandb-id" if rank == 0 else None)  # the log is rank 0's
    Saver(trainer, Progress(), said.append, home_of(trainer.mesh, folder)).copy(progress)
    return said[0], run_steps(trainer, range(BEFORE, BEFORE + AFTER))


def recover_and_go_on(rank, world, config, folder):
    trainer = trainer_of(config, world)
    home = home_of(trainer.mesh, folder)
    progress, says = restore(trainer, home)
    assert progress == Progress(BEFORE, BEFORE * GLOBAL_BATCH, "a-wandb-id") and home.recovered, says
    assert trainer.optimizer.steps == BEFORE
    assert Saver(trainer, progress, print, home).due(progress, last=True) == (True, False)  # no checkpoint holds it yet
    return says, run_steps(trainer, range(BEFORE, BEFORE + AFTER))


def config_of(layout, folder, precision="bf16", **flags):
    model = dataclasses.replace(GPT, hidden_dropout=0.1, attention_dropout=0.1)
    config = config_for(model, precision=precision, **LAYOUTS[layout][1] | flags)
    return replace(config, "checkpoint", save=str(folder), load=str(folder), peer_checkpoint_interval=1)


@pytest.mark.parametrize("layout", [name if name in ("zero1_dp2", "tp2", "pp2") else slow(name) for name in LAYOUTS])
def test_the_same_bits(pool, tmp_path, layout):
    """With dropout, from fp32 masters; the second time without what one host's memory held."""
    world = LAYOUTS[layout][0]
    config = config_of(layout, tmp_path / "save", "fp32" if layout == "powersgd_dp2" else "bf16")
    answers = pool.run(copy_and_go_on, world, world, config, tmp_path)
    assert f"iteration {BEFORE} is copied to peers" in answers[0][0]
    straight = merge([run for _, run in answers])
    for source in ("host memory", "host memory (1 of 2 shards) and local disk (1)"):
        answers = pool.run(recover_and_go_on, world, world, config, tmp_path)
        source = source if world == 2 else source.replace("1 of 2", "2 of 4").replace("(1)", "(2)")
        assert f"loading iteration {BEFORE} from copies in {source} ({tmp_path}/save holds no checkpoint yet)" == answers[0][0]
        assert_same_bits(merge([run for _, run in answers]), straight)
        for shard in tmp_path.glob("host0/memory/u/f/run/iter*/shard*"):
            shard.unlink()


def restored(rank, world, config, folder, tracked):
    trainer = trainer_of(config, world)
    home = home_of(trainer.mesh, folder, tracked)
    progress, says = restore(trainer, home)
    return progress.iteration, says, home.recovered


def saved(rank, world, config, iteration):
    save(trainer_of(config, world), Progress(iteration, iteration * GLOBAL_BATCH))


def test_a_newer_checkpoint_and_another_run_win(pool, tmp_path):
    """One that is newer than the copy; one that the copy's run never saved; another model, layout, precision."""
    config = config_of("zero1_dp2", tmp_path / "save")
    pool.run(copy_and_go_on, 2, 2, config, tmp_path)

    def says(config, tracked=None, world=2):
        answers = pool.run(restored, world, world, config, tmp_path, tracked)
        assert len(set(answers)) == 1
        return answers[0]

    fresh = f"{tmp_path}/save holds no checkpoint yet: STARTING FRESH"
    deeper = replace(config, "model", num_layers=6)
    for other, words in ((config_of("tp2", tmp_path / "save"), "it was written at dp 2"),
                         (config_of("zero3_dp2", tmp_path / "save"), "other settings of --zero-stage"),
                         (config_of("zero1_dp2", tmp_path / "save", "fp32"), "other settings of --bf16"),
                         (deeper, "another model: --num-layers: trained with 4, now 6")):  # fmt: skip
        iteration, said, recovered = says(other)
        assert (iteration, recovered) == (0, False) and words in said and fresh in said, said
    pool.run(saved, 2, 2, config, 1)
    iteration, said, recovered = says(config, tracked=1)
    assert (iteration, recovered) == (1, False) and "holds iteration 1, which is not what this copy's run had saved" in said
    pool.run(saved, 2, 2, config, BEFORE + 1)
    assert says(config, tracked=BEFORE + 1) == (BEFORE + 1, f"loading iteration 3 from {tmp_path}/save", False)


def test_copies_are_due_between_the_start_and_the_end(tmp_path):
    config = replace(config_of("tp2", tmp_path, tp=1), "checkpoint", peer_checkpoint_interval=3)
    trainer = trainer_of(config, 1)
    with_peers = Saver(trainer, Progress(), print, home_of(trainer.mesh, tmp_path))
    due = [n for n in range(1, 11) if with_peers.copy_due(Progress(n), last=False)]
    assert due == [3, 6, 9] and not with_peers.copy_due(Progress(9), last=True)
    at_the_end = replace(config, "train", train_iters=9)
    assert not Saver(trainer_of(at_the_end, 1), Progress(), print, with_peers.home).copy_due(Progress(9), last=False)
    assert not Saver(trainer, Progress(), print).copy_due(Progress(3), last=False)
