"""Copies in peers: four ranks on two hosts that are played by folders. What is lost or damaged, and where the rest is found."""

import os
import random
import resource
import shutil
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint import places
from megatron_lite.checkpoint.agree import CheckpointError
from megatron_lite.checkpoint.boxes import Piece, Request
from megatron_lite.checkpoint.load import load_folder
from megatron_lite.checkpoint.manifest import NAME
from megatron_lite.checkpoint.peers import Found, Peers, choose_sources, distance, leaders
from megatron_lite.checkpoint.places import Place, place_of
from megatron_lite.comm import relay
from megatron_lite.comm.mesh import build_mesh, single
from megatron_lite.comm.relay import Relay, Transfer
from megatron_lite.grid import Grid

RANKS, ROWS = 4, 4


def mesh_of(ranks):
    return build_mesh(Grid(tp=ranks), torch.device("cpu"))


def peers_of(rank, folder, hosts=2):
    host = Path(folder) / f"host{rank * hosts // RANKS}"
    mesh = mesh_of(RANKS)
    return Peers(mesh, Place(host.name, host / "memory/user/folder/run", host / "disk/user/folder/run")), mesh


def root(folder, host, source):
    return Path(folder) / f"host{host}" / source / "user/folder/run"


def rows(rank, tensor):
    return Piece("model/x", (RANKS * ROWS, 8), (rank * ROWS, 0), (ROWS, 8), tensor)


def copy(rank, folder, iterations, fails=None, hosts=2):
    """Copies of some iterations; the error of the last."""
    peers, _ = peers_of(rank, folder, hosts)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for iteration in iterations:
        own = torch.full((ROWS, 8), 100.0 * iteration + rank)
        if fails == rank and iteration == iterations[-1]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
        try:
            peers.save(iteration, [rows(rank, own)], {"iteration": iteration})
        except CheckpointError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def recover(rank, folder, at_least=0, refused=(), hosts=2):
    """(iteration, where from, notes), after comparing what this rank and the next one had written."""
    peers, mesh = peers_of(rank, folder, hosts)
    parts = [(owner, torch.zeros(ROWS, 8)) for owner in (rank, (rank + 1) % RANKS)]
    requests = [Request("model/x", (RANKS * ROWS, 8), (owner * ROWS, 0), (ROWS, 8), part) for owner, part in parts]

    def refuse(meta):
        return "it is not wanted" if meta["iteration"] in refused else None

    found, notes = peers.recover(requests, at_least, refuse)
    if found is None:
        return None, None, notes
    meta = load_folder(found.folder, requests, mesh, "loading", verify=False, complete=False)
    peers.close_view()
    assert meta == {"iteration": found.iteration}
    for owner, part in parts:
        assert (part == 100.0 * found.iteration + owner).all()
    return found.iteration, found.says, notes


def recovered(pool, folder, **options):
    answers = pool.run(recover, RANKS, folder, *options.values())
    assert all(answer == answers[0] for answer in answers), answers
    assert not list(Path(folder).glob("host*/*/user/folder/run/.*"))  # nothing half is left
    return answers[0]


def flip(path):
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


@pytest.fixture(scope="module")
def one_copy(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    assert pool.run(copy, RANKS, folder, [2, 4]) == [None] * RANKS
    return folder


@pytest.fixture
def copies(one_copy, tmp_path):
    """Iteration 4 in all places; iteration 2 was there before it."""
    return shutil.copytree(one_copy, tmp_path / "copies")


def test_what_lies_where(copies):
    """Own shards on the own disk, the other host's in memory; one generation, readable by its user alone."""
    for host in (0, 1):
        own, others = ([f"shard_0000{2 * h + i}.safetensors" for i in (0, 1)] for h in (host, 1 - host))
        for source, shards in (("disk", own), ("memory", others)):
            place = root(copies, host, source)
            assert [path.name for path in place.iterdir()] == ["iter_0000004"]
            assert sorted(path.name for path in (place / "iter_0000004").iterdir()) == [NAME, *shards]
            assert place.stat().st_mode & 0o077 == 0


def lose_memory(folder):
    shutil.rmtree(root(folder, 0, "memory"))


def lose_host(folder):
    shutil.rmtree(Path(folder) / "host0")


def lose_all_memory(folder):
    for host in (0, 1):
        shutil.rmtree(root(folder, host, "memory"))


def flip_in_memory(folder):
    flip(root(folder, 1, "memory") / "iter_0000004" / "shard_00001.safetensors")


def cut_in_memory(folder):
    path = root(folder, 0, "memory") / "iter_0000004" / "shard_00003.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def flip_a_manifest(folder):
    flip(root(folder, 0, "memory") / "iter_0000004" / NAME)


LOSSES = {  # what happens -> (where it comes from, words of a note)
    "nothing": (lambda folder: None, "host memory", None),
    "one host's memory": (lose_memory, "host memory (2 of 4 shards) and local disk (2)", None),
    "a host": (lose_host, "host memory (2 of 4 shards) and local disk (2)", None),
    "all memory": (lose_all_memory, "local disk", None),
    "a flipped byte": (flip_in_memory, "host memory (3 of 4 shards) and local disk (1)",
                       "shard_00001.safetensors is damaged: the checksum of model/x[4:8,0:8] does not fit (a copy in host"),
    "a truncated file": (cut_in_memory, "host memory (3 of 4 shards) and local disk (1)", "shard_00003.safetensors has"),
    "a damaged manifest": (flip_a_manifest, "host memory (2 of 4 shards) and local disk (2)", "its checksum does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_lost_is_found_elsewhere(pool, copies, loss):
    happen, source, words = LOSSES[loss]
    happen(copies)
    iteration, says, notes = recovered(pool, copies)
    assert (iteration, says) == (4, source)
    assert any(words in note for note in notes) if words else notes == []


def test_a_shard_that_is_nowhere_whole(pool, copies):
    flip_in_memory(copies)
    flip(root(copies, 0, "disk") / "iter_0000004" / "shard_00001.safetensors")
    iteration, _, notes = recovered(pool, copies)
    assert iteration is None and len(notes) == 3
    assert "(a copy in host memory)" in notes[0] and "(a copy in local disk)" in notes[1]
    assert notes[2] == "the copy of iteration 4 in peers is not complete: no host has shard_00001.safetensors whole"


def test_older_and_unwanted_copies(pool, copies):
    assert recovered(pool, copies, at_least=5) == (None, None, [])
    assert recovered(pool, copies, at_least=4)[0] == 4
    iteration, _, notes = recovered(pool, copies, at_least=0, refused=(4,))
    assert iteration is None and notes == ["the copy of iteration 4 in peers is not used: it is not wanted"]


def test_two_generations_as_a_kill_leaves_them(pool, tmp_path):
    """Killed after the newer one has its names, and before: the newer where it is whole, else the older."""
    pool.run(copy, RANKS, tmp_path, [2])
    places = [(host, source) for host in (0, 1) for source in ("memory", "disk")]
    older = {(h, s): shutil.copytree(root(tmp_path, h, s), tmp_path / f"kept-{h}-{s}") for h, s in places}
    pool.run(copy, RANKS, tmp_path, [4])
    for (host, source), kept in older.items():
        shutil.copytree(kept / "iter_0000002", root(tmp_path, host, source) / "iter_0000002")
    assert recovered(pool, tmp_path)[0] == 4
    for host in (0, 1):
        os.rename(root(tmp_path, host, "memory") / "iter_0000004", root(tmp_path, host, "memory") / ".tmp-iter_0000004")
    os.rename(root(tmp_path, 1, "disk") / "iter_0000004", root(tmp_path, 1, "disk") / ".tmp-iter_0000004")
    answers = pool.run(recover, RANKS, tmp_path)
    assert answers[0][:2] == (2, "host memory") and "no host has shard_00002.safetensors and 1 more whole" in answers[0][2][0]
    pool.run(copy, RANKS, tmp_path, [6])
    for host, source in older:
        assert [path.name for path in root(tmp_path, host, source).iterdir()] == ["iter_0000006"]


def test_a_copy_that_fails_leaves_the_one_before(pool, copies):
    answers = pool.run(copy, RANKS, copies, [6], 3)
    assert len(set(answers)) == 1 and "rank 3: OSError: [Errno 27] File too large" in answers[0]
    assert recovered(pool, copies)[:2] == (4, "host memory")


def test_one_host_and_one_rank(pool, tmp_path):
    pool.run(copy, RANKS, tmp_path, [2], None, 1)
    assert pool.run(recover, RANKS, tmp_path, 0, (), 1)[0][:2] == (2, "host memory")
    place = Place("here", tmp_path / "memory/u/f/run", tmp_path / "disk/u/f/run")
    peers, target = Peers(single(), place), torch.zeros(ROWS, 8)
    requests = [Request("model/x", (ROWS, 8), (0, 0), (ROWS, 8), target)]
    peers.save(3, [Piece("model/x", (ROWS, 8), (0, 0), (ROWS, 8), torch.ones(ROWS, 8))], {})
    found, notes = peers.recover(requests, 0, lambda meta: None)
    load_folder(found.folder, requests, single(), "", verify=False, complete=False)
    assert (target == 1).all() and found.says == "host memory" and notes == []
    peers.remove()
    assert not (tmp_path / "memory/u").exists() and not (tmp_path / "disk/u").exists()


def test_another_run_into_a_folder_that_was_made_anew(tmp_path, monkeypatch):
    """It does not meet the copies of the run before, and frees their memory."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(places, "MEMORY", tmp_path / "memory")
    old, new = (place_of("save", str(tmp_path / "disk"), run) for run in ("old", "new"))
    old.prepare()
    (old.memory / "iter_0000001").mkdir()
    new.prepare()
    assert old.memory.parent == new.memory.parent and [path.name for path in new.memory.parent.iterdir()] == ["new"]
    monkeypatch.setattr(places.os, "getuid", lambda: 12345)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        new.prepare()
    monkeypatch.setattr(places, "MEMORY", tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="nowhere is not there"):
        place_of("save", None, "run")


@pytest.mark.parametrize(("hosts", "by"), [("a", 0), ("aa", 1), ("aaaa", 1), ("ab", 1), ("aabb", 2), ("aabbcc", 2),
                                           ("aaaabbbb", 4), ("aaab", 1), ("abab", 1)])  # fmt: skip
def test_peers_are_on_another_host(hosts, by):
    assert distance(list(hosts)) == by
    if len(set(hosts)) > 1 and hosts != "aaab":
        assert all(hosts[r] != hosts[(r + by) % len(hosts)] for r in range(len(hosts)))


def test_sources_are_chosen_in_order():
    hosts = ["a", "a", "b", "b"]
    found = {"x": [Found("x", "disk", 0), Found("x", "memory", 3)], "y": [Found("y", "disk", 2), Found("y", "disk", 1)]}
    chosen = choose_sources([{"x"}, {"x", "y"}, {"y"}, set()], found, hosts)
    assert chosen == [(0, "x", found["x"][1]), (1, "y", found["y"][1]), (2, "y", found["y"][0])]
    assert leaders(hosts) == [0, 2]


def move(rank, folder, transfers, block):
    folder, mesh, before = Path(folder), mesh_of(RANKS), relay.BLOCK
    relay.BLOCK = block
    try:
        way = Relay(mesh.world, mesh.device)
        return way.move(transfers, lambda t: folder / f"{t.source}" / t.name, lambda t: folder / f"{t.target}-got" / t.name)
    finally:
        relay.BLOCK = before


@pytest.mark.parametrize("seed", range(3))
def test_files_travel_in_any_pattern(pool, tmp_path, seed):
    """Of any size, between any ranks, to oneself too; one that cannot be read or written is named and holds nobody up."""
    draw, transfers = random.Random(seed), []
    for rank in range(RANKS):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}-got").mkdir()
    for number in range(20):
        source, target, size = draw.randrange(RANKS), draw.randrange(RANKS), draw.choice([0, 1, 99, 100, 101, 1234])
        transfers.append(Transfer(source, target, f"f{number}", size))
        (tmp_path / f"{source}" / f"f{number}").write_bytes(draw.randbytes(size))
    broken, away = transfers[draw.randrange(10)], transfers[10 + draw.randrange(10)]
    (tmp_path / f"{broken.source}" / broken.name).unlink()
    (tmp_path / f"{away.target}-got" / away.name).mkdir()
    problems = pool.run(move, RANKS, tmp_path, transfers, 100)
    said = sorted(problem for own in problems for problem in own)
    assert len(said) == 2 and said[0].startswith("cannot read") and said[0].split(":")[0].endswith(f"/{broken.name}")
    assert said[1] == f"cannot write {tmp_path}/{away.target}-got/{away.name}: Is a directory"
    for transfer in transfers:
        if transfer not in (broken, away):
            sent = (tmp_path / f"{transfer.source}" / transfer.name).read_bytes()
            assert (tmp_path / f"{transfer.target}-got" / transfer.name).read_bytes() == sent
