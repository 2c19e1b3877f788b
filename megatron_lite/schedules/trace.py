"""A timeline in Chrome's trace format, for ui.perfetto.dev and chrome://tracing.

One track per rank with a slice for every action, an arrow for every message, and a counter of live activations.
Format: "Trace Event Format" (Google): `X` complete slice, `s`/`f` ends of an arrow, `C` counter, `M` names.
"""

from megatron_lite.schedules.actions import Message, received, sent
from megatron_lite.schedules.simulate import Number, Timeline

COLOR_NAMES = {"F": "thread_state_running", "B": "rail_response", "W": "rail_animation", "BW": "good"}


def chrome_trace(timeline: Timeline, title: str = "pipeline", unit_us: Number = 1000) -> dict:
    """The trace as a dict for `json.dump`; `unit_us` microseconds for each unit of the timeline's time."""
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}}]
    for rank in range(timeline.placement.pp_size):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": rank, "args": {"sort_index": rank}})
        events += _slices(timeline, rank, unit_us) + _counter(timeline, rank, unit_us)
    events += _arrows(timeline, unit_us)
    facts = {
        "step": float(timeline.makespan),
        "sync bubble": float(timeline.sync_bubble),
        "span bubble": float(timeline.span_bubble),
        "peak live": list(timeline.peak_live),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _slices(timeline: Timeline, rank: int, unit_us: Number) -> list[dict]:
    return [
        {
            "name": str(action),
            "cat": action.kind,
            "ph": "X",
            "ts": float(start * unit_us),
            "dur": float((end - start) * unit_us),
            "pid": 0,
            "tid": rank,
            "cname": COLOR_NAMES[action.kind],
            "args": {
                "microbatch": action.microbatch,
                "chunk": action.chunk,
                "stage": timeline.placement.stage(rank, action.chunk),
            },
        }
        for action, start, end in timeline.spans[rank]
    ]


def _counter(timeline: Timeline, rank: int, unit_us: Number) -> list[dict]:
    """Live microbatches, which an F adds to when it starts and a W takes from when it ends."""
    name, share = f"live activations, rank {rank}", timeline.placement.chunks_per_share
    live, events = 0, []
    for action, start, end in timeline.spans[rank]:
        for part, time, change in (("F", start, 1), ("W", end, -1)):
            if part in action.parts:
                live += change
                counts = {"microbatches": live / share}
                events.append({"name": name, "ph": "C", "ts": float(time * unit_us), "pid": 0, "args": counts})
    return events


def _arrows(timeline: Timeline, unit_us: Number) -> list[dict]:
    """From the end of the action that sends a message to the start of the one that takes it."""
    leaves: dict[Message, Number] = {}
    for rank, spans in enumerate(timeline.spans):
        for action, _, end in spans:
            if message := sent(action, rank, timeline.placement):
                leaves[message] = end
    events = []
    for rank, spans in enumerate(timeline.spans):
        for action, start, _ in spans:
            message = received(action, rank, timeline.placement)
            if message in leaves:
                shared = {"name": message.kind, "cat": "p2p", "id": len(events) // 2, "pid": 0}
                source, target = message.source.rank, rank
                # A hair before the end, or the arrow would hang on the slice that begins there.
                events.append({**shared, "ph": "s", "tid": source, "ts": float(leaves[message] * unit_us) - 1e-3})
                events.append({**shared, "ph": "f", "bp": "e", "tid": target, "ts": float(start * unit_us)})
    return events
