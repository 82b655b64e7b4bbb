"""Counts of mixtures for the closed forms: rows of experts, and the first, dense layers. For resolved configs."""

from fractions import Fraction

from nanotrain_jax.config.execution import execution, writes_layers_out
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs.counts import (
    BYTES,
    is_sharded,
    local_elements,
    rows,
    runs,
    runs_first_again,
    stage_layers,
    tokens_per_device,
    zero_devices_of,
)
from nanotrain_jax.models.parameters import ENDS
from nanotrain_jax.parallel.expert.exchange import places
from nanotrain_jax.parallel.expert.grouped_matmul import rows_of_a_round
from nanotrain_jax.parallel.expert.kernels import buffer_rows


def first_layers(config: Config) -> Config | None:
    """Return a config of the first, dense layers of a mixture alone, of which the closed forms of layers hold, as they
    run before the first stage's; None if there are none."""
    m = config.model
    if not m.dense_layers:
        return None
    one = config.replace("model", experts=None, num_layers=m.dense_layers, unroll=writes_layers_out(config, "gpu"))
    return one.replace("parallel", pipe=1, chunks=1, schedule="1f1b", prefetch=False, expert=1)


def first_runs(config: Config) -> tuple[float, float]:
    """Return how often a device runs a layer of `first_layers` in a step, and how often its forward once more."""
    layers = config.model.dense_layers * runs(config, ENDS)
    return layers, layers * (execution(config).is_by_hand and runs_first_again(config))


def looks_up_again(config: Config) -> bool:
    """True if the backward looks embeddings up once more: the input of `first_layers` where it is written by hand."""
    return config.model.dense_layers > 0 and execution(config).is_by_hand


def has_kernel(config: Config) -> bool:
    """True if a kernel multiplies the rows of experts (parallel/expert/kernels.py)."""
    return config.model.grouped_matmul != "padded"


def padded_rows(config: Config) -> float:
    """Return how many rows a grouped matmul of experts multiplies for each that it has, while none needs more than one
    round (parallel/expert/grouped_matmul.py): a little above 1.25; 1 by a kernel, without the rest of its tiles."""
    if has_kernel(config):
        return 1.0
    count, rows = config.model.experts.num // config.parallel.expert, expert_rows(config)
    return rows_of_a_round(rows, count, exchanged_rows(config) or rows) * count / rows


def copied_rows(config: Config) -> float:
    """Return how many rows a padded matmul of experts copies, for each token of a device; a kernel copies none."""
    return 0.0 if has_kernel(config) else config.model.experts.top_k * padded_rows(config)


def expert_rows(config: Config) -> int:
    """Return the rows that a device's experts get of a microbatch where they are balanced: top_k for each token."""
    return int(tokens_per_device(config) / config.parallel.microbatches) * config.model.experts.top_k


def share_of_buffer(config: Config) -> Fraction:
    """Return the share of the rows of a kernel's arrays that experts have, where they are balanced."""
    rows = expert_rows(config)
    return Fraction(rows, buffer_rows(exchanged_rows(config) or rows))


def exchanged_rows(config: Config) -> int:
    """Return the places of the buffer in which rows travel to the devices of their experts, of a microbatch; 0 if each
    device has all experts."""
    p, experts = config.parallel, config.model.experts
    return p.expert * places(expert_rows(config), p.expert, experts.capacity) if experts and p.expert > 1 else 0


def rows_per_token(config: Config) -> float:
    """Return how many rows of experts a device keeps for each of its tokens: top_k, or places of the exchange."""
    tokens = tokens_per_device(config) / config.parallel.microbatches
    return exchanged_rows(config) / tokens or config.model.experts.top_k


def kept_ffn_width(config: Config) -> float:
    """Return how many hidden values of an MLP a device keeps for a token, over tensor: of experts of all their rows."""
    m = config.model
    return m.mlp_width * (rows_per_token(config) + m.experts.shared) if m.experts else m.d_ff


def computed_ffn_width(config: Config) -> float:
    """Return how many hidden values of an MLP a device computes for a token, over tensor: of experts with padding."""
    m = config.model
    return m.mlp_width * (m.experts.top_k * padded_rows(config) + m.experts.shared) if m.experts else m.d_ff


def router_queue_bytes(config: Config) -> int:
    """Return the bytes of what layers pass on of their routers, beside x (models/balance.py); 0 without experts."""
    m = config.model
    return 4 * m.main_layers * (2 * m.experts.num + 3) if m.experts else 0


def expert_buffers(config: Config) -> tuple[float, float]:
    """Return the elements of a layer's experts on a device, and the bytes that their backward holds beside the rest.

    Their three matrices are far larger than the rest of a layer. At stage 3 one after another has a full gradient: at
    most two in float32 and the third in 16 bit are there before the first shard of them is, and the weights, unless
    full remat has just gathered them. At stage 2 all three are there in float32 and in 16 bit. With many tokens the
    rows before these gradients are larger (`wide_rows`).
    """
    p, b, experts = config.parallel, BYTES[config.precision.compute], config.model.experts
    if not experts or p.zero < 2:
        return 0.0, 0.0
    found = [row for row in rows(config).values() if row.has_experts]
    sizes = [(row, local_elements(row, config) / stage_layers(config)) for row in found]
    elements = sum(n for _, n in sizes)
    sharded = sum(n for row, n in sizes if is_sharded(row, config))
    shards = sum(n / zero_devices_of(row, config) for row, n in sizes)
    full = (8 + b) / 3 * elements if p.zero == 3 else (4 + b) * elements
    if p.zero == 3 and config.memory.rematerialization.policy != "full":
        full += b * sharded
    return elements, max(full, wide_rows(config)) - (4 * shards if p.zero == 3 else 0.0)


def wide_rows(config: Config) -> float:
    """Return the bytes of rows as wide as an expert in its backward: h and the gradients of h, gate and up, and two of
    them padded."""
    tokens = tokens_per_device(config) / config.parallel.microbatches
    if not config.model.experts:
        return 0.0
    each = BYTES[config.precision.compute] * tokens * config.model.mlp_width / config.parallel.tensor
    return each * (4 * rows_per_token(config) + 2 * copied_rows(config))
