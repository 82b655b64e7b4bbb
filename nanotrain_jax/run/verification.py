"""Silent errors of hardware (runtime.verify_every): which device computes or holds other bits than it should.

Before a step that is due its gradients are computed twice; a device that computes the same has the same bits. Arrays of
which several devices have a copy are compared between these, also before each checkpoint. Megatron-LM's rerun machine
compares two results in the same way. Both read digests of 4 bytes per array and device, on all processes, which decide
alike. What all copies have wrong, or what one device computes wrong in the same way each time, is not found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from nanotrain_jax.config.run_sections import Runtime
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.sharding import path_name
from nanotrain_jax.step import digest
from nanotrain_jax.step.build import Step
from nanotrain_jax.step.state import State

MOST_NAMED = 8  # devices in a line


class Corrupted(Exception):
    """A check failed, and the run stops: as runtime.on_mismatch says, or because it does not come past that step."""


class Verification:
    """The checks of a run, and how many have failed."""

    def __init__(self, runtime: Runtime, count: int = 0):
        """count: checks that failed before this start."""
        self.every, self.stops = runtime.verify_every, runtime.on_mismatch == "stop"
        self.count, self.failed_at = count, 0  # the latest step of this start after which a check failed

    def is_due(self, number: int) -> bool:
        """Return whether to check before step `number`."""
        return bool(self.every) and number % self.every == 0

    def failed(self, number: int, text: str, saved: int) -> None:
        """Note that a check failed after step `number`. saved: step of the newest checkpoint, 0: none.

        Raises Corrupted if the run should not go on: a check that fails again before a later step would fail for ever.
        """
        newest = f"the newest checkpoint is of step {saved}" if saved else "there is no checkpoint"
        again = f", again after that of step {self.failed_at}" if self.failed_at else ""
        if self.stops or number <= self.failed_at:
            raise Corrupted(
                f"silent error after step {number}{again}: {text}; {newest}; replace the device and repeat the command"
            )
        self.failed_at = number


class Checks:
    """The compiled checks of a step; each returns what is wrong, "" if nothing is."""

    def __init__(self, step: Step):
        self.mesh = step.plan.mesh
        self.compute = step.digests.gradients.lower(step.state, step.batch).compile()
        self.read_copies = step.digests.copies.lower(step.state).compile()
        self.specs = {name: x.sharding.spec for name, x in named(step.state).items()}

    def gradients(self, state: State, batch: Tree) -> str:
        """Compute loss and gradients of a batch twice."""
        first, second = (jax.device_get(self.compute(state, batch)) for _ in range(2))
        for stage in first:  # an error spreads from one to the next
            different = unequal(named(first[stage], stage), named(second[stage], stage))
            if different:
                return f"computed twice, {described(different, self.mesh)}"
        return ""

    def copies(self, state: State) -> str:
        """Compare arrays between the devices that have a copy."""
        different = odd(named(jax.device_get(self.read_copies(state))), self.specs, self.mesh)
        return f"of equal copies, {described(different, self.mesh)}" if different else ""


def named(tree: Tree, prefix: str = "") -> dict[str, Tree]:
    """Return the leaves of a tree by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(filter(None, (prefix, path_name(path)))): leaf for path, leaf in leaves}


def unequal(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """Return the devices whose digests differ between two computations, by array."""
    found = {name: np.flatnonzero(first[name] != second[name]).tolist() for name in first}
    return {name: devices for name, devices in found.items() if devices}


def odd(digests: Mapping[str, np.ndarray], specs: Mapping[str, PartitionSpec], mesh: Mesh) -> dict[str, list[int]]:
    """Return the devices whose digest differs from that of most devices with the same copy, by array; of two different
    ones both. digests: [devices]."""
    found = {}
    for name, of_devices in digests.items():
        groups = copies_of(mesh, specs[name])
        devices = [device for group in groups for device in minority(of_devices, group)]
        if devices:
            found[name] = sorted(devices)
    return found


def copies_of(mesh: Mesh, spec: PartitionSpec) -> np.ndarray:
    """Return the devices, by number, of each set of equal copies of an array: [sets copies]."""
    axes = digest.shared_axes(mesh, spec)
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    last = range(-len(axes), 0)
    moved = np.moveaxis(numbers, [mesh.axis_names.index(axis) for axis in axes], last)
    return moved.reshape(-1, np.prod([mesh.shape[axis] for axis in axes], dtype=int))


def minority(of_devices: np.ndarray, group: np.ndarray) -> list[int]:
    """Return the devices of a group without its most common digest; all of them if two are as common."""
    counts = Counter(of_devices[group].tolist()).most_common(2)
    if len(counts) == 1:
        return []
    is_tied = counts[0][1] == counts[1][1]
    return [int(device) for device in group if is_tied or of_devices[device] != counts[0][0]]


def described(different: Mapping[str, list[int]], mesh: Mesh) -> str:
    """Return "NAME and 3 more arrays differ on process 0, local device 2 (data 2)"."""
    name, *others = different
    devices = sorted({device for found in different.values() for device in found})
    names = [device_name(mesh, device) for device in devices[:MOST_NAMED]]
    more = f", and {len(devices) - MOST_NAMED} more" if len(devices) > MOST_NAMED else ""
    arrays = f"{name} and {len(others)} more arrays differ" if others else f"{name} differs"
    of_all = f" {len(devices)} of {mesh.size} devices, one of them wrong:" if len(devices) > 1 else ""
    return f"{arrays} on{of_all} {', '.join(names)}{more}"


def device_name(mesh: Mesh, number: int) -> str:
    """Return process, local device and coordinates of a device: "process 0, local device 2 (data 2)"."""
    device = mesh.devices.flat[number]
    local = sorted(other.id for other in jax.devices() if other.process_index == device.process_index)
    position = zip(mesh.shape.items(), np.unravel_index(number, mesh.devices.shape), strict=True)
    place = ", ".join(f"{axis} {index}" for (axis, size), index in position if size > 1)
    return f"process {device.process_index}, local device {local.index(device.id)}" + (f" ({place})" if place else "")
