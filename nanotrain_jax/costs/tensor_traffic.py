"""What tensor parallelism communicates in a step: gathers and sums of activations, in closed form, with sources.

Symbols as in costs/counts.py; bytes are of the full buffer, as in costs/communication.py. For resolved configs.
"""

from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import counts, first_gradient, mixture
from nanotrain_jax.costs.counts import BYTES
from nanotrain_jax.costs.traffic import Traffic
from nanotrain_jax.models.decoder_table import EMBEDDING
from nanotrain_jax.models.parameters import ENDS, LAYERS


def tensor_buffers(config: Config) -> list[tuple[str, float, Traffic]]:
    """Return operation, bytes of the full buffer and kind of what tensor parallelism communicates in a step.

    Megatron-LM, arXiv 1909.08053, section 3, in w B T D (t-1)/t, summed over microbatches:
        all-reduce       2 (4 L + 2)         per layer two in the forward and two in the backward; one of the embedding
                                             look-up, one of the loss
        with sequence parallelism (arXiv 2205.05198, section 4.2.2) as pairs; the backward of each layer gathers the
        inputs of its matmuls again instead of storing them:
        all-gather       6 L + 2
        reduce-scatter   4 L + 2
    Recomputation adds: `full` one all-reduce per layer (a reduce-scatter), block:n two (two pairs). With
    parallel.overlap_tensor permutes replace all but the gathers again, 2 L scatters and those of look-up and loss; and
    all of experts (`plain_passes`).
    Gradients of frozen weights do not gather inputs again, and that of a frozen embedding is not gathered.
    The loss all-reduces 3 scalars per token, twice with `computes_logits_again`. Gradients of parameters that every
    device of the axis stores are summed over tensor where they are partial: all of them under sequence parallelism,
    else those of keys and values with fewer heads than t. Adapters of row-parallel matrices (train.lora):
    `_adapter_buffers`.
    """
    p, (first, _) = config.parallel, mixture.first_runs(config)
    L, ends = counts.stage_layers(config) * counts.runs(config, LAYERS) + first, counts.runs(config, ENDS)
    tokens = counts.tokens_per_device(config) / p.microbatches
    activations = BYTES[config.precision.compute] * tokens * config.model.d_model
    of_adapters = _adapter_buffers(config, L * BYTES[config.precision.compute] * tokens)
    gathers, scatters = tensor_passes(config)
    of_ends, scattered = ends_gathered(config) * ends, ends_scattered(config) * ends
    spared = first_gradient.unused_passes(config)[0] * ends
    if not p.sequence_parallel:
        return [("all_reduce", (gathers * L + scattered) * activations, Traffic.ACTIVATIONS), *of_adapters]
    if p.tensor > 1 and p.overlap_tensor:
        is_full = config.memory.rematerialization.policy == "full"
        of_layer, regathers = gathers + scatters, 0 if is_full else regathered_inputs(config)
        gathered, summed = ((L - first) * times for times in plain_passes(config))
        hops = (of_layer - regathers - 2) * L - gathered - summed - spared
        return [
            ("permute", hops * activations, Traffic.ACTIVATIONS),
            ("all_gather", (regathers * L + gathered + of_ends) * activations, Traffic.REGATHERED_ACTIVATIONS),
            ("reduce_scatter", (2 * L + summed + scattered) * activations, Traffic.ACTIVATIONS),
            *of_adapters,
        ]
    return [
        ("all_gather", (gathers * L + of_ends - spared) * activations, Traffic.REGATHERED_ACTIVATIONS),
        ("reduce_scatter", (scatters * L + scattered) * activations, Traffic.ACTIVATIONS),
        *of_adapters,
    ]


def _adapter_buffers(config: Config, of_column: float) -> list[tuple[str, float, Traffic]]:
    """Return the same for adapters of row-parallel matrices: x A of width R is reduced in the forward, once more where
    `full`, block:n or the backward of dense layers recompute it, and with sequence parallelism its gradient is
    gathered. of_column: bytes of one column, of all tokens and layers."""
    if not config.model.lora:
        return []
    _, count = counts.adapted(config)
    size = count * config.model.lora.rank * of_column
    reductions = 1 + config.memory.rematerialization.recomputes_layers + _forwards_more(config)
    if not config.parallel.sequence_parallel:
        return [("all_reduce", reductions * size, Traffic.ADAPTERS)]
    return [("all_gather", size, Traffic.ADAPTERS), ("reduce_scatter", reductions * size, Traffic.ADAPTERS)]


def tensor_passes(config: Config) -> tuple[float, float]:
    """Return the gathers and the scatters per layer over tensor; without sequence parallelism: all-reduces, and 0.

    See `tensor_buffers`: 4 of each, those of recomputation, and 2 gathers of matmul inputs (not with `full`, which has
    just recomputed them).
    """
    policy = config.memory.rematerialization.policy
    inputs = regathered_inputs(config)
    of_full = 2 if config.model.features.norms_after else 1  # reductions over tensor that a norm needs
    recomputed = {"none": 0, "selective": 0, "full": of_full, "block": 2 - counts.last_matmuls_spared(config)}[policy]
    share = _forwards_more(config)
    recomputed += share * (2 - (config.model.dense_layers == 1 and not config.model.features.norms_after))
    if not config.parallel.sequence_parallel:
        return 4 + recomputed, 0
    gathers = 2 + inputs if policy == "block" else 2 if policy == "full" else inputs
    return 4 + gathers + 2 * share, 4 + recomputed


def plain_passes(config: Config) -> tuple[int, float]:
    """Return how many gathers and scatters of a layer parallel.overlap_tensor leaves as they are where an MLP hops:
    those of experts in the forward, of the gradient of what they return, and of their recomputation."""
    if not config.model.experts:
        return 0, 0
    policy, norms_after = config.memory.rematerialization.policy, config.model.features.norms_after
    recomputed = {"full": int(norms_after), "block": 1 - counts.last_matmuls_spared(config)}.get(policy, 0)
    return 2 + config.memory.rematerialization.recomputes_layers, 1 + recomputed


def _forwards_more(config: Config) -> float:
    """Return the share of layers whose forward runs once more: of the dense ones of a mixture (`mixture.first_runs`),
    among all that a device runs."""
    first, again = mixture.first_runs(config)
    return again / (counts.stage_layers(config) * counts.runs(config, LAYERS) + first)


def regathered_inputs(config: Config) -> int:
    """Return how many matmul inputs of a layer the backward gathers again, for gradients of weights: those of attention
    and of the MLP, unless the weights that they enter are frozen."""
    trained = {path: row for path, row in counts.rows(config).items() if row.part == LAYERS and not row.is_frozen}
    entering = [path for path, row in trained.items() if row.is_matmul and row.layout.startswith("D ")]
    return len({path.rpartition("/")[0] for path in entering})


def ends_gathered(config: Config) -> int:
    """Return how often sequence parallelism gathers activations at both ends: for the loss, and for the gradient of the
    embedding, unless that is frozen."""
    return 1 if counts.rows(config)[EMBEDDING].is_frozen else 2


def ends_scattered(config: Config) -> int:
    """Return the same of sums over tensor: of the look-up of embeddings, and of the gradient of the loss; less those of
    the first layer's gradients that nothing uses."""
    return 2 + mixture.looks_up_again(config) - first_gradient.unused_passes(config)[1]
