"""Layouts of a model's arrays on a mesh of devices; imports no model."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import sharding

from spec_jax.parallel import collectives


SEGMENTS = 8
"""Segments of a sum by default, for the same bits on 1, 2, 4 and 8 devices."""

REPLICATED = sharding.PartitionSpec()
CUT = sharding.PartitionSpec(collectives.AXIS)
"""Arrays cut by their first axis."""

PAGES = sharding.PartitionSpec(None, None, collectives.AXIS)
"""Pages `[P, C, K, H]` cut by key/value heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh, and the number of segments, which decides bits; hashable.

    Attributes:
      mesh: has one axis, `collectives.AXIS`.
      segments: of every sum that is spread over devices, a power of two.

    Raises:
      ValueError: another axis, a number of devices or of segments that is not a power
        of two, or segments that the devices cannot share.
    """

    mesh: sharding.Mesh
    segments: int = SEGMENTS

    def __post_init__(self) -> None:
        if self.mesh.axis_names != (collectives.AXIS,):
            raise ValueError(
                f"a mesh with the axes {self.mesh.axis_names}: make it by "
                f"parallel.shard.mesh, with the one axis {collectives.AXIS!r}"
            )
        segments, devices = self.segments, self.mesh.size
        if devices & (devices - 1):
            raise ValueError(
                f"{devices} devices: the order of a sum is the same on any number of "
                "devices only if that is a power of two; take "
                f"{1 << devices.bit_length() - 1} of them"
            )
        if segments < 1 or segments & (segments - 1) or segments % devices:
            raise ValueError(
                f"{segments=} on {devices} devices: take a power of two that is a "
                f"multiple of the number of devices, such as {max(SEGMENTS, devices)}"
            )

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.mesh.size

    def describe(self) -> dict[str, int]:
        """Returns fields for results; equal segments give equal bits."""
        return {"devices": self.devices, "segments": self.segments}

    def check_divides(self, **sizes: int) -> None:
        """Raises `ValueError` for a size that the devices cannot share."""
        for name, size in sizes.items():
            if size % self.devices:
                counts = (1 << i for i in range(self.devices.bit_length() - 1))
                most = max(n for n in counts if size % n == 0)
                raise ValueError(
                    f"{name}={size} cannot be cut for {self.devices} devices: take a "
                    f"number of devices that divides it, {most} at most here"
                )

    def local(self) -> Iterator[tuple[int, jax.Device]]:
        """Yields this process's devices, each with its number in the mesh."""
        for number, device in enumerate(self.mesh.devices.flat):
            if device.process_index == jax.process_index():
                yield number, device

    def sharding(self, spec: sharding.PartitionSpec) -> sharding.NamedSharding:
        """Returns the sharding by `spec` on this mesh."""
        return sharding.NamedSharding(self.mesh, spec)

    def stacked(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Returns an array `[devices, ..]` made of one part a device, as in `local`."""
        return jax.make_array_from_single_device_arrays(
            (self.devices, *parts[0].shape),
            self.sharding(CUT),
            [part[None] for part in parts],
        )

    def replicated(self, array: np.ndarray | jax.Array) -> jax.Array:
        """Copies an array to every device; it must be the same in all processes.

        An array that is on all of them already is returned as it is.
        """
        wanted = self.sharding(REPLICATED)
        if isinstance(array, jax.Array) and array.sharding == wanted:
            return array
        array = np.asarray(array)
        return jax.make_array_from_callback(
            array.shape, wanted, lambda index: array[index]
        )

    def gather(self, tree: Any) -> Any:
        """Copies whole arrays to every device of the mesh, and so to every process."""
        return jax.jit(lambda tree: tree, out_shardings=self.sharding(REPLICATED))(tree)

    def run(self, function: Callable, *, in_specs, out_specs) -> Callable:
        """Returns a function that runs on each device on its parts of the arguments."""
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


def make_cpu_devices(count: int) -> None:
    """Makes jax see `count` devices on a CPU; other platforms ignore it.

    Has no effect once jax runs: `mesh` then raises if devices are missing.
    """
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def mesh(num_devices: int | None = None) -> sharding.Mesh:
    """Returns a mesh of the first `num_devices` of all processes; None: of all.

    Raises:
      ValueError: less than one device, or more than there are.
    """
    devices = jax.devices()
    count = len(devices) if num_devices is None else num_devices
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"{count} devices: jax has {len(devices)} here; for more on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={max(count, 1)}"
        )
    return sharding.Mesh(np.asarray(devices[:count]), (collectives.AXIS,))
