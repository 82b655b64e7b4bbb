"""Checks of the keys that decide what is updated, how, and what replicas sum."""

from nanotrain_jax.config.execution import Execution, execution, reduces_per_layer
from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.config.schema import Config

ALL_BUT_ADAPTERS = r"^(?!.*_[AB]_[A-Z]+$)"  # of train.freeze


def with_adapters(config: Config) -> Config:
    """Return a config with the adapters of train.lora in its model, and all else frozen. Raises Misfit."""
    lora, m = config.train.lora, config.model
    if m.lora not in (None, lora):
        raise Misfit("model.lora is filled in from train.lora, and differs from it", "set train.lora alone")
    if lora is None:
        return config
    if not config.is_decoder:
        raise Misfit("train.lora with vision or model.factory: only the built-in decoder has adapters", "leave it out")
    if config.train.stages:
        raise Misfit("train.lora with train.stages: adapters have one stage", "leave one of them out")
    if set(lora.targets) == {"gate"} and not m.features.gated_mlp:
        raise Misfit(f"train.lora.targets=[gate], but model.family={m.family} has no gate", "add other targets")
    freeze = tuple(dict.fromkeys((*config.train.freeze, ALL_BUT_ADAPTERS)))
    return config.replace("model", lora=lora).replace("train", freeze=freeze)


def check(config: Config) -> None:
    """Raise Misfit unless what is updated, and how, fits together."""
    check_length(config)
    check_frozen(config)
    check_saved_model(config)
    check_rollback(config)
    check_verification(config)
    check_local_copies(config)
    check_objective(config)
    check_noise_scale(config)
    check_compression(config)
    check_local_steps(config)
    check_muon(config)


def check_length(config: Config) -> None:
    """Raise Misfit unless the data can decide how long a run is (train.epochs, data.exhausted=end)."""
    t, source = config.train, config.data.origin
    if config.data.exhausted == "end":
        others = {"stages": t.stages, "epochs": t.epochs is not None, "batch_growth": t.batch_growth}
        other = next((name for name, value in others.items() if value), None)
        if other:
            why = "whose batches depend on the noise scale" if other == "batch_growth" else "which says how long it is"
            raise Misfit(f"data.exhausted=end with train.{other}, {why}", "leave one of them out")
    if t.epochs is None:
        return
    if config.data.kind == "synthetic":
        raise Misfit(f"train.epochs={t.epochs:g} with data.source={source}, which never ends", "use train.steps")
    if config.data.parts:
        raise Misfit(
            f"train.epochs={t.epochs:g} with a mixture: its sources end at different steps",
            "use train.steps, or data.exhausted=end",
        )


def check_frozen(config: Config) -> None:
    """Raise Misfit unless parts can be frozen (train.freeze), and stages of training follow each other."""
    p, t, features = config.parallel, config.train, config.model.features
    if not (t.freeze or t.stages or features.has_local_layers):
        return
    key = "train.lora" if t.lora else "train.stages" if t.stages else f"train.freeze={list(t.freeze)}"
    if features.has_local_layers:  # which layers are local is stored with the weights, and frozen
        key = f"model.global_layers={features.global_layers}"
    if config.memory.offload_optimizer == "nvme":
        raise Misfit(
            f"{key} with memory.offload_optimizer=nvme: the files hold the state of all weights",
            "use memory.offload_optimizer=host or none",
        )
    if p.sync_every:
        raise Misfit(
            f"{key} with parallel.sync_every={p.sync_every}: the outer optimizer holds all weights",
            "leave parallel.sync_every out",
        )
    if p.compression.has_residual:
        raise Misfit(
            f"{key} with parallel.compress={p.compress}: the residual is kept of all weights",
            "use parallel.compress=none, float8 or int8",
        )


def check_saved_model(config: Config) -> None:
    """Raise Misfit unless the weights can be written as a model folder at the end (train.save_hf)."""
    if not config.train.save_hf:
        return
    if not config.is_decoder:
        raise Misfit("train.save_hf=true with vision or model.factory: only the decoder has a format", "leave it out")
    if not config.checkpoint.is_on:
        raise Misfit(
            "train.save_hf=true with checkpoint.every=0: the model is written from the last checkpoint",
            "use checkpoint.every above 0",
        )


def check_rollback(config: Config) -> None:
    """Raise Misfit unless a run can go back to a checkpoint, on with later data, on all processes (train.rollback)."""
    if config.train.rollback is None:
        return
    if not config.checkpoint.is_on:
        raise Misfit("train.rollback with checkpoint.every=0: it goes back to a checkpoint", "use checkpoint.every=100")
    if config.parallel.sync_every:
        raise Misfit(
            f"train.rollback with parallel.sync_every={config.parallel.sync_every}: each replica has a loss of its own",
            "leave one of them out",
        )
    if config.data.exhausted == "end":
        raise Misfit(
            "train.rollback with data.exhausted=end: batches that are skipped leave too few for all steps",
            "use data.exhausted=repeat",
        )


def check_verification(config: Config) -> None:
    """Raise Misfit unless a run can go back to a checkpoint after a check that failed (runtime.verify_every)."""
    runtime = config.runtime
    if runtime.verify_every and runtime.on_mismatch == "rollback" and not config.checkpoint.is_on:
        raise Misfit(
            f"runtime.verify_every={runtime.verify_every} with checkpoint.every=0: it goes back to a checkpoint",
            "use checkpoint.every=100, or runtime.on_mismatch=stop",
        )


def check_local_copies(config: Config) -> None:
    """Raise Misfit unless local copies of checkpoints hold the whole state (checkpoint.local_dir)."""
    if config.checkpoint.local_dir and config.memory.offload_optimizer == "nvme":
        raise Misfit(
            "checkpoint.local_dir with memory.offload_optimizer=nvme: local copies hold what is in memory",
            "use memory.offload_optimizer=host or none, or leave checkpoint.local_dir out",
        )


def check_objective(config: Config) -> None:
    """Raise Misfit unless pairs are there for an objective that compares them, and only then."""
    objective, source = config.train.objective, config.data.origin
    if objective is None and config.data.is_pairs:
        raise Misfit(f"data.source={source!r} without an objective", "use train.objective={kind: dpo}, or chat:GLOB")
    if objective is None:
        return
    key = f"train.objective={{kind: {objective.kind}}}"
    if not config.data.is_pairs:
        raise Misfit(f"{key} with data.source={source!r}, which has no pairs", "use pairs:GLOB, or leave it out")
    if config.train.stages:
        raise Misfit(
            f"{key} with train.stages: the reference is the model before the first step",
            "train the stages before it in a run of their own, and start from that with checkpoint.resume",
        )


def check_noise_scale(config: Config) -> None:
    """Raise Misfit unless each microbatch of a device has a gradient of its own, to compare with that of the batch."""
    p, key = config.parallel, "train.noise_scale=true"
    if not config.train.noise_scale:
        return
    if p.replica * p.data * p.microbatches == 1:
        raise Misfit(f"{key} with one microbatch on one device: nothing to compare", "use more parallel.microbatches")
    if p.context > 1:
        raise Misfit(f"{key} with parallel.context={p.context}: devices have parts of a gradient", "use context=1")
    if p.sync_every or p.compression.kind != "none":
        raise Misfit(f"{key} with parallel.sync_every or compress: no step has the batch's gradient", "leave one out")
    if execution(config) is Execution.OFFLOADED:
        raise Misfit(
            f"{key} with gradients or activations in host memory: that loop does not measure them",
            "use memory.offload_optimizer=none and offload_activations=none, or parallel.zero below 2",
        )


def check_compression(config: Config) -> None:
    """Raise Misfit unless gradients can be summed over replica once per step, and what is not sent be kept."""
    p, m, scale = config.parallel, config.memory, config.precision.loss_scale
    if p.compression.kind == "none":
        return
    key = f"parallel.compress={p.compress}"
    if p.replica == 1:
        raise Misfit(f"{key} with parallel.replica=1: gradients are compressed between replicas", "use more replicas")
    if reduces_per_layer(config):
        raise Misfit(
            f"{key} with parallel.grad_reduce=per_layer: gradients would be summed within the backward",
            "use parallel.grad_reduce=after_backward",
        )
    if p.compression.has_residual and m.offload_optimizer != "none":
        raise Misfit(
            f"{key} with memory.offload_optimizer={m.offload_optimizer}: the residual, as large as the master weights, "
            "would stay on the device",
            "use memory.offload_optimizer=none, or parallel.compress=none",
        )
    if p.compression.has_residual and scale != "none" and not p.sync_every:
        raise Misfit(
            f"{key} with precision.loss_scale={scale}: the residual would have another scale than later gradients",
            "use precision.compute=bfloat16 without a loss scale",
        )


def check_local_steps(config: Config) -> None:
    """Raise Misfit unless replicas can take steps of their own (parallel.sync_every)."""
    p, m = config.parallel, config.memory
    if not p.sync_every:
        return
    local_steps, leave_out = f"parallel.sync_every={p.sync_every}", "leave parallel.sync_every out"
    if p.replica == 1:
        raise Misfit(
            f"{local_steps} with parallel.replica=1: there is nothing to synchronize",
            f"use parallel.replica=2 or more, or {leave_out}",
        )
    offloaded = {key: getattr(m, key) for key in ("offload_optimizer", "offload_params", "offload_activations")}
    for key, where in offloaded.items():
        if where != "none":
            raise Misfit(
                f"{local_steps} with memory.{key}={where}: replicas keep their state on the device",
                f"use memory.{key}=none, or {leave_out}",
            )
    if reduces_per_layer(config):
        raise Misfit(
            f"{local_steps} with parallel.grad_reduce=per_layer: it reduces over replicas within the backward",
            f"use parallel.grad_reduce=after_backward, or {leave_out}",
        )


def check_files_of_phases(config: Config) -> None:
    """Raise Misfit if a stage has phases, and files that only one of them would hold."""
    train, parallel = config.train, config.parallel
    phases = {
        "train.batch_growth": train.batch_growth,
        "train.batch_schedule": train.batch_schedule,
        "parallel.full_sync_steps": parallel.full_sync_steps,
    }
    key = next((key for key, given in phases.items() if given), None)
    if key and config.memory.offload_optimizer == "nvme":
        raise Misfit(
            f"{key} with memory.offload_optimizer=nvme: each phase would begin with new files",
            "use memory.offload_optimizer=host or none",
        )


def check_muon(config: Config) -> None:
    """Raise Misfit unless whole matrices can be orthogonalized (optimizer.name=muon)."""
    o, m = config.optimizer, config.memory
    if o.name == "adamw":
        return
    if o.factory:
        raise Misfit(f"optimizer.name={o.name} with optimizer.factory={o.factory}: both choose one", "leave one out")
    if m.offload_optimizer != "none":
        raise Misfit(
            f"optimizer.name=muon with memory.offload_optimizer={m.offload_optimizer}: state streams in parts of a "
            "layer, but matrices are orthogonalized whole",
            "use memory.offload_optimizer=none, or optimizer.name=adamw",
        )
