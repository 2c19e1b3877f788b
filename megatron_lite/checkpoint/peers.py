"""Copies of a run's state that outlive its processes (`--peer-checkpoint-interval`).

    rank r   writes its shard           to the local disk of its own node       <disk>/iter_0000120/shard_0000r.safetensors
             and sends it to a peer     into the host memory of another node    <memory>/iter_0000120/shard_0000r.safetensors

A restart ends the processes, and their memory with them. What stays is a file in a file system that lives in memory
(/dev/shm), so that is where a peer keeps what it is sent. Either folder is a part of an ordinary checkpoint: the shards
that this node holds, and the manifest of all of them, which is there only if every rank has written its own.

A node that is lost takes its own shards and those of its peers along; the first are in the peers' memory, the second on
the peers' disks. Each place holds one generation, and two while the newer one is written: the older one goes when all
ranks have said that the newer one is complete.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron_lite.checkpoint.agree import CheckpointError, agree, problems_of
from megatron_lite.checkpoint.boxes import Piece, Request
from megatron_lite.checkpoint.folder import TEMPORARY, clean, discard, iteration_name, sync_folder, write_durably
from megatron_lite.checkpoint.load import plan
from megatron_lite.checkpoint.manifest import NAME, Entry, Manifest, Stored, intact, read_manifest, to_text
from megatron_lite.checkpoint.places import Place
from megatron_lite.checkpoint.save import merge, write_own
from megatron_lite.checkpoint.shard_file import ShardReader
from megatron_lite.comm.collectives import gather_objects
from megatron_lite.comm.mesh import Mesh
from megatron_lite.comm.relay import Relay, Transfer

SOURCES = {"memory": "host memory", "disk": "local disk"}  # in the order in which they are asked
VIEW = TEMPORARY + "loading"  # in a host's memory folder: the manifest and every shard that its ranks read, or links to them


class Generation(NamedTuple):
    """One copied state, by its manifest: two passes of a run through one iteration are two of them."""

    iteration: int
    crc32: int  # of the manifest's bytes
    size: int


class Found(NamedTuple):
    """A whole shard: where it lies, on the host of the rank that has looked at it."""

    name: str
    source: str
    rank: int


class Recovered(NamedTuple):
    """A generation whose every shard was found. `folder`: what this host's ranks need of it; `says`: where it comes from."""

    folder: Path
    iteration: int
    says: str


class Peers:
    """The copies of one run, as one rank sees them. Constructor and methods are collective over all ranks."""

    def __init__(self, mesh: Mesh, place: Place):
        self.world, self.place = mesh.world, place
        self.hosts: list[str] = gather_objects(place.host, mesh.world)
        self.rank = mesh.world.rank
        self.mates = [rank for rank, host in enumerate(self.hosts) if host == place.host]
        self.leads = self.rank in leaders(self.hosts)  # speaks for its host
        self.distance = distance(self.hosts)
        self.relay = Relay(mesh.world, mesh.device)
        agree(lambda: place.prepare() if self.leads else None, self.world, "preparing copies in peers")

    def save(self, iteration: int, pieces: Iterable[Piece], meta: dict) -> None:
        """Copy what this rank owns of `iteration`, as `save_checkpoint` takes it, to the disk and to the peer's memory; `meta` is
        rank 0's.

        Raises one CheckpointError on every rank if it failed on some: the copies before it are then still there.
        """
        doing, name = f"copying iteration {iteration} to peers", iteration_name(iteration)
        memory, disk = (root / (TEMPORARY + name) for root in self.place.roots)
        try:
            agree(lambda: self._make(memory, disk), self.world, doing)
            mine = meta if self.rank == 0 else None  # other ranks may know less; one manifest for all
            answers = agree(lambda: (write_own(disk, self.rank, pieces), mine), self.world, doing)
            reports, told = [report for report, _ in answers], answers[0][1]
            transfers = [Transfer(rank, (rank + self.distance) % self.world.size, file, size)
                         for rank, (files, _) in enumerate(reports) for file, size in files.items()]  # fmt: skip
            problems = self.relay.move(transfers, lambda t: disk / t.name, lambda t: memory / t.name)
            agree(partial(fail, problems), self.world, doing)
            agree(lambda: self._publish((memory, disk), iteration, reports, told), self.world, doing)
        except CheckpointError:
            if self.leads:
                discard(memory)
                discard(disk)
            raise
        if self.leads:
            for old in (path for root in self.place.roots for path in root.glob("iter_*") if path.name != name):
                discard(old)

    def _make(self, *folders: Path) -> None:
        if self.leads:
            for folder in folders:
                folder.parent.mkdir(parents=True, exist_ok=True)
                clean(folder.parent)
                folder.mkdir()

    def _publish(self, folders: Iterable[Path], iteration: int, reports: list, meta: dict) -> None:
        if self.leads:
            text = to_text(merge(iteration, reports, meta))
            for folder in folders:
                final = folder.with_name(iteration_name(iteration))
                write_durably(folder / NAME, text)
                sync_folder(folder)
                discard(final)  # of an earlier pass
                os.rename(folder, final)
                sync_folder(folder.parent)

    def remove(self) -> None:
        """Give memory and disk back: what is in the shared folder is as new."""
        if self.leads:
            self.place.remove()

    def recover(self, requests: Sequence[Request], at_least: int, refuse: Callable[[dict], str | None],
                verify: bool = True) -> tuple[Recovered | None, list[str]]:  # fmt: skip
        """The newest generation, not older than iteration `at_least`, whose every shard is found whole, made ready for this
        host's ranks to read what they request; and a note on each newer one and each damaged shard. All ranks agree.

        refuse  gets a generation's `meta`; a reason not to use it, or None
        verify  compare checksums, not only sizes and headers
        """
        notes: list[str] = []
        local, generations = self._list(notes)
        for generation, holder in sorted(generations.items(), reverse=True):
            if generation.iteration < at_least:
                break
            try:
                manifest = self._manifest(generation, holder, local)
                why = agree(lambda m=manifest: refuse(m.meta) if self.rank == 0 else None, self.world, "looking at copies")[0]
                found = None if why else self._find(manifest, generation, local, verify, notes)
                if found is not None:
                    self._assemble(manifest, generation, local, found, requests)
                    return Recovered(self.place.memory / VIEW, generation.iteration, in_words(found)), notes
            except CheckpointError as error:
                why = "; ".join(problems_of(error))
            if why:
                notes.append(f"the copy of iteration {generation.iteration} in peers is not used: {why}")
        self.close_view()
        return None, notes

    def _list(self, notes: list[str]) -> tuple[dict[tuple[str, Generation], Path], dict[Generation, int]]:
        """({(source, generation): folder} of this host, {generation: a rank whose host has its manifest})."""
        local, problems = listing(self.place)
        spoken = (sorted({generation for _, generation in local}), problems) if self.leads else ([], [])
        generations: dict[Generation, int] = {}
        for rank, (held, wrong) in enumerate(gather_objects(spoken, self.world)):
            notes += wrong
            for generation in held:
                generations.setdefault(generation, rank)
        return local, generations

    def _manifest(self, generation: Generation, holder: int, local: dict[tuple[str, Generation], Path]) -> Manifest:
        """The generation's manifest on every rank, also where a host has none of it; leaves it in an empty view folder."""
        view, doing, manifests = self.place.memory / VIEW, "reading copies", []
        own = next((folder for (_, held), folder in local.items() if held == generation), None)

        def make() -> None:
            if self.leads:
                discard(view)
                view.mkdir(parents=True)

        agree(make, self.world, doing)
        transfers = [Transfer(holder, lead, NAME, generation.size) for lead in leaders(self.hosts)]
        problems = self.relay.move(transfers, lambda _: own / NAME, lambda _: view / NAME)
        agree(partial(fail, problems), self.world, doing)
        agree(lambda: manifests.append(read_manifest(view)), self.world, doing)
        return manifests[0]

    def _find(self, manifest: Manifest, generation: Generation, local: dict[tuple[str, Generation], Path], verify: bool,
              notes: list[str]) -> dict[str, list[Found]] | None:  # fmt: skip
        """{shard: where it is whole}; None, and a note, if one is nowhere. Asks for on disks what no memory has."""
        found: dict[str, list[Found]] = defaultdict(list)
        for source in SOURCES:
            missing = [name for name in manifest.files if name not in found]
            if missing:
                folder = local.get((source, generation))
                check = partial(self._check, manifest, folder, source, missing, verify)
                for good, bad in agree(check, self.world, "looking for copies"):
                    notes += bad
                    for shard in good:
                        found[shard.name].append(shard)
        lost = [name for name in manifest.files if name not in found]
        if not lost:
            return found
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        notes.append(f"the copy of iteration {generation.iteration} in peers is not complete: no host has {lost[0]}{more} whole")
        return None

    def _check(self, manifest: Manifest, folder: Path | None, source: str, names: Iterable[str],
               verify: bool) -> tuple[list[Found], list[str]]:  # fmt: skip
        """(whole shards, what is wrong with others) of those that lie here and are this rank's to look at."""
        here = [name for name in names if folder is not None and (folder / name).is_file()]
        good, bad = [], []
        blocks = blocks_by_file(manifest)
        for name in here[self.mates.index(self.rank) :: len(self.mates)]:
            problem = damage(folder / name, manifest.files[name], blocks[name], verify)
            if problem is None:
                good.append(Found(name, source, self.rank))
            else:
                bad.append(f"{problem} (a copy in {SOURCES[source]})")
        return good, bad

    def _assemble(self, manifest: Manifest, generation: Generation, local: dict[tuple[str, Generation], Path],
                  found: dict[str, list[Found]], requests: Sequence[Request]) -> None:  # fmt: skip
        """Fill this host's view with the shards that its ranks need: links to what is here, the rest from other hosts."""
        view, doing = self.place.memory / VIEW, "bringing copies to where they are needed"
        needs = gather_objects({read.box.file for read in plan(manifest, requests)[0]}, self.world)
        chosen = choose_sources(needs, found, self.hosts)
        transfers = [Transfer(shard.rank, target, name, manifest.files[name]) for target, name, shard in chosen
                     if self.hosts[shard.rank] != self.hosts[target]]  # fmt: skip
        sources = {name: shard.source for target, name, shard in chosen if shard.rank == self.rank}

        def link() -> None:
            for target, name, shard in chosen:
                if target == self.rank and self.hosts[shard.rank] == self.place.host:
                    os.symlink(local[shard.source, generation] / name, view / name)

        agree(link, self.world, doing)
        problems = self.relay.move(transfers, lambda t: local[sources[t.name], generation] / t.name, lambda t: view / t.name)
        agree(partial(fail, problems), self.world, doing)

    def close_view(self) -> None:
        """After everybody has read: let go of what was made ready."""
        if self.leads:
            discard(self.place.memory / VIEW)


def distance(hosts: Sequence[str]) -> int:
    """How many ranks further on a rank's peer is, so that as many as possible have theirs on another host. Pure.

    4 ranks on each of 2 hosts: 4; on one host: 1; one rank: 0, its own host's memory.
    """
    ranks = len(hosts)

    def apart(by: int) -> int:
        return sum(hosts[rank] != hosts[(rank + by) % ranks] for rank in range(ranks))

    candidates = sorted(by for by in {1, ranks // 2, *Counter(hosts).values()} if 0 < by < ranks)
    return max(candidates, key=apart, default=0)


def leaders(hosts: Sequence[str]) -> list[int]:
    """The first rank of each host. Pure."""
    return sorted({hosts.index(host) for host in hosts})


def choose_sources(needs: Sequence[set[str]], found: dict[str, list[Found]],
                   hosts: Sequence[str]) -> list[tuple[int, str, Found]]:  # fmt: skip
    """[(rank that gets it for its host, shard, where it comes from)], each shard once per host that needs it. Pure.

    Memory comes before disks, and the own host before others.
    """
    order, chosen = list(SOURCES), []
    first: dict[tuple[str, str], int] = {}
    for rank, names in enumerate(needs):
        for name in names:
            first.setdefault((hosts[rank], name), rank)
    for (host, name), target in sorted(first.items(), key=lambda item: (item[0][1], item[1])):
        best = min(found[name], key=lambda shard: (order.index(shard.source), hosts[shard.rank] != host, shard.rank))
        chosen.append((target, name, best))
    return chosen


def listing(place: Place) -> tuple[dict[tuple[str, Generation], Path], list[str]]:
    """({(source, generation): folder}, damaged manifests) of one host."""
    found, problems = {}, []
    for source, root in zip(SOURCES, place.roots, strict=True):
        for folder in sorted(root.glob("iter_*")):
            match = re.fullmatch(r"iter_(\d+)", folder.name)
            try:
                raw = (folder / NAME).read_bytes()
            except OSError as error:
                problems.append(f"cannot read the manifest {folder / NAME}: {error.strerror}")
                continue
            if match and intact(raw):
                found[source, Generation(int(match[1]), zlib.crc32(raw), len(raw))] = folder
            else:
                problems.append(f"the manifest {folder / NAME} is damaged: its checksum does not fit")
    return found, problems


def blocks_by_file(manifest: Manifest) -> dict[str, list[tuple[Stored, Entry]]]:
    blocks = defaultdict(list)
    for entry in manifest.tensors.values():
        for box in entry.boxes:
            blocks[box.file].append((box, entry))
    return blocks


def damage(path: Path, size: int, blocks: Iterable[tuple[Stored, Entry]], verify: bool) -> str | None:
    """Why a shard is not what was written, or None."""
    try:
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, {size} were written"
        with ShardReader(path) as file:
            for box, entry in blocks:
                file.position(box, entry.dtype)
                if verify and file.checksum(box, entry) != box.checksum:
                    return f"{path} is damaged: the checksum of {box.key} does not fit"
    except (CheckpointError, OSError) as error:
        return problems_of(error)[0]
    return None


def in_words(found: dict[str, list[Found]]) -> str:
    """`host memory`, or `host memory (3 of 4 shards) and local disk (1)`."""
    counts = Counter(min((shard.source for shard in shards), key=list(SOURCES).index) for shards in found.values())
    if len(counts) == 1:
        return SOURCES[next(iter(counts))]
    memory, disk = SOURCES.values()
    return f"{memory} ({counts['memory']} of {len(found)} shards) and {disk} ({counts['disk']})"


def fail(problems: list[str]) -> None:
    if problems:
        raise CheckpointError("copies could not be moved", problems)
