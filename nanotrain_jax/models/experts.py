"""A mixture of experts in place of a layer's MLP (Flax NNX): each token goes to some of E gated MLPs.

    logits[T E] = x router                        in float32, whatever the dtype of weights
    y[t] = sum over its experts e of gate[t e] (activation(x[t] w_gate[e]) x[t] w_up[e]) w_down[e]   + shared experts

Gates multiply before w_down: then no result of width D waits for the backward. Each device routes its own tokens, so
the batch may be split over any axes. It has all experts, or with parallel.expert an equal part of them, and exchanges
rows (`parallel/expert/exchange.py`). Over tensor each expert is split as an MLP is, F/tensor: all devices of the axis
route the same tokens, and their partial sums leave together (`tensor.leave`).

Kept for the backward where nothing else is said (`memory.remat`): x, the logits of the router, so that the backward
chooses the same experts, and gate and up of the rows. What was gathered over tensor is gathered again, and rows are
sent again to their experts.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from nanotrain_jax.config.schema import Config, Model
from nanotrain_jax.models import balance, decoder_table
from nanotrain_jax.models.modules import Split, fill
from nanotrain_jax.models.ops import gated
from nanotrain_jax.models.parameters import under
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.collectives import Tree, all_reduce
from nanotrain_jax.parallel.expert import exchange, routing
from nanotrain_jax.parallel.expert.grouped_matmul import SLACK, grouped_matmul
from nanotrain_jax.parallel.tensor import float8, tensor

KEPT = jax.checkpoint_policies.save_only_these_names(*remat.SAVED)


def way_of_matmuls(config: Config) -> str:
    """Describe what multiplies the rows of experts, for a line of output."""
    kernel = config.model.grouped_matmul
    way = f"matmuls padded {SLACK:g} times" if kernel == "padded" else f"the kernel of {kernel}"
    return f"experts: {way} (model.grouped_matmul={kernel})"


class Experts(nnx.Module):
    """x[B T D] -> y[B T D], the sum of what a token's experts, and shared ones, return; and `balance.row`."""

    def __init__(self, config: Model, rngs: nnx.Rngs, split: Split):
        self.split, self.features = split, config.features
        e = config.experts
        self.choice, self.capacity = routing.Choice(e.top_k, e.router, e.normalize, e.gate_scale), e.capacity
        self.rows = under(decoder_table.table(config, split.size), decoder_table.MLP)
        fill(self, self.rows, rngs)

    @jax.named_scope("mlp")
    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = {name: getattr(self, name)[...] for name in self.rows}
        run = self.run
        if self.split.matmuls.regather:
            run = jax.checkpoint(run, policy=KEPT)
        axis, sequence_parallel = self.split.axis, self.split.sequence_parallel
        y_BTD, row_S = run(x_BTD, weights)
        y_BTD = tensor.leave(y_BTD, axis, sequence_parallel)
        if axis and not sequence_parallel:  # as x, the same on all devices of the axis
            row_S = all_reduce(row_S, (axis,)) / self.split.size
        return remat.name(y_BTD, "mlp_out") if self.features.norms_after else y_BTD, row_S

    def run(self, x_BTD: jax.Array, weights: Tree) -> tuple[jax.Array, jax.Array]:
        """x[B T/tensor D] -> y[B T D] {sum tensor}, `balance.row`"""
        x_BTD = tensor.enter(x_BTD, self.split.axis, self.split.sequence_parallel)
        x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
        with jax.named_scope("router"):
            logits_TE = x_TD.astype(jnp.float32) @ weights[decoder_table.ROUTER].astype(jnp.float32)
            logits_TE = remat.name(logits_TE, "router")
            bias_2E = weights.get(decoder_table.BIAS)
            bias_E = None if bias_2E is None else balance.bias(bias_2E)
            routes = routing.route(logits_TE, self.choice, bias_E)
        y_TD, dropped = self.of_experts(x_TD, weights, routes)
        if "shared_up_DS" in weights:
            y_TD += self.of_shared(x_TD, weights)
        return y_TD.reshape(x_BTD.shape), balance.row(logits_TE, routes, self.choice, dropped)

    def of_experts(self, x_TD: jax.Array, weights: Tree, routes: routing.Routes) -> tuple[jax.Array, jax.Array | int]:
        """x[T D] -> y[T D] {sum tensor}, of the experts that each token chooses; how many choices were dropped."""
        axis, M = self.split.experts, len(routes.order_M)
        if axis is None:
            x_MD, gates_M = routing.by_expert(x_TD, routes), routing.gates_of_rows(routes)
            return routing.by_token(self.of_rows(x_MD, gates_M, weights, routes.sizes_E), routes), 0
        devices = jax.lax.axis_size(axis)
        packed = exchange.pack(routes, devices, exchange.places(M, devices, self.capacity))
        with jax.named_scope("exchange"):
            found = exchange.arrivals(packed, axis, self.split.is_ragged)
            x_SD, gates_S = routing.by_expert(x_TD, packed), routing.gates_of_rows(packed)
            x_SD, gates_S = exchange.send(x_SD, found, axis), exchange.send(gates_S, found, axis)
        y_SD = self.of_rows(x_SD, gates_S, weights, found.sizes_E, M)
        with jax.named_scope("exchange"):
            y_SD = exchange.bring_back(y_SD, found, axis)
        return routing.by_token(y_SD, packed), exchange.dropped(routes, packed)

    def of_rows(
        self, x_MD: jax.Array, gates_M: jax.Array, weights: Tree, sizes_E: jax.Array, rows: int | None = None
    ) -> jax.Array:
        """x[M D], the rows of one expert after another -> y[M D] {sum tensor}. rows: as of `grouped_matmul`."""
        how = {"matmul": self.split.matmuls.matmul, "kernel": self.split.grouped}
        of_experts = partial(grouped_matmul, sizes_E=sizes_E, rows=rows, **how)
        gate_MF = remat.name(of_experts(x_MD, weights["gate_EDF"]), "gate")
        up_MF = remat.name(of_experts(x_MD, weights["up_EDF"]), "up")
        h_MF = gated(gate_MF, up_MF, self.features.activation) * gates_M[:, None].astype(x_MD.dtype)
        return of_experts(h_MF, weights["down_EFD"])

    def of_shared(self, x_TD: jax.Array, weights: Tree) -> jax.Array:
        """x[T D] -> y[T D] {sum tensor}, of the experts that all tokens share, side by side as one."""
        multiply = partial(float8.multiply, self.split.matmuls.matmul)
        gate_TS = remat.name(multiply(x_TD, weights["shared_gate_DS"]), "gate")
        up_TS = remat.name(multiply(x_TD, weights["shared_up_DS"]), "up")
        return multiply(gated(gate_TS, up_TS, self.features.activation), weights["shared_down_SD"])
