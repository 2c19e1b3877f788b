"""Rank <-> (tp, cp, ep, dp, pp): arithmetic only, no torch, no processes.

    rank = tp + TP * (cp + CP * (dp + DP * pp))          tp fastest, pp slowest (Megatron's tp-cp-ep-dp-pp)

Expert parallelism borrows its ranks from dp x cp, so it adds no factor: within the combined index
`cp + CP * dp` of size CP*DP, the ep rank is the fast part (`index % EP`).
Groups of different axes meet in exactly one rank. 16 ranks at tp 4, pp 2, dp 2: tp [0..3], dp [0, 4], pp [0, 8].
"""

from dataclasses import dataclass

AXES = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True)
class Grid:
    """Sizes of the five axes. `world_size` = tp * cp * dp * pp.

    `mirrored`: a pipeline runs both ways (DualPipe), so that its ranks r and p-1-r hold the same stages.
    `zero_replicas`: copies of what ZeRO shards. `ulysses`: neighbours on the cp axis that trade sequence for heads.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    mirrored: bool = False
    zero_replicas: int = 1
    ulysses: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """{'tp': ..., 'cp': ..., 'ep': ..., 'dp': ..., 'pp': ...} of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        dp, pp = rest % self.dp, rest // self.dp
        return {"tp": tp, "cp": cp, "ep": (cp + self.cp * dp) % self.ep, "dp": dp, "pp": pp}

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Global rank of a coordinate (ep follows from cp and dp)."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups that span `axes` together: ranks that agree in every other axis. In order of their first rank.

        `groups("dp", "cp")` is where gradients are reduced, `groups("tp", "pp")` is one model replica.
        """
        if "ep" in axes:
            if axes != ("ep",):
                raise ValueError("the ep axis is folded into dp x cp and cannot be combined with another axis")
            return self._expert_groups()
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            where = self.coordinates(rank)
            found.setdefault(tuple(where[a] for a in ("tp", "cp", "dp", "pp") if a not in axes), []).append(rank)
        return sorted(found.values())

    def zero_groups(self) -> tuple[list[list[int]], list[list[int]]]:
        """(ranks that share one copy of the model state, ranks that hold the same part of it).

        Each dp x cp group is cut into `zero_replicas` runs of neighbours: a copy stays within a node where it can.
        dp 4, 2 replicas: shards [0, 1] [2, 3], replicas [0, 2] [1, 3].
        """
        shards, replicas = [], []
        for group in self.groups("dp", "cp"):
            size = len(group) // self.zero_replicas
            shards += [group[at : at + size] for at in range(0, len(group), size)]
            replicas += [group[at::size] for at in range(size)]
        return shards, replicas

    def context_groups(self) -> tuple[list[list[int]], list[list[int]]]:
        """(neighbours that trade sequence for heads, one rank of each: a ring): each cp group cut in two, `ulysses` wide.

        cp 4, ulysses 2: trade [0, 1] [2, 3], rings [0, 2] [1, 3].
        """
        trades, rings = [], []
        for group in self.groups("cp"):
            trades += [group[at : at + self.ulysses] for at in range(0, len(group), self.ulysses)]
            rings += [group[at :: self.ulysses] for at in range(self.ulysses)]
        return trades, rings

    def _expert_groups(self) -> list[list[int]]:
        found: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.world_size):
            where = self.coordinates(rank)
            block = (where["cp"] + self.cp * where["dp"]) // self.ep
            found.setdefault((where["tp"], block, where["pp"]), []).append(rank)
        return sorted(found.values())

    def expert_replicas(self) -> list[list[int]]:
        """Ranks that hold the same experts: of one dp x cp group those of equal ep, its slow part.

        dp 4, ep 2: experts are shared by [0, 1] [2, 3], and held alike by [0, 2] [1, 3].
        """
        return sorted(group[at :: self.ep] for group in self.groups("dp", "cp") for at in range(self.ep))

    def draw(self) -> str:
        """The grid as text: one row per (dp, cp), one column per stage, tp ranks side by side."""
        cells = []
        for dp in range(self.dp):
            for cp in range(self.cp):
                label = f"dp {dp}" + (f" cp {cp}" if self.cp > 1 else "")
                row = [" ".join(f"{self.rank(tp=t, cp=cp, dp=dp, pp=p):>3}" for t in range(self.tp)) for p in range(self.pp)]
                cells.append([label, *row])
        header = ["", *(f"stage {p}" for p in range(self.pp))]
        widths = [max(len(line[i]) for line in [header, *cells]) for i in range(self.pp + 1)]
        sizes = " x ".join(f"{a} {getattr(self, a)}" for a in ("tp", "cp", "pp", "dp") if a != "cp" or self.cp > 1)
        lines = [f"grid: {sizes} = {self.world_size} rank{'s' if self.world_size > 1 else ''}"
                 + (f", ep {self.ep} inside dp x cp" if self.ep > 1 else "")]
        lines.append("  " + "   ".join(text.ljust(w) for text, w in zip(header, widths, strict=True)).rstrip())
        for line in cells:
            lines.append("  " + " | ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip())
        return "\n".join(lines)
