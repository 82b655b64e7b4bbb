"""Export a plan: all numbers as plain data (`plan --json`), and the config with its layout (`plan --write`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import yaml

from nanotrain_jax.costs import counts, flops, hardware
from nanotrain_jax.planner import compiled as compiler
from nanotrain_jax.planner.choice import layout_of
from nanotrain_jax.planner.estimate import Estimate, Verdict, margin, verdict
from nanotrain_jax.planner.search import SEARCHED, SearchResult
from nanotrain_jax.planner.step_time import Transfer


class Planned(NamedTuple):
    """A planned layout, with its search and its compiled step."""

    estimate: Estimate
    found: SearchResult | None = None  # None without a search
    compiled: dict[str, Any] | None = None  # the result of compiled.compile_step
    too_large: tuple[tuple[Estimate, dict[str, Any]], ...] = ()  # candidates compiled before, over the limit
    better: Estimate | None = None  # the layout of a search, if it fits and estimate does not, or is much faster

    @property
    def verdict(self) -> Verdict:
        """Compare the compiled peak to the limit; without it the estimated peak, with its margin."""
        e = self.estimate
        return verdict(self.compiled["peak_bytes"], 0.0, e.limit_bytes) if self.compiled else e.verdict


def config_text(tree: dict[str, Any], e: Estimate, origin: str) -> str:
    """Return the user's config with the layout of an estimate, as YAML. tree: file and overrides; origin: its path."""
    c, tree = e.config, {section: dict(part or {}) for section, part in tree.items()}
    p = c.parallel
    layout = layout_of(c)
    given = tree.get("parallel", {})
    others = {k: getattr(p, k) for k in given if f"parallel.{k}" not in SEARCHED and k != "auto"}
    if "full_sync_steps" in given:
        others["full_sync_steps"] = given["full_sync_steps"]  # a plan is of the steps after them
    tree["parallel"] = layout["parallel"] | others
    tree["memory"] = tree.get("memory", {}) | layout["memory"]
    tree["data"] = tree.get("data", {}) | {"batch_size": c.data.batch_size}
    if c.model.loss_chunk or "loss_chunk" in tree.get("model", {}):
        tree["model"] = tree.get("model", {}) | {"loss_chunk": c.model.loss_chunk}
    if c.runtime.simulate:
        tree["runtime"] |= {"simulate": e.gpus if e.gpu == hardware.SIMULATED else 0}
    head = f"# {origin} on {e.gpus} x {e.gpu}, planned by nanotrain_jax.plan: {e.peak_bytes / 1e9:.3g} GB, modelled "
    return head + f"{e.step_seconds:.3f} s per step\n" + yaml.safe_dump(tree, sort_keys=False)


def as_json(plan: Planned) -> dict[str, Any]:
    """Return all numbers of a plan. "fits" is true for the verdict "fits" only, "within_margin" for "may not fit"."""
    e = plan.estimate
    c, parts = e.config, e.moments[e.peak]
    out = {
        "model": {"params": counts.all_parameters(c), "flops_per_token": flops.flops_per_token(c)["full"]},
        **_layout(e),
        "estimate": {
            "state_bytes": {"params": parts["params"], "grads": parts["gradients"], "optimizer": parts["optimizer"]},
            "activation_bytes": parts["activations"],
            "moments": e.moments,
            **_numbers(e),
            "seconds": e.seconds,
            "flops": e.flops,
            "host_bytes": e.host_bytes,
            "on_host": e.on_host,
            "nvme_bytes": e.nvme_bytes,
            "limit_bytes": e.limit_bytes,
            "margin_bytes": margin(c) * e.peak_bytes,
        },
        "collectives": [{"axis": t.axis, "op": t.op, **_transfer(t)} for t in e.transfers],
        "host_copies": [{"to": t.op.removeprefix("to "), **_transfer(t)} for t in e.copies],
        "fits": plan.verdict == "fits",
        "within_margin": plan.verdict == "may not fit",
    }
    if plan.compiled:
        out |= {"compiled": plan.compiled, "ratios": compiler.ratios(e, plan.compiled)}
    if plan.found:
        out["candidates"] = [_layout(other) | _numbers(other) for other in plan.found.best[:10]]
        out["rejected"] = dict(plan.found.rejected)
    if plan.too_large:
        out["compiled_too_large"] = [
            _layout(other) | {"estimated_peak_bytes": other.peak_bytes, "compiled_peak_bytes": compiled["peak_bytes"]}
            for other, compiled in plan.too_large
        ]
    if plan.better:
        out["better"] = _layout(plan.better) | _numbers(plan.better)
    return out


def _transfer(t: Transfer) -> dict[str, Any]:
    sizes = {"bytes_per_device": t.bytes, "why": t.why, "link": t.link}
    return sizes | {"seconds": t.seconds, "exposed_seconds": t.exposed}


def _layout(e: Estimate) -> dict[str, Any]:
    p = e.config.parallel
    return {
        "mesh": p.axes,
        "context_attention": p.context_attention if p.context > 1 else None,
        "zero": p.zero,
        "schedule": p.schedule if p.pipe > 1 else None,
        "chunks": p.chunks,
        "vocab_over_pipe": p.vocab_over_pipe if p.pipe > 1 else None,
        "microbatches": p.microbatches,
        "remat": e.config.memory.remat,
        "loss_chunk": e.config.model.loss_chunk,
        "gpu": e.gpu,
        "gpus": e.gpus,
    }


def _numbers(e: Estimate) -> dict[str, float]:
    names = "peak_bytes", "step_seconds", "tokens_per_second", "mfu", "mfu_causal", "bubble_fraction"
    return {name: getattr(e, name) for name in names}
