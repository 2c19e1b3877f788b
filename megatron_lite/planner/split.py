"""Which pipeline stage holds which layers.

8 layers on 4 stages          2 2 2 2
30 layers on 4 stages         8 8 7 7      no layer is dropped; the last stage, which also has the head, is lightest
30 on 4, first 6              6 8 8 8
"""


def split_layers(num_layers: int, pp: int, first: int | None = None, last: int | None = None) -> list[int]:
    """Layers per stage, first stage to last; their sum is always `num_layers`.

    `first` and `last` fix the end stages (`--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers`);
    the rest is shared out evenly, and what does not divide goes one layer each to the earliest of the remaining stages.
    Raises ValueError, in words, where no split gives every stage at least one layer.
    """
    if num_layers < pp:
        raise ValueError(f"{num_layers} layers cannot fill {pp} stages, each needs one")
    if pp == 1:
        given = [n for n in (first, last) if n is not None and n != num_layers]
        if given:
            raise ValueError(f"one stage holds all {num_layers} layers, not {given[0]}")
        return [num_layers]
    for name, count in (("first", first), ("last", last)):
        if count is not None and count < 1:
            raise ValueError(f"the {name} stage needs at least one layer, not {count}")
    head = [] if first is None else [first]
    tail = [] if last is None else [last]
    free, rest = pp - len(head) - len(tail), num_layers - sum(head) - sum(tail)
    if rest < free or (free == 0 and rest):
        raise ValueError(_why(num_layers, free, rest, first, last))
    small, extra = divmod(rest, free) if free else (0, 0)
    return head + [small + (i < extra) for i in range(free)] + tail


def layer_ranges(num_layers: int, pp: int, first: int | None = None, last: int | None = None) -> list[range]:
    """The global layer numbers of every stage: `split_layers` added up."""
    ends = [0]
    for count in split_layers(num_layers, pp, first, last):
        ends.append(ends[-1] + count)
    return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def _why(num_layers: int, free: int, rest: int, first: int | None, last: int | None) -> str:
    """The reason a split with fixed end stages cannot be."""
    fixed = " and ".join(
        f"{count} on the {name} stage" for name, count in (("first", first), ("last", last)) if count is not None
    )
    if free == 0:
        return f"{fixed} make {first + last} layers, the model has {num_layers}"
    return (
        f"{fixed} leave {rest} of {num_layers} layers for {free} other stage{'s' if free > 1 else ''}, each needs one"
    )
