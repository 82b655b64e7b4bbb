"""The steps of a phase: compile, then repeat data -> step -> metrics, with evaluations and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import jax

from nanotrain_jax.audit import hlo
from nanotrain_jax.checkpoint import local
from nanotrain_jax.checkpoint import write as checkpoint
from nanotrain_jax.costs import flops
from nanotrain_jax.data import batches as data
from nanotrain_jax.data.mixture import Mixture
from nanotrain_jax.distributed import watchdog
from nanotrain_jax.nvme import checkpointing
from nanotrain_jax.nvme.store import Store
from nanotrain_jax.run import device_speed, divergence, held_out, metrics, profile_summary, rollback
from nanotrain_jax.run.origin import Run, back_to_checkpoint, reading_from
from nanotrain_jax.run.phases import describe, is_over
from nanotrain_jax.run.profiling import Profile
from nanotrain_jax.run.saving import Saving
from nanotrain_jax.run.verification import Checks, Verification
from nanotrain_jax.step import build as steps
from nanotrain_jax.step.state import adapters_alone


class Loop:
    """The training steps of a phase, with evaluations and checkpoints between them."""

    def __init__(
        self,
        run: Run,
        files: Store | None,
        writer: metrics.Writer,
        watch: watchdog.Watchdog,
        verification: Verification,
    ):
        self.files, self.writer, self.watch = files, writer, watch
        self.verification = verification
        self.checks: Checks | None = None  # compiled; with runtime.verify_every
        self.train_step: Callable | None = None  # compiled
        self.program: Callable[[], str] | None = None  # returns the text of the compiled step
        self.synchronize: Callable[[steps.State], steps.State] | None = None  # compiled; with parallel.sync_every
        self.again(run)

    def again(self, run: Run) -> None:
        """Begin, or begin again, with a run in this phase."""
        self.run, self.losses = run, run.losses
        self.mismatch = ""  # what a check of the hardware found
        self.diverged = ""  # why the run stops: too many skipped steps in a row
        self.phase, self.config, self.state = run.phases[0], run.config, run.state
        self.first = self.number = int(run.state.step)
        self.saved = run.saved  # step of the newest checkpoint
        self.write_local: local.Save | None = None  # with checkpoint.local_dir

    @property
    def goes_back(self) -> bool:
        """True after a loss spike, a check that failed or too many skipped steps: no step follows, nothing is saved.

        The loop ends as usual, which completes a checkpoint that is being written; then `after` goes back, or raises.
        """
        return bool(self.losses.spike or self.mismatch or self.diverged)

    def at(self, what: str) -> None:
        """Tell the watchdog what the loop does now."""
        self.watch.at(what, self.number)

    def run_steps(self, stopped: Callable[[int], bool]) -> None:
        """Run steps until the phase is over, until stopped(step) or the run goes back; save, unless it goes back."""
        self.writer.seen, self.writer.rollbacks = self.losses.see, self.losses.count
        self.writer.tokens_per_step = self.phase.batch_size * self.config.data.seq_len
        self.writer.skipped = int(metrics.on_host({"skipped_steps": self.state.skipped})["skipped_steps"])
        self.writer.flops_per_token = flops.flops_per_token(self.config)["full"] if self.config.is_built_in else 0.0
        self.writer.mixed = self.epochs
        for line in [*describe(self.phase, self.number), *self.sources()]:
            self.writer.say(line)
        saves, self.saving = self.config.checkpoint.is_on, Saving(self.config.checkpoint, self.number)
        self.restore_files()
        self.train_step = self.train_step or self.compile()
        with (
            checkpoint.writing(self.config.checkpoint) if saves else nullcontext() as write,
            local.writing(self.config.checkpoint, self.number, self.writer.say) as self.write_local,
        ):
            self.take_steps(stopped, write)
            if not self.goes_back:
                self.writer.write(is_last=not is_over(self.phase, self.number, self.state))
            if saves and self.number > self.saved and not self.goes_back:
                self.save(write)
            self.at("end")  # leaving `writing` waits for the last checkpoint

    def after(self) -> Run:
        """Return the run after the last step so far; or from where it continues, if it goes back. Raises Diverged,
        Corrupted, ValueError or OSError."""
        if self.mismatch:
            return self.back_to_intact()
        if self.diverged:
            raise divergence.Diverged(self.diverged)
        if self.losses.spike:
            return self.back()
        return self.run._replace(state=self.state, position=self.position, tokens=self.tokens, saved=self.saved)

    def back(self) -> Run:
        """Return the run as it was at its newest checkpoint, with the batch after the spike next."""
        spike, count, most = self.losses.spike, self.losses.count + 1, self.config.train.rollback.most
        if count > most:
            raise divergence.Diverged(
                f"diverged: at step {spike.step} the {spike.text}, after {most} rollbacks; the newest checkpoint is of "
                f"step {self.saved}; lower optimizer.lr={self.config.optimizer.lr:g}, or raise train.rollback.most"
            )
        self.at("restore")
        self.state, last, position = None, self.number, self.position_after(spike.step)
        run = reading_from(back_to_checkpoint(self.run.plan), self.run.dataset.fingerprint, position)
        run.losses.count, number = count, int(run.state.step)
        skipped = {"step": number, "position": position, "fingerprint": self.run.dataset.fingerprint, "count": count}
        rollback.remember(self.config.checkpoint.dir, rollback.Skipped(**skipped))
        self.writer.undo(last, number, run.tokens)
        self.writer.say(
            f"rollback {count} of at most {most}: at step {spike.step} the {spike.text}; back to step {number}, and "
            f"past the batches of steps {number + 1} to {spike.step}: on with sequence {position:,} of the data"
        )
        return run

    def back_to_intact(self) -> Run:
        """Return the run as it was at its newest checkpoint, to take the steps since then again."""
        self.verification.count += 1
        self.writer.mismatches = self.verification.count
        self.verification.failed(self.number, self.mismatch, self.saved)
        self.at("restore")
        self.state = None
        run, fingerprint = back_to_checkpoint(self.run.plan), self.run.dataset.fingerprint
        number = int(run.state.step)
        if number >= self.first and run.dataset.fingerprint == fingerprint:
            run = reading_from(run, fingerprint, self.position_after(number))  # batches skipped before stay so
        run.losses.count = self.losses.count
        self.writer.undo(self.number, number, run.tokens)
        self.writer.say(f"silent error after step {self.number}: {self.mismatch}; back to step {number}, and on")
        return run

    @property
    def sequences(self) -> int:
        """Sequences consumed by this loop so far."""
        return (self.number - self.first) * self.phase.batch_size

    @property
    def position(self) -> int:
        """Sequences of the data consumed so far."""
        return self.position_after(self.number)

    def position_after(self, number: int) -> int:
        """Sequences of the data consumed after step `number` of this phase."""
        return self.run.position + (number - self.first) * self.phase.batch_size

    @property
    def tokens(self) -> int:
        """Tokens consumed so far."""
        return self.run.tokens + self.sequences * self.config.data.seq_len

    def epochs(self, number: int) -> dict[str, float]:
        """Return how often each source of a mixture has been read after step `number`, by name."""
        train = self.run.dataset.train
        return train.epochs(self.position_after(number)) if isinstance(train, Mixture) else {}

    def sources(self) -> list[str]:
        """Return a line for each source of a mixture."""
        train, last, times = self.run.dataset.train, self.run.span.last, self.epochs(self.run.span.last)
        return [
            f"  {name:<15} {train.shares[name]:.3%} of tokens; {len(train.rows[name]):,} sequences, read "
            f"{times[name]:.2f} times by step {last}"
            for name in times
        ]

    def take_steps(self, stopped: Callable[[int], bool], write: checkpoint.Save | None) -> None:
        """Run steps, evaluate and save until the phase is over, until stopped(step) or the run goes back."""
        run, num_steps, profiled = self.run, self.run.span.last, self.config.runtime.profile_steps
        profiled = profiled and (profiled[0], min(profiled[1], num_steps))
        batches = data.batches(
            run.dataset.train, run.step.batch, self.config.data.seed, run.position, run.step.token_order
        )
        folder = Path(self.config.logging.dir) / "profile"
        own = str(jax.process_index()) if jax.process_count() > 1 else ""  # processes of a host name theirs alike
        with (
            closing(batches),
            closing(Profile(profiled, folder / own, self.writer.say, self.program)) as profile,
        ):
            self.writer.start_clock()
            while not (self.goes_back or is_over(self.phase, self.number, self.state) or stopped(self.number)):
                self.take_step(batches, profile)
                if self.mismatch or self.diverges():
                    break
                self.between_steps(write)
            self.writer.settle()

    def compile(self) -> Callable:
        """Compile the train step."""
        run, step = self.run, self.run.step
        self.at("compile")
        self.writer.say("compiling the step ...")
        started = time.perf_counter()
        train_step = step.train.lower(step.state, step.batch).compile()
        if step.synchronize:
            self.synchronize = step.synchronize.lower(step.state).compile()
        self.writer.say(f"compiled in {time.perf_counter() - started:.1f} s")
        self.program = train_step.as_text
        self.checks = Checks(step) if self.verification.every else None
        check_offload(run, hlo.memory(train_step)["host_bytes"])
        return checkpointing.train(self.files, step, train_step) if self.files else train_step

    def restore_files(self) -> None:
        """With NVMe offload restore or initialize the files of the optimizer state."""
        run, files = self.run, self.files
        if files:
            self.at("restore")
            origin = checkpointing.restore(files, run.step, run.restored, run.meta.nvme_digests if run.meta else [])
            self.writer.say(f"master weights and moments: {files.nbytes / 1e9:.3g} GB in {files.folder}, {origin}")

    def take_step(self, batches: Iterator[Any], profile: Profile) -> None:
        """Dispatch the next step; on return the metrics of the previous step are written (see metrics.py).

        Before a step that is due the hardware is checked; after a check that fails the step is not taken.
        """
        self.number += 1
        if profile.begins(self.number):
            self.writer.settle()
        profile.before(self.number)
        with jax.profiler.StepTraceAnnotation(profile_summary.STEP, step_num=self.number):
            self.at("data")
            with jax.profiler.TraceAnnotation(profile_summary.INPUT):
                batch = next(batches)
            if self.verification.is_due(self.number) and not self.is_intact(batch):
                self.number -= 1
                return
            self.at("dispatch")
            self.state, values, _ = self.train_step(self.state, batch)
            if self.synchronize and self.number % self.config.parallel.sync_every == 0:
                self.state = self.synchronize(self.state)
            self.at("step")
            self.writer.step(self.number, values)
            if self.files or profile.ends(self.number):
                self.writer.settle()  # the NVMe update has synchronized with the device already
        profile.after(self.number)

    def between_steps(self, write: checkpoint.Save | None) -> None:
        """Time devices, evaluate and save if due; weights of a run that may be diverging do not push out those of
        before."""
        train, every = self.config.train, self.config.runtime.time_devices_every
        if every and self.number % every == 0:
            self.time_devices()
        is_due = train.eval_every and (self.number % train.eval_every == 0 or self.number == self.run.span.last)
        if is_due and (self.run.dataset.validation or self.run.plan.tasks):
            self.writer.settle()
            losses = held_out.means(self.run, self.state, self.at)
            self.writer.write(**losses, tasks=held_out.scores(self.run, self.state, self.at))
            self.writer.start_clock()
        write = write if self.saving.is_due(self.number) else self.write_local
        if write is not self.write_local or self.saving.is_local_due(self.number):
            self.writer.settle()
            if divergence.skipped_in_a_row(self.writer, self.config) < divergence.SUSPECT and not self.losses.spike:
                self.save(write)
            self.writer.start_clock()

    def diverges(self) -> bool:
        """Note whether the run stops after the last step, as too many in a row were skipped (train.max_skipped)."""
        self.diverged = divergence.found(self.writer, self.config, self.number, self.saved)
        return bool(self.diverged)

    def is_intact(self, batch: Any = None) -> bool:
        """Compare arrays of which devices have copies, and compute the gradients of a batch, if given, twice."""
        self.writer.settle()
        self.at("verify")
        began = time.perf_counter()
        self.mismatch = self.checks.copies(self.state)
        if batch is not None and not self.mismatch:
            self.mismatch = self.checks.gradients(self.state, batch)
        self.writer.verified(time.perf_counter() - began)
        self.writer.start_clock()
        return not self.mismatch

    def time_devices(self) -> None:
        """Time matmuls on each device, and name the slowest if it is slow."""
        self.writer.settle()
        self.at("verify")
        slow = device_speed.slowest(device_speed.of_all(self.run.mesh))
        if slow:
            self.writer.slow = {"slow_device": slow.device, "slow_device_ratio": slow.ratio}
            self.writer.say(f"slow device after step {self.number}: {device_speed.described(slow, self.run.mesh)}")
        self.writer.start_clock()

    def save(self, write: checkpoint.Save | local.Save) -> None:
        """Save a checkpoint of the last step, or a local copy of one, unless devices hold different copies of it. Its
        metrics are written first: a resume does not repeat the step."""
        if self.checks and not self.is_intact():
            return
        run, files, number = self.run, self.files, self.number
        self.writer.write()
        self.at("checkpoint")
        began = time.perf_counter()
        meta = {
            "config": run.config.to_dict(),
            "tokenizer": run.dataset.tokenizer,
            "data": {"position": self.position, "fingerprint": run.dataset.fingerprint, "read": dict(run.read)},
            "tokens": self.tokens,
            "batch_size": self.phase.batch_size,
            "nvme": files and checkpointing.seal(files),
            "base": run.base and run.base.model_dump(),
            "losses": [*self.losses.newest],
            "rollbacks": self.losses.count,
            "mismatches": self.verification.count,
        }
        apart = (self.arrays_of(files), checkpointing.nbytes(files)) if files else ()
        write(number, adapters_alone(run.step.plan, run.step.in_layer_order(self.state)), meta, *apart)
        self.writer.save_seconds = time.perf_counter() - began
        if write is not self.write_local:
            self.saved = number
            self.saving.saved(number)

    def arrays_of(self, files: Store) -> Iterator[Any]:
        """Read the state on NVMe, one array after another as they are saved: the hang timeout is that of one."""
        for tree in checkpointing.arrays(files, self.run.step):
            self.at("checkpoint")
            yield tree


def check_offload(run: Run, host_bytes: int) -> None:
    """Raise RuntimeError if offload is configured but the compiled step uses no host memory (except on CPU devices)."""
    requested = run.config.memory.offload_activations == "host" or any(jax.tree.leaves(run.step.plan.host_memory))
    if requested and not host_bytes and run.mesh.devices.flat[0].platform != "cpu":
        raise RuntimeError(
            "memory.offload_*=host, but the compiled step uses no host memory: XLA left everything on the device; "
            f"please report this, with jax {jax.__version__} and the config"
        )
