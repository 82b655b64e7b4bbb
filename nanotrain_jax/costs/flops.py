"""Model FLOPs and hardware FLOPs of a step, in closed form, with sources. For resolved configs.

Model FLOPs are what the algorithm requires (the numerator of MFU); hardware FLOPs are what a device executes, with
recomputation. Only matmuls count, 2 FLOPs per multiply-add. N: parameters that multiply every token
(`counts.matmul_parameters`), L layers, d width of all query heads, D model width, F ffn width, T sequence length, t
tensor-parallel devices.
"""

from __future__ import annotations

from nanotrain_jax.config.derived import fits_flash
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import counts, first_gradient, mixture, muon, vision
from nanotrain_jax.models.decoder_table import ATTENTION, DOWN, MLP
from nanotrain_jax.models.parameters import ENCODER, ENDS, LAYERS, Parameter

LAST = DOWN, *(f"{MLP}/{name}" for name in ("down_B_RD", "down_EFD", "shared_down_SD"))  # last matmuls of a layer


def flops_per_token(config: Config) -> dict[str, float]:
    """Return the model FLOPs of forward and backward per token, without recomputation.

    full    6 N + 12 L d T   full attention (PaLM, arXiv 2204.02311, appendix B; the convention of most published MFU)
    causal  6 N +  6 L d T   only the half of attention that a causal mask leaves
    In layers with model.sliding_window W in place of T; causal: 12 d W (1 - W / 2 T) each.

    Frozen parameters have no gradient: each takes 4 instead of 6. With vision the FLOPs of a row's picture are added
    (costs/vision.py), over T.
    """
    m = config.model
    T, Q, windows = config.data.seq_len, counts.query_width(m), counts.windows(config)
    attention, hidden = float(Q * sum(windows)), Q * sum(W * W for W in windows) / (2 * T)
    fixed = 6.0 * counts.matmul_parameters(m) - 2.0 * counts.frozen_matmul_parameters(config)
    fixed += vision.model_flops(config) / T
    return {"full": fixed + 12.0 * attention, "causal": fixed + 12.0 * (attention - hidden)}


def step_flops(config: Config) -> float:
    """Return the hardware FLOPs of one device in one step: full attention, recomputation, the encoder of pictures and
    Newton-Schulz included."""
    parts = local_flops(config)
    forward = parts["layers"] + parts["head"] + parts["attention"]
    backward = forward + parts["attention"] + parts["weights"]
    of_decoder = (forward + backward + parts["recompute"]) * counts.tokens_per_device(config)
    return of_decoder + vision.step_flops(config) + muon.flops(config)


def trained_share(config: Config, part: str) -> float:
    """Return the share of matmul parameters, of the layers, the ends or the encoder, that is not frozen."""
    found = [row for row in counts.rows(config).values() if row.part == part]
    matmuls = [row for row in found if row.is_matmul or (part == ENCODER and len(row.shape) > 1)]
    return sum(row.size for row in matmuls if not row.is_frozen) / sum(row.size for row in matmuls)


def computed_share(path: str, row: Parameter, config: Config) -> float:
    """Return the share of a matmul that a device computes for each of its tokens: of experts, with padding.

    Keys and values: of one head at least. B of a row-parallel adapter: for 1 / t of them with sequence parallelism.
    """
    p = config.parallel
    if row.has_experts:
        return row.share * mixture.padded_rows(config) / p.tensor
    if row.split_dim is not None:
        return 1 / (p.vocab_shards if row.is_padded else p.tensor)
    if row.is_partial and "K" in row.layout.split() and row.init != "adapter":
        return 1 / config.model.num_kv_heads
    return 1 / p.tensor if path.endswith("_B_RD") and p.sequence_parallel else 1.0


def trains_nothing(config: Config, prefix: str) -> bool:
    """True if all weights whose paths begin so are frozen."""
    return all(row.is_frozen for path, row in counts.rows(config).items() if path.startswith(prefix))


def local_flops(config: Config) -> dict[str, float]:
    """Return the hardware FLOPs of one device, per token:

    layers, head, attention   of the forward, and of the gradients of activations (of attention: twice as many)
    weights                   of the gradients of weights: as layers and head, without frozen ones; less `unused`
    recompute                 on top of 6 N + 12 L d T:
        selective   4 L d T                          the forward of attention; half if the matmul after it is frozen,
                                                     without flash attention
        full        2 N_layers + 4 L d T - 2 L D F   the forward without the last matmul
        block:n     2 N_layers + 4 L d T             the whole forward (`counts.last_matmuls_spared`)
        and with train.objective and model.loss_chunk the head, as the backward computes logits again

    All are divided by t, except that each device computes at least one head of keys and values. With pipeline stages:
    of the stage that has the head; with the vocabulary over pipe of any, with 1/P of the head. Compute that idle stages
    discard (parallel.idle=mask) is not counted.

    Flash attention with a window computes W keys in place of T (`counts.computed_keys`). Ring and gather attention over
    c devices, and flash attention with a mask over c parts of a row, compute (c+1) / (2 c) of the full attention:
    blocks that the causal mask hides are left out. Of ring and gather only block:n recomputes them. The scores that the
    backward of flash attention recomputes are not counted.
    """
    m, S, t = config.model, counts.computed_keys(config), config.parallel.tensor
    c, is_blockwise = counts.attention_parts(config), config.parallel.is_blockwise
    L = counts.stage_layers(config)
    copies, flops = {LAYERS: L, ENDS: 1}, {LAYERS: 0.0, ENDS: 0.0}
    weights = down = 0.0
    for path, row in counts.rows(config).items():
        if row.is_matmul and row.part in copies:
            of_row = 2 * row.size * copies[row.part] * computed_share(path, row, config)
            flops[row.part] += of_row
            weights += 0.0 if row.is_frozen else of_row
            down += of_row if path in LAST else 0.0
    layers = flops[LAYERS]
    attention = 4.0 * L * counts.query_width(m) * S / t * ((c + 1) / (2 * c) if c > 1 else 1)
    spared = counts.last_matmuls_spared(config) * down
    spares = trains_nothing(config, f"{ATTENTION}/out_") and not fits_flash(m, config.precision.compute)
    recompute = {
        "none": 0.0,
        "selective": attention / 2 if spares else attention,
        "full": layers + attention - down * (not m.features.norms_after),
        "block": layers + attention - spared,
    }
    weights -= unused(config, attention / L)
    policy = config.memory.rematerialization.policy
    kept = attention if is_blockwise and policy in ("selective", "full") else 0.0
    of_logits = flops[ENDS] if counts.computes_logits_again(config) else 0.0
    forward = {"layers": layers, "head": flops[ENDS], "attention": attention}
    return _with_first(config, forward | {"weights": weights, "recompute": recompute[policy] - kept + of_logits})


def unused(config: Config, attention: float) -> float:
    """Return the FLOPs per token of gradients that the backward of the first layer leaves out
    (costs/first_gradient.py), and of what `selective` recomputes for them. attention: `local_flops` of a layer's."""
    names = first_gradient.trained(config)
    if names is None:
        return 0.0
    matmuls = {path: row for path, row in counts.rows(config).items() if row.is_matmul}
    executed = {path: 2 * row.size * computed_share(path, row, config) for path, row in matmuls.items()}

    def of_inputs(folder: str, is_column: bool) -> float:
        """Return the FLOPs of gradients of the inputs of a folder's column-parallel matmuls, or of the others; B of
        an adapter multiplies what has a gradient."""
        found = [path for path in matmuls if path.startswith(folder) and "_B_" not in path]
        return sum(executed[path] for path in found if matmuls[path].layout.startswith("D ") == is_column)

    found = of_inputs(ATTENTION, True)
    is_whole = fits_flash(config.model, config.precision.compute) or counts.attention_parts(config) > 1
    if not names & first_gradient.OF_HEADS:
        found += 2 * attention + of_inputs(ATTENTION, False)
    elif not is_whole:  # of the scores, of queries, of keys and of values
        used = {"scores": names & {"q", "k"}} | {name: name in names for name in "qkv"}
        found += attention / 2 * sum(not is_used for is_used in used.values())
    if not names & first_gradient.OF_ATTENTION:
        of_scores = attention if is_whole else attention / 2
        found += of_inputs(MLP, True) + of_scores * (config.memory.rematerialization.policy == "selective")
    if names == {"down"}:
        found += of_inputs(MLP, False)
    return found


def _with_first(config: Config, found: dict[str, float]) -> dict[str, float]:
    """Add the first, dense layers of a mixture to `local_flops`, with their further forwards (`mixture.first_runs`): of
    a single layer without its last matmul."""
    first = mixture.first_layers(config)
    if first is None:
        return found
    _, again = mixture.first_runs(config)
    alone = local_flops(first) | {"head": 0.0}
    matmuls = {path: row for path, row in counts.rows(first).items() if row.is_matmul}
    executed = {path: 2 * row.size * computed_share(path, row, first) for path, row in matmuls.items()}
    alone["weights"] -= sum(executed[path] for path, row in matmuls.items() if row.part == ENDS and not row.is_frozen)
    if again:
        last = executed[DOWN] if config.model.dense_layers == 1 and not config.model.features.norms_after else 0.0
        alone["recompute"] += alone["layers"] + alone["attention"] - last
    return {part: size + alone[part] for part, size in found.items()}
