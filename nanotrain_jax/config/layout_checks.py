"""Checks of the keys that lay a model out over tensor, context and pipe."""

from nanotrain_jax.config.derived import fits_flash
from nanotrain_jax.config.execution import reduces_per_layer
from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.values import SCHEDULE_CELLS, divisors, near_multiples
from nanotrain_jax.parallel.pipeline import schedule_text


def check_tokens_and_widths(config: Config) -> None:
    """Raise Misfit unless the devices of context and tensor can share the tokens, heads and widths."""
    check_context(config)
    if config.model.factory is None:
        check_tensor(config)
        check_ulysses(config)
        check_documents(config)


def check_tensor(config: Config) -> None:
    """Raise Misfit unless parallel.tensor divides heads, d_ff and (with sequence parallelism) the sequence."""
    m, p, T = config.model, config.parallel, config.data.seq_len // config.parallel.context
    N, K = m.num_heads, m.num_kv_heads
    tokens = "data.seq_len" if p.context == 1 else "data.seq_len / parallel.context"

    def misfits(t: int) -> list[str]:
        sizes = {"model.num_heads": N} | ({tokens: T} if p.sequence_parallel else {})
        sizes |= {"model.d_ff": m.d_ff} if m.dense_layers or not m.experts else {}
        sizes |= {"model.experts.d_ff": m.experts.d_ff} if m.experts else {}
        problems = [f"does not divide {name}={size}" for name, size in sizes.items() if size % t]
        return problems + [f"neither divides model.num_kv_heads={K} nor is a multiple of it"] * bool(K % t and t % K)

    problems = misfits(p.tensor)
    if p.tensor > 1 and p.overlap_tensor:
        check_overlap(config)
    if problems:
        problem = " and ".join(problems)
        *smaller, largest = (str(t) for t in divisors(N) if not misfits(t))
        remedy = (", ".join(smaller) + " or " if smaller else "") + largest
        if p.sequence_parallel and T % p.tensor:
            remedy += ", another data.seq_len, or parallel.sequence_parallel=false"
        key = f"parallel.tensor={p.tensor}"
        raise Misfit(f"{key} {problem}", f"use {remedy}", f"{key} {problems[0]}")


def check_overlap(config: Config) -> None:
    """Raise Misfit unless activations can travel around the tensor axis in hops."""
    p = config.parallel
    if not p.sequence_parallel:
        raise Misfit(
            "parallel.overlap_tensor=true with parallel.sequence_parallel=false: an all-reduce has no hops",
            "use parallel.sequence_parallel=true",
        )
    if p.pipe > 1 and p.idle == "skip":
        raise Misfit(
            f"parallel.overlap_tensor=true with parallel.pipe={p.pipe} and parallel.idle=skip: a ring needs all "
            "devices in a permute, and idle stages skip it",
            "use parallel.idle=mask, or parallel.overlap_tensor=false",
        )


def check_context(config: Config) -> None:
    """Raise Misfit unless parallel.context divides the sequence, and all its devices take part in the attention."""
    p, T = config.parallel, config.data.seq_len
    if p.context == 1:
        return
    kind = f"parallel.context_attention={p.context_attention}"
    chunks = p.context * (2 if p.is_blockwise else 1)
    if T % chunks:
        raise Misfit(
            f"data.seq_len={T} with parallel.context={p.context} and {kind}: not a multiple of {chunks}",
            f"use data.seq_len={near_multiples(T, chunks)}",
        )
    if p.context_attention == "ring" and p.pipe > 1 and p.idle == "skip":
        raise Misfit(
            f"{kind} with parallel.pipe={p.pipe} and parallel.idle=skip: a ring needs all devices in a permute, and "
            "idle stages skip it",
            "use parallel.context_attention=gather or ulysses, or parallel.idle=mask",
        )


def check_ulysses(config: Config) -> None:
    """Raise Misfit unless ulysses can divide the heads of a tensor-parallel device over parallel.context."""
    m, p = config.model, config.parallel
    if p.context == 1 or p.context_attention != "ulysses":
        return
    N, K = m.num_heads // p.tensor, max(1, m.num_kv_heads // p.tensor)
    works = [c for c in divisors(N) if c > 1 and (K % c == 0 or c % K == 0)]
    if p.context in works:
        return
    per_device = " on a tensor-parallel device" if p.tensor > 1 else ""
    smaller = f"parallel.context={' or '.join(map(str, works))}, or " if works else ""
    raise Misfit(
        f"parallel.context={p.context} with parallel.context_attention=ulysses: must divide the {N} query heads"
        f"{per_device}, and divide the {K} key heads or be a multiple of them",
        f"use {smaller}parallel.context_attention=ring",
    )


def check_documents(config: Config) -> None:
    """Raise Misfit for conversations with pictures, and for rows of an odd number of tokens, which flash attention with
    a mask cannot cut in two."""
    if config.vision and config.data.is_chat:
        raise Misfit(f"data.source={config.data.source!r} with vision: its rows have no pictures", "use arrays:DIR")
    d, window = config.data, config.model.sliding_window if config.parallel.context > 1 else None
    is_masked = window or not d.attend_across_documents
    if d.seq_len % 2 and is_masked and fits_flash(config.model, config.precision.compute):
        key = f"model.sliding_window={window} over context" if window else "data.attend_across_documents=false"
        raise Misfit(
            f"data.seq_len={d.seq_len} with {key}: flash attention cuts rows in two",
            f"use data.seq_len={d.seq_len + 1}, or model.attention=xla",
        )


def check_pipe(config: Config) -> None:
    """Raise Misfit unless there is a layer for every stage and chunk, and the schedule supports them."""
    L, p = config.model.main_layers, config.parallel
    if p.pipe == 1:
        if p.chunks > 1:
            raise Misfit(f"parallel.chunks={p.chunks} with parallel.pipe=1 has nothing to interleave", "use 1")
        return
    parts = p.pipe * p.chunks
    if parts > L:
        asked = f" x parallel.chunks = {p.pipe} x {p.chunks} = {parts}" if p.chunks > 1 else f"={p.pipe}"
        raise Misfit(
            f"parallel.pipe{asked} exceeds {name_of_layers(config)}={L}: each chunk needs a layer",
            f"use at most {L} stages x chunks",
        )
    if p.idle == "mask" and reduces_per_layer(config):
        raise Misfit(
            f"parallel.grad_reduce=per_layer with parallel.pipe={p.pipe} and parallel.idle=mask: idle stages would "
            "reduce as well",
            "use parallel.idle=skip",
        )
    cells = (p.microbatches * p.chunks + parts + p.pipe) * p.pipe
    if cells > SCHEDULE_CELLS:
        raise Misfit(
            f"a schedule of {cells} entries (ticks x stages) is more than {SCHEDULE_CELLS}",
            f"use less than parallel.microbatches={p.microbatches}, parallel.pipe={p.pipe} or "
            f"parallel.chunks={p.chunks}",
            f"more than {SCHEDULE_CELLS:,} entries (ticks x stages) in a schedule",
        )
    try:
        # Cached: a search repeats it.
        schedule_text.outline(p.schedule, p.pipe, p.microbatches, p.chunks, p.vocab_over_pipe)
    except ValueError as error:
        raise Misfit(
            f"parallel.schedule={error} (parallel.microbatches, parallel.pipe, parallel.chunks)",
            reason=f"parallel.schedule={p.schedule} does not support these microbatches, stages and chunks",
        ) from None


def name_of_layers(config: Config) -> str:
    """Return what the layers that stages share are called."""
    return "model.num_layers" + " - model.experts.first_dense" * bool(config.model.dense_layers)
