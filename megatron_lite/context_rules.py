"""Rules about sequences that ranks share (`--context-parallel-size`): what is cut evenly, and which ways go with what."""

from collections.abc import Iterator
from math import lcm

from megatron_lite.rules import Problem, Values, about, have, nearest, nearest_values

CP, KINDS, DEGREE = "context_parallel_size", "cp_comm_type", "ulysses_degree"
BOTH = "a2a+p2p"
FP8_MULTIPLE = 16  # parallel/fp8.py


def context(s: Values) -> Iterator[Problem]:
    """All rules of a run that shares sequences."""
    if not have(s.context_parallel_size) or s.context_parallel_size == 1:
        return
    for rules in (_kinds, _degree, _length, _heads, _dropout):
        yield from rules(s)


def _kinds(s: Values) -> Iterator[Problem]:
    """One way for all layers, or one for each."""
    if len(s.cp_comm_type) not in (1, s.num_layers or len(s.cp_comm_type)):
        text = f"names {len(s.cp_comm_type)} ways for {s.num_layers} layers"
        yield about(s, f"{KINDS} num_layers", text, f"give one way for all layers, or {s.num_layers}")


def _degree(s: Values) -> Iterator[Problem]:
    """a2a+p2p cuts the axis in two, both of more than one rank."""
    cp, degree = s.context_parallel_size, s.ulysses_degree
    if BOTH not in s.cp_comm_type:
        return

    def works(n: int) -> bool:
        return 1 < n < cp and cp % n == 0

    found = {DEGREE: nearest(degree or 2, works, 2) if not works(degree or 2) else [2]}
    fix = nearest_values(**found) or nearest_values(**{CP: nearest(cp, lambda n: any(n % u == 0 for u in range(2, n)), 4)})
    if degree is None:
        text = "it is not said how many ranks trade heads; the rest is the ring"
        yield about(s, f"{KINDS} {CP} {DEGREE}", text, fix)
    elif not works(degree):
        text = f"{cp} ranks cannot be groups of {degree} that trade heads and a ring of more than one group"
        yield about(s, f"{CP} {DEGREE}", text, fix)


def _length(s: Values) -> Iterator[Problem]:
    """Two equal chunks of each sequence per rank; under sequence parallel each rank's tokens are cut over tp again."""
    cp, tp, length = s.context_parallel_size, s.tensor_model_parallel_size, s.seq_length
    if not have(length, tp):
        return

    def multiple(cp: int) -> int:
        return cp * lcm(2, tp if s.sequence_parallel else 1)

    each = multiple(cp)
    if length % each:
        reach = s.max_position_embeddings
        fits = [n for n in nearest(length, lambda n: n % each == 0) if reach in (None, length) or n <= reach]
        names, over = ["seq_length", CP], f"2 x cp {cp}"
        if s.sequence_parallel and tp > 1:
            names.append("tensor_model_parallel_size")
            over = f"{'2 x ' * (tp % 2)}cp {cp} x tp {tp} (--sequence-parallel)"
        fix = nearest_values(seq_length=fits, **{CP: nearest(cp, lambda n: length % multiple(n) == 0)})
        yield about(s, " ".join(names), f"{length} tokens are not a multiple of {over} = {each}", fix)
    elif s.fp8_format is not None and have(s.micro_batch_size) and length // cp * s.micro_batch_size % FP8_MULTIPLE:
        tokens = f"a rank's {length // cp} x {s.micro_batch_size} tokens"
        text = f"{tokens} are no multiple of {FP8_MULTIPLE}, which 8-bit products need"
        yield about(s, f"fp8_format seq_length {CP} micro_batch_size", text)


def _heads(s: Values) -> Iterator[Problem]:
    """Ranks that trade heads get equal numbers of them; key/value heads are dealt out, or shared by equal numbers of ranks."""
    cp, tp, heads = s.context_parallel_size, s.tensor_model_parallel_size, s.num_attention_heads
    groups = s.num_query_groups if s.group_query_attention else heads
    if not have(tp, heads, groups) or heads % tp or heads % groups or (groups % tp and tp % groups):
        return  # said elsewhere
    queries, shared = heads // tp, max(1, groups // tp)
    for kind, name, size in (("a2a", CP, cp), (BOTH, DEGREE, s.ulysses_degree)):
        if kind not in s.cp_comm_type or size is None or (kind == BOTH and not 1 < size < cp):
            continue
        works = nearest(size, lambda n: _dealt(queries, shared, n))
        if queries % size:
            text = f"{queries} heads of a tensor-parallel rank cannot be dealt out to {size} ranks"
            more = nearest(heads, lambda n, size=size: n % (tp * size) == 0)
            fix = f"{nearest_values(**{name: works, 'num_attention_heads': more})}; or another --cp-comm-type"
            yield about(s, f"num_attention_heads tensor_model_parallel_size {name}", text, fix)
        elif not _dealt(queries, shared, size):
            text = f"{shared} key/value heads of a tensor-parallel rank cannot be dealt out to {size} ranks, nor shared by them"
            fix = f"{nearest_values(**{name: works})}; or another --cp-comm-type"
            yield about(s, f"num_query_groups tensor_model_parallel_size {name}", text, fix)


def _dealt(queries: int, groups: int, ranks: int) -> bool:
    return queries % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


def _dropout(s: Values) -> Iterator[Problem]:
    """Where a query's keys come in parts there is no mask over its whole row."""
    kinds = sorted({kind for kind in s.cp_comm_type if kind != "a2a"})
    if s.attention_dropout and kinds:
        text = f"{' and '.join(kinds)}: a query's keys come in parts, and what is dropped would depend on the cut"
        fix = "nearest values that work: --attention-dropout 0; or --cp-comm-type a2a"
        yield about(s, f"attention_dropout {CP} {KINDS}", text, fix)
