"""Compiles for an H100 on a machine that has none, and reports on the result.

jax makes a compile-only device from a description of the GPU, and XLA takes a jitted
function down to its machine code with the compilers of the extra `cuda-compile`: no
driver, no GPU. It cannot tell whether the code is fast, or whether the bits are those
of interpret mode.

    with hopper.compiler() as compiler:
        report = compiler(module_level_function_giving_a_Program, 4096, rows=5)

The work is done in another process, because a kernel that the compiler cannot take
may end the process (one of three warps does).
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import multiprocessing
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent import futures
from unittest import mock

import jax
import ptxas_log

from spec_jax import compilation
from spec_jax.pallas import launch


DEVICE = "NVIDIA H100 80GB HBM3"
MAX_THREADS = 1024  # of one block
MAX_SHARED_BYTES = 232_448  # of one block, with the opt-in
REGISTER_FILE = 65_536  # of one multiprocessor, as are the next two
SHARED_FILE_BYTES = 233_472
MAX_RESIDENT_THREADS = 2048
RESERVED_SHARED_BYTES = 1024  # the system's share of each block

TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: {MAX_THREADS} threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {MAX_SHARED_BYTES}
  shared_memory_per_core: {SHARED_FILE_BYTES}
  threads_per_core_limit: {MAX_RESIDENT_THREADS}
  core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 device_address_bits: 64
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: {REGISTER_FILE} registers_per_block_limit: {REGISTER_FILE}
  device_vendor: "NVIDIA Corporation" name: "{DEVICE}"
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{DEVICE}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function to compile: `fn` at `args`, pytrees of `jax.ShapeDtypeStruct`.

    Attributes:
      is_exact: whether it is compiled as exact programs are.
    """

    fn: Callable
    args: tuple
    donate: tuple[int, ...] = ()
    is_exact: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thunk:
    """One step of an executable, as XLA will run it.

    Attributes:
      kind: `kCustomKernel` and `kKernel` launch a kernel, as does `kCustomCall`,
        whose name and sizes are not known here; `kCopy`, `kWhile`,
        `kCommandBuffer` (a CUDA graph) and others.
      depth: nesting in loops, branches and command buffers; 0 at the top.
      in_graph: whether it is part of a `kCommandBuffer`.
    """

    kind: str
    name: str
    depth: int
    in_graph: bool
    grid: tuple[int, int, int] | None
    threads: int
    shared_bytes: int

    @property
    def base(self) -> str:
        """The name without the number by which XLA tells equal ones apart."""
        return re.sub(r"_+\d*$", "", self.name)

    @property
    def is_launch(self) -> bool:
        return self.kind in ("kKernel", "kCustomKernel", "kCustomCall")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """An executable for the H100.

    Attributes:
      kernels: the machine code of each kernel, once.
      thunks: the steps in the order of the schedule, those of loop bodies once.
      alias_bytes: bytes that are updated in place; `temp_bytes`: of scratch memory.
      hlo: the optimised program as text.
      options: XLA's options, the text of each by its name.
    """

    kernels: tuple[ptxas_log.Kernel, ...]
    thunks: tuple[Thunk, ...]
    alias_bytes: int
    temp_bytes: int
    hlo: str
    options: dict[str, str]

    @property
    def launches(self) -> tuple[Thunk, ...]:
        """The thunks that run a kernel, those in a loop body once."""
        return tuple(each for each in self.thunks if each.is_launch)

    def kernel(self, name: str) -> ptxas_log.Kernel:
        """Returns the one kernel whose name contains `name`."""
        return _only(name, self.kernels)

    def launch(self, name: str) -> Thunk:
        """Returns the one launch whose name contains `name`."""
        return _only(name, self.launches)

    def assert_fits(self, *, most_spilt: int = 0) -> None:
        """Raises unless each kernel can run: its sizes are within bounds, and it spills
        at most `most_spilt` bytes."""
        for each in self.kernels:
            spilt = f"{each.name}: {each.spill_bytes} bytes are spilt"
            assert each.spill_bytes <= most_spilt, spilt
            used = each.registers * max(each.threads, 1)
            assert used <= REGISTER_FILE, f"{each.name}: {used} registers"
        for each in self.launches:
            assert each.threads <= MAX_THREADS, each
            assert each.shared_bytes <= MAX_SHARED_BYTES, each


def _only(name: str, among):
    found = [each for each in among if name in each.name]
    if len(found) != 1:
        raise KeyError(f"{name} is in {[each.name for each in among]}")
    return found[0]


def blocks_per_multiprocessor(kernel: ptxas_log.Kernel, launch: Thunk) -> int:
    """Returns how many blocks of a kernel are resident at once, by published limits."""
    registers = -(-kernel.registers // 8) * 8 * launch.threads
    shared = launch.shared_bytes + kernel.static_shared_bytes + RESERVED_SHARED_BYTES
    return min(
        REGISTER_FILE // registers,
        SHARED_FILE_BYTES // shared,
        MAX_RESIDENT_THREADS // launch.threads,
        32,
    )


def missing() -> str | None:
    """Returns why this machine cannot compile, and what helps; None if it can."""
    wanted = f"pip install -e '.[cuda-compile]' with jax {jax.__version__}"
    for tool in ("bin/ptxas", "bin/nvdisasm", "nvvm/libdevice/libdevice.10.bc"):
        if not (_cuda() / tool).exists():
            return f"no {tool} in {_cuda()}: {wanted}"
    try:
        version = importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    same = version == jax.__version__
    return None if same else f"jax-cuda13-plugin is {version}: {wanted}"


def _cuda() -> pathlib.Path:
    """Returns the folder of the wheels `nvidia-cuda-*`, which may not exist."""
    spec = importlib.util.find_spec("nvidia")
    paths = spec.submodule_search_locations if spec else None
    return pathlib.Path(next(iter(paths)) if paths else "nvidia") / "cu13"


@contextlib.contextmanager
def compiler() -> Iterator[Callable[..., Report]]:
    """Starts a process that compiles, on a machine where `missing` returns None.

    It yields `compile(build, *args, **kwargs)`, which returns the report of the program
    that `build` returns there, and makes it once. `build` is a function of a module's
    top level, and its arguments can be pickled. An exception is raised here.
    """
    spawn = multiprocessing.get_context("spawn")
    how = {"mp_context": spawn, "initializer": _initialize}
    with futures.ProcessPoolExecutor(max_workers=1, **how) as pool:

        @functools.cache
        def compile_once(build, *args, **kwargs):
            return pool.submit(_compile, build, args, kwargs).result()

        yield compile_once


_folder: tempfile.TemporaryDirectory | None = None
"""The folder of a compiling process: CUDA's folder, and logs of the last program."""


def _initialize() -> None:
    global _folder
    # Users compile without the flags that XLA has in tests.
    os.environ.pop("XLA_FLAGS", None)
    # The plugin is only there to compile: its backend would look for a driver.
    jax.config.update("jax_platforms", "cpu")
    # The files that are read here are written only while XLA compiles.
    jax.config.update("jax_enable_compilation_cache", False)
    _folder = tempfile.TemporaryDirectory(prefix="hopper-")
    ptxas_log.install(_cuda(), pathlib.Path(_folder.name))


def _compile(build, args, kwargs) -> Report:
    from jax.experimental import topologies

    log, dump = (pathlib.Path(_folder.name) / name for name in ("log", "dump"))
    for folder in (log, dump):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    program = build(*args, **kwargs)
    device = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET, topology="1x1x1"
    ).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        program.args,
    )
    jit = compilation.jit if program.is_exact else jax.jit
    jitted = jit(program.fn, donate_argnums=program.donate)
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
        trace = jitted.trace  # It has the options of a GPU.
    with lowering_for(device.device_kind), launch.interpreted(False):
        lowered = trace(*shapes).lower(lowering_platforms=("cuda",))
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(dump)})
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    (told,) = dump.glob("*jit_*.debug_options")
    # Passes that changed it write it again, under a later name: the last one counts.
    sequence = sorted(dump.glob("*jit_*.thunk_sequence*.txt"))[-1]
    return Report(
        kernels=ptxas_log.read(log, _cuda()),
        thunks=tuple(_thunks(sequence.read_text())),
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        hlo=hlo,
        options=dict(re.findall(r"^(\w+): (.*)$", told.read_text(), re.MULTILINE)),
    )


@contextlib.contextmanager
def lowering_for(device_kind: str) -> Iterator[None]:
    """Sets a mesh to trace and lower: Pallas asks it for the GPU from jax 0.11 on."""
    if jax.__version_info__ < (0, 11):
        yield
        return
    abstract = jax.sharding.AbstractDevice(
        device_kind=device_kind, num_cores=None, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def _thunks(text: str) -> Iterator[Thunk]:
    """Reads XLA's dump: one thunk a line, `NNN: kind [order] name grid: ...`."""
    graph_depth = None  # of the outermost command buffer
    line = r"^( *)\d+: (\w+)[^\S\n]*(?:\[[^\]\n]*\])?[^\S\n]*(.*)"
    for indent, kind, rest in re.findall(line, text, re.MULTILINE):
        grid = re.search(r"grid: \[(\d+), (\d+), (\d+)\]", rest)
        threads = re.search(r"threads: \[(\d+), (\d+), (\d+)\]", rest)
        shared = re.search(r"shared_memory: (\d+) bytes", rest)
        x, y, z = map(int, threads.groups()) if threads else (0, 0, 0)
        depth = len(indent) // 4
        if graph_depth is not None and depth <= graph_depth:
            graph_depth = None
        yield Thunk(
            kind=kind,
            name=rest.split(" ")[0],
            depth=depth,
            in_graph=graph_depth is not None,
            grid=tuple(map(int, grid.groups())) if grid else None,
            threads=x * y * z,
            shared_bytes=int(shared[1]) if shared else 0,
        )
        if kind == "kCommandBuffer" and graph_depth is None:
            graph_depth = depth
