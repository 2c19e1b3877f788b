"""Who runs in the speed table, and how: one row per contender, grouped by the layout it runs at."""

from dataclasses import dataclass, field, replace

# The allocator as megatron_lite sets it for itself on CPU, given to a peer by environment: glibc keeps the memory it
# has instead of handing every large tensor back to the kernel and faulting its pages in again. The column of page
# faults shows that it works.
HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # huge pages for the heap
}


@dataclass(frozen=True)
class Layout:
    """What the contenders of one group have in common. A microbatch is counted per rank that owns its own rows."""

    world: int
    threads: int
    micro_batch: int
    global_batch: int


LAYOUTS = {
    "single": Layout(world=1, threads=2, micro_batch=4, global_batch=8),
    "tp": Layout(world=2, threads=1, micro_batch=4, global_batch=8),
    "pp": Layout(world=2, threads=1, micro_batch=2, global_batch=16),
    "dp": Layout(world=2, threads=1, micro_batch=4, global_batch=16),
}


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    name: str
    module: str
    group: str
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    compile: bool = False
    heap: bool = False
    extra: bool = False  # slower than its sibling: run on request only
    options: dict = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Is it megatron_lite?"""
        return self.module == "ours"


CEILING = Contender("matrix products", "ceiling", "single", heap=True)


def peers(splits: list[list[int]]) -> list[Contender]:
    """Every peer as it ships. The first of a group is its baseline."""
    bf16, masters = ("bf16",), {"masters": True}
    rows = [
        Contender("plain", "plain", "single"),
        Contender("plain-masters", "plain", "single", bf16, options=masters),
        Contender("plain-compiled", "plain", "single", compile=True),
        Contender("plain-masters-compiled", "plain", "single", bf16, compile=True, options=masters),
        Contender("transformers", "hf", "single"),
        Contender("transformers-compiled", "hf", "single", compile=True),
        Contender("litgpt", "lit", "single"),
        Contender("dtensor", "dtensor_tp", "tp"),
        Contender("dtensor-masters", "dtensor_tp", "tp", bf16, extra=True, options=masters),
        Contender("ddp", "ddp", "dp"),
    ]
    for split in splits:
        name = "1f1b-" + "+".join(map(str, split))
        options = {"split": split}
        rows.append(Contender(name, "torch_pp", "pp", options=options))
        rows.append(Contender(name + "-masters", "torch_pp", "pp", bf16, extra=True, options=options | masters))
    return rows


def with_heap(contender: Contender) -> Contender:
    """The same peer with our allocator settings."""
    return replace(contender, name=contender.name + "+heap", heap=True)


def block(group: str, dtype: str, splits: list[list[int]], compiled: bool, extra: bool, ours: bool) -> list[Contender]:
    """The contenders of one block of the table: each peer twice, then ours, which gets the last split given."""
    rows = []
    for peer in peers(splits):
        wanted = (compiled or not peer.compile) and (extra or not peer.extra)
        if peer.group == group and dtype in peer.dtypes and wanted:
            rows += [peer, with_heap(peer)]
    if ours:
        options = {"split": splits[-1]} if group == "pp" else {}
        rows.append(Contender("ours", "ours", group, options=options))
        if compiled:
            rows.append(Contender("ours-compiled", "ours", group, compile=True, options=options))
    return rows


# Rows of benchmarks/pipeline_bubble.py: name -> (our schedule, torch's by our name of it, layers of each stage).
PIPELINES = {
    "gpipe": ("gpipe", "gpipe", [4, 4]),
    "1f1b": ("1f1b", "1f1b", [4, 4]),
    "1f1b-5+3": ("1f1b", "1f1b", [5, 3]),
    "interleaved": ("interleaved", "interleaved", [2, 2, 2, 2]),
    "interleaved-3+2+2+1": ("interleaved", "interleaved", [3, 2, 2, 1]),
    "interleaved-zb": (None, "interleaved-zb", [2, 2, 2, 2]),
    "auto": ("auto", None, [None]),
    "zb-h1": ("zb-h1", None, [4, 4]),
    "zb-h1-5+3": ("zb-h1", None, [5, 3]),
    "zbv": ("zbv", "zbv", [2, 2, 2, 2]),
    "dualpipev": ("dualpipev", "dualpipev", [2, 2, 2, 2]),
}


def pipelines(names: list[str], heap: bool) -> list[Contender]:
    """Torch's pipeline schedules and ours at the same cut of the layers; with `heap` torch also with our allocator."""
    rows = []
    for name in names:
        ours, theirs, split = PIPELINES[name]
        if theirs:
            peer = Contender(f"torch {name}", "torch_pp", "pp", options={"schedule": theirs, "split": split})
            rows += [peer, with_heap(peer)] if heap else [peer]
        if ours:
            options = {"schedule": ours, "split": [split[0], split[-1]]}
            rows.append(Contender(f"ours {name}", "ours", "pp", options=options))
    return rows
