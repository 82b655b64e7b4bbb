"""The parameter table of the decoder, one line per array. Needs no JAX.

Dims: D model, F ffn, N query heads, K kv heads, H head dim, V vocabulary, T longest sequence, R rank of adapters.
E experts, S ffn of shared experts.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import get_args

from nanotrain_jax.config.derived import padded_vocab
from nanotrain_jax.config.experts import Experts
from nanotrain_jax.config.families import FAMILIES, Family
from nanotrain_jax.config.model import Matrix
from nanotrain_jax.config.schema import Model
from nanotrain_jax.models.parameters import DENSE, ENDS, LAYERS, TENSOR, VOCAB, Parameter, Table, Use

STD = 0.02

ATTENTION, MLP = f"{LAYERS}/attention", f"{LAYERS}/mlp"
NORM_ATTENTION, NORM_MLP, NORM_LAST = f"{LAYERS}/norm_attention", f"{LAYERS}/norm_mlp", f"{ENDS}/norm"
NORM_ATTENTION_OUT, NORM_MLP_OUT = f"{LAYERS}/norm_attention_out", f"{LAYERS}/norm_mlp_out"
DOWN = f"{MLP}/down_FD"
IS_LOCAL = "is_local_1"  # of attention: 1 in layers with a window
ROUTER = "router_DE"
BIAS = "bias_2E"  # of a router, with balance=bias: the sum of two, as a 16-bit number would lose small steps
EMBEDDING, POSITIONS, HEAD = f"{ENDS}/embedding_VD", f"{ENDS}/positions_TD", f"{ENDS}/head_VD"

_weight = partial(Parameter, std=STD, is_matmul=True)
_gain = partial(Parameter, init="ones", decay=False)
_bias = partial(Parameter, init="zeros", decay=False)


def inventory(family: Family, is_tied: bool, num_layers: int = 1, experts: Experts | None = None) -> Table:
    """Return every parameter of a family, without sizes. Arrays of a module are initialized in this order.

    Keys and values are sharded over tensor if there is a head per device; else replicated, and each device uses one
    head (`table`).
    """
    residual = STD / math.sqrt(2 * num_layers)  # for projections that write to the residual stream
    table = {
        f"{ATTENTION}/q_DNH": _weight("D N/tensor H"),
        f"{ATTENTION}/k_DKH": _weight("D K/tensor H", is_partial=True),
        f"{ATTENTION}/v_DKH": _weight("D K/tensor H", is_partial=True),
        f"{ATTENTION}/out_NHD": _weight("N/tensor H D", std=residual),
    }
    table |= _mixture(experts, residual) if experts else _mlp(family, residual)
    for norm in (NORM_ATTENTION, NORM_MLP, *[NORM_ATTENTION_OUT, NORM_MLP_OUT] * family.norms_after):
        table |= _norm(norm, family)
    if family.qkv_bias:
        table |= {
            f"{ATTENTION}/bias_q_NH": _bias("N/tensor H"),
            f"{ATTENTION}/bias_k_KH": _bias("K/tensor H", is_partial=True),
            f"{ATTENTION}/bias_v_KH": _bias("K/tensor H", is_partial=True),
        }
    if family.qk_norm:
        gain = partial(_gain, init="zeros") if family.gains_from_one else _gain
        table |= {f"{ATTENTION}/gain_{x}_H": gain("H", is_partial=True) for x in "qk"}
    if family.has_local_layers:
        table[f"{ATTENTION}/{IS_LOCAL}"] = Parameter("1", init="is_local", decay=False, is_frozen=True)
    if family.biases:
        table |= {
            f"{ATTENTION}/bias_out_D": _bias("D"),
            f"{MLP}/bias_up_F": _bias("F/tensor"),
            f"{MLP}/bias_down_D": _bias("D"),
        }
    embedding_use = "both" if is_tied else "first"
    table[EMBEDDING] = _weight("V/vocab D", used=embedding_use, is_matmul=is_tied, is_padded=True)
    table |= _norm(NORM_LAST, family, "last")
    if family.learned_positions:
        table[POSITIONS] = Parameter("T D", used="first", std=STD, decay=False)
    if not is_tied:
        table[HEAD] = _weight("V/vocab D", used="last", is_padded=True)
    if experts and experts.first_dense:
        dense = inventory(family, is_tied, num_layers).items()
        table |= {of_dense(path): row._replace(used="dense") for path, row in dense if row.part == LAYERS}
    return table


def of_dense(path: str) -> str:
    """Return the path of an array of `layers` in the stack `dense`."""
    return path.replace(LAYERS, DENSE, 1)


def layers_of(model: Model, row: Parameter) -> int:
    """Return the number of layers in the stack of a row of the decoder; 1 if it is not stacked."""
    return {LAYERS: model.main_layers, DENSE: model.dense_layers}.get(row.part, 1)


def _mlp(family: Family, residual: float) -> Table:
    table = {f"{MLP}/up_DF": _weight("D F/tensor"), DOWN: _weight("F/tensor D", std=residual)}
    return table | {f"{MLP}/gate_DF": _weight("D F/tensor")} if family.gated_mlp else table


def _mixture(experts: Experts, residual: float) -> Table:
    """The experts in place of an MLP. All devices of tensor route the same tokens, each with its part of the gates'
    gradients: that of the router is a partial sum."""
    routed = partial(_weight, share=experts.top_k / experts.num)
    table = {
        f"{MLP}/{ROUTER}": _weight("D E", is_partial=True),
        f"{MLP}/up_EDF": routed("E/expert D F/tensor"),
        f"{MLP}/gate_EDF": routed("E/expert D F/tensor"),
        f"{MLP}/down_EFD": routed("E/expert F/tensor D", std=residual),
    }
    if experts.balance == "bias":
        table[f"{MLP}/{BIAS}"] = Parameter("2 E", init="balance", decay=False, is_frozen=True)
    if experts.shared:
        table |= {
            f"{MLP}/shared_up_DS": _weight("D S/tensor"),
            f"{MLP}/shared_gate_DS": _weight("D S/tensor"),
            f"{MLP}/shared_down_SD": _weight("S/tensor D", std=residual),
        }
    return table


def _norm(path: str, family: Family, used: Use = "layer") -> Table:
    gain = {f"{path}/gain_D": _gain("D", used=used, init="zeros" if family.gains_from_one else "ones")}
    return gain | {f"{path}/bias_D": _bias("D", used=used)} if family.centered_norms else gain


def adapters(rows: Table, targets: Sequence[str]) -> Table:
    """Return the rows of LoRA's A [inputs R] and B [R outputs] of those matrices that rows has. R: their rank.

    Each is laid out as its matrix: what is not split over tensor there is replicated here. A device then multiplies its
    own outputs with B alone, so the gradient of a replicated A is a partial sum.
    """
    added = {}
    pairs = [(stack, target) for stack in (LAYERS, DENSE) for target in targets]
    for stack, target in pairs:
        path = next((path for path in rows if re.match(rf"{stack}/.*/{target}_[A-Z]+$", path)), None)
        if path is None:
            continue
        folder, row = path.rpartition("/")[0], rows[path]
        dims = row.layout.split()
        inputs = dims[:1] if dims[0] == "D" else dims[:-1]
        outputs = dims[len(inputs) :]
        names = ["".join(word[0] for word in side) for side in (inputs, outputs)]
        splits_outputs = any(TENSOR in word for word in outputs)
        added[f"{folder}/{target}_A_{names[0]}R"] = row._replace(
            layout=" ".join([*inputs, "R"]), init="adapter", is_partial=splits_outputs
        )
        added[f"{folder}/{target}_B_R{names[1]}"] = row._replace(layout=" ".join(["R", *outputs]), init="zeros")
    return added


def adapter_paths(model: Model) -> dict[str, tuple[str, str]]:
    """Return for each matrix of a resolved model that has an adapter its path -> those of A and B."""
    rows = inventory(model.features, model.tie_embeddings, experts=model.experts)
    found = {}
    for path in rows:
        target = path.rpartition("/")[2].partition("_")[0]
        if model.lora and target in model.lora.targets:
            found[path] = tuple(adapters({path: rows[path]}, [target]))
    return found


@lru_cache
def table(model: Model, tensor: int = 1, vocab_shards: int = 1) -> Table:
    """Return every parameter of a resolved model, with sizes. Do not mutate.

    tensor: size of the tensor axis. vocab_shards: `Parallel.vocab_shards`.
    """
    V, K, H = padded_vocab(model.vocab_size, vocab_shards), model.num_kv_heads, model.head_width
    sizes = {"D": model.d_model, "F": model.d_ff, "N": model.num_heads, "K": K, "H": H, "V": V, "T": model.max_seq_len}
    sizes |= {"1": 1, "2": 2, "R": model.lora.rank if model.lora else 0}
    if model.experts:
        sizes |= {"E": model.experts.num, "S": model.experts.shared * model.mlp_width}
    widths = {LAYERS: {"F": model.mlp_width}}

    def sized(row: Parameter) -> Parameter:
        dims = sizes | widths.get(row.part, {})
        is_partial = row.is_partial and tensor > (K if TENSOR in row.layout else 1)
        layout = row.layout.replace(TENSOR, "") if is_partial or tensor == 1 else row.layout
        return row._replace(
            layout=layout.replace(VOCAB, "") if vocab_shards == 1 else layout,
            is_partial=is_partial,
            shape=tuple(dims[word.partition("/")[0]] for word in row.layout.split()),
            padding=V - model.vocab_size if row.is_padded else 0,
        )

    rows = inventory(model.features, model.tie_embeddings, model.num_layers, model.experts)
    rows |= adapters(rows, model.lora.targets) if model.lora else {}
    return {path: sized(row) for path, row in rows.items()}


@lru_cache
def frozen_table(model: Model, tensor: int, vocab_shards: int, freeze: tuple[str, ...]) -> Table:
    """Return `table` with the rows that patterns of train.freeze freeze marked. Do not mutate."""

    def marked(path: str, row: Parameter) -> Parameter:
        return row._replace(is_frozen=row.is_frozen or any(re.search(pattern, path) for pattern in freeze))

    return {path: marked(path, row) for path, row in table(model, tensor, vocab_shards).items()}


def every_parameter(is_tied: bool = False) -> Table:
    """Return the parameters of all families, with adapters and experts, without sizes."""
    rows = {path: row for family in FAMILIES.values() for path, row in inventory(family, is_tied).items()}
    rows |= _mixture(Experts(num=1, top_k=1, d_ff=1, shared=1, balance="bias"), STD)
    return rows | adapters(rows, get_args(Matrix))
