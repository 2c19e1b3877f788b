"""megatron_lite in the speed table.

`build(spec)` returns an object with `run_steps(k) -> {"losses": [k floats], "norms": [k floats]}`: the mean loss of the
global batch, and the gradient norm before clipping, of each of the next k steps. loops.Loop is an example; rank 0's
answer is the one that is read. The spec says all:

    spec.group                    "single", "tp", "pp" or "dp": the axis the spec.world ranks lie on
    spec.rank, spec.world         also in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, as torchrun sets them
    spec.dtype                    "bf16" or "fp32"
    spec.threads                  threads of this process, already set
    spec.micro_batch, spec.global_batch
    spec.shape                    the model; NORM_EPS, ROPE_BASE and AdamW's numbers are constants of spec.py
    spec.load_weights(keep)       initial weights under Hugging Face names, fp32
    spec.batch(step)              token ids [global_batch, seq + 1]; data-parallel rank r takes rows.chunk(world)[r]
    spec.options["split"]         for "pp": layers of each stage
"""

from benchmarks.peers.spec import Spec


def build(spec: Spec):
    """Not wired up yet."""
    raise NotImplementedError("benchmarks/peers/ours.py is not wired up yet")
