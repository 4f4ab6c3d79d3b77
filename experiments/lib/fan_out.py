"""Tasks of a script: here, one after the other, or on the workers of a Ray cluster.

What does the tasks is a callable, the worker, which returns the results of one task.
Here it is the one that the script has made already, and its results may come one by
one. On a cluster each process makes its own from values that can be sent; the results
of a task come whole, once, whichever process had to begin it anew. Knows no models;
imports Ray where it is asked for.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import secrets
import subprocess
import sys
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from experiments.lib import cli, processes, records


Task = Any  # Hashable, and can be sent, as its results can
Worker = Callable[[Task], Iterable[Any]]
Found = Iterator[tuple[Task, Iterable[Any]]]
Fan = Callable[[Worker, Sequence[Task]], Found]
"""Yields each task with its results, in the order in which they come."""

INSTALL = "pip install -e '.[cluster]'"
RETRIES = 3
"""How often a task is begun anew whose process has died."""

_SENT = ("JAX_", "XLA_", "SPEC_JAX_", "TF_CPP_")
"""Beginnings of variables that decide what a process computes."""


def address(text: str) -> str:
    """The type of a flag that says where a cluster is: see `add_flags`."""
    if not (text == "auto" or ":" in text or (text.isdecimal() and int(text))):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of workers, nor auto, nor HOST:PORT"
        )
    if importlib.util.find_spec("ray") is None:
        raise argparse.ArgumentTypeError(f"needs Ray; {INSTALL}")
    return text


def check_stage(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *stages: str
) -> None:
    """Exits with a usage error where another stage is to be shared out."""
    if args.ray is not None and args.stage not in stages:
        parser.error(f"--ray is of --stage {' and '.join(stages)}: leave it out")


def here(worker: Worker, tasks: Sequence[Task]) -> Found:
    """Does the tasks in this process, in their order."""
    for task in tasks:
        yield task, worker(task)


def of(args: argparse.Namespace, make: Callable[..., Worker], *values: Any) -> Fan:
    """Returns how the flags of `add_flags` have tasks done.

    Args:
      make: a function of a module, which makes a worker in a process of a cluster.
      values: its arguments, which can be sent.

    Raises:
      ValueError: `--ray-cpus` alone, or prompts that another process cannot read.
    """
    if args.ray is None:
        if args.ray_cpus is not None:
            raise ValueError("--ray-cpus is of --ray: give both, or neither")
        return here
    named = getattr(args, "prompts", None)
    for source in named if isinstance(named, list) else [named]:
        if str(source).startswith("-"):
            raise ValueError(
                f"--prompts {source}: workers of --ray have another standard input; "
                "name a file"
            )
    return functools.partial(_on_ray, args, Job(make=make, values=values))


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what rows with times say of a cluster: nothing of one process."""
    if args.ray is None:
        return {}
    return {"ray": args.ray, "ray_cpus": args.ray_cpus or 1}


def in_order(found: Found, tasks: Sequence[Task]) -> Iterator[Iterable[Any]]:
    """Yields the results of the tasks in their order, each as soon as it can be."""
    early: dict[Hashable, Iterable[Any]] = {}
    waiting = iter(tasks)
    following = next(waiting, None)
    for task, results in found:
        early[task] = results
        while following in early:
            yield early.pop(following)
            following = next(waiting, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a process of a cluster needs to make a worker.

    Attributes:
      place: which code, libraries and machine the results are said to be of.
    """

    make: Callable[..., Worker]
    values: tuple[Any, ...]
    folder: str = dataclasses.field(default_factory=os.getcwd)
    place: Mapping[str, Any] = dataclasses.field(default_factory=records.provenance)
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    def start(self) -> Worker:
        """Makes the worker.

        Raises:
          ValueError: a process whose results would be of another code or machine.
        """
        try:
            os.chdir(self.folder)  # Flags may name files from there.
        except OSError as error:
            raise ValueError(
                f"--ray: a worker has no folder {self.folder} ({error.strerror}); "
                "have the checkout and all files at the same paths on all machines"
            ) from None
        own = records.provenance()
        for name, value in self.place.items():
            if own[name] != value:
                raise ValueError(
                    f"--ray: {name} of a worker is {own[name]!r}, and here it is "
                    f"{value!r}, which rows would say; have all machines alike"
                )
        return self.make(*self.values)


_workers: dict[str, Worker] = {}
"""That of the job which this process had last, by its name."""


def call(job: Job, task: Task) -> list[Any]:
    """Returns the results of a task, in a process of a cluster."""
    if job.name not in _workers:
        _workers.clear()
        _workers[job.name] = job.start()
    return list(_workers[job.name](task))


def _on_ray(
    args: argparse.Namespace, job: Job, worker: Worker, tasks: Sequence[Task]
) -> Found:
    """Does the tasks on a cluster; `worker`, of this process, does none.

    Raises:
      ValueError: no cluster there, or none with so many cores.
      RuntimeError: a task whose processes died again and again.
      Exception: what a worker raised.
    """
    del worker
    if not tasks:
        return
    with _joined(args.ray) as ray:
        _check_cores(ray, args)
        on_gpu = jax.default_backend() == "gpu"
        remote = ray.remote(call).options(
            num_cpus=args.ray_cpus or 1,
            num_gpus=(getattr(args, "devices", None) or 1) if on_gpu else 0,
            max_retries=RETRIES,
            runtime_env={"env_vars": _variables()},
        )
        sent = ray.put(job)
        waiting = {remote.remote(sent, task): task for task in tasks}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            task = waiting.pop(done)
            try:
                results = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                raise RuntimeError(
                    f"--ray: no worker finished {task}, begun {RETRIES + 1} times "
                    f"({type(error).__name__}); the same command goes on from there"
                ) from None
            yield task, results


@contextlib.contextmanager
def _joined(where: str) -> Iterator[Any]:
    """Joins a cluster, or starts one of so many workers here, which ends with it.

    Yields:
      The module `ray`, which reads the variables that are for it when it is imported.
    """
    with contextlib.ExitStack() as stack:
        if where.isdecimal():
            # None but this process may have tasks done by its cluster.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            where = stack.enter_context(_started(int(where)))
        import ray

        try:
            ray.init(address=where, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"--ray {where}: no cluster there ({reason})") from None
        stack.callback(ray.shutdown)
        yield ray


_HEAD = """
import sys, ray
how = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
ray.init(address="local", num_cpus=int(sys.argv[1]), **how)
print("at", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
"""Of the process that has a cluster started, until its standard input ends."""

_END_S = 20.0


@contextlib.contextmanager
def _started(count: int) -> Iterator[str]:
    """Starts a cluster here, and yields its address.

    By a process of its own: Ray forks, and this process runs jax, whose threads a fork
    would leave behind in the middle of what they do.

    Raises:
      RuntimeError: it did not start; with the last line of what it says.
    """
    variables = os.environ | _variables() | {"RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", _HEAD, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
        process_group=0,  # Ctrl-C is for this process, which then ends that one.
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        last = ""
        for line in process.stdout:
            if line.startswith("at "):
                yield line.split()[1]
                break
            last = line.strip() or last
        else:
            raise RuntimeError(f"--ray {count}: Ray did not start here ({last})")
    finally:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
        processes.end(process)
        process.stdout.close()


def _check_cores(ray: Any, args: argparse.Namespace) -> None:
    """Raises where no machine has the cores of a task, which would wait for ever."""
    most = max(int(node["Resources"].get("CPU", 0)) for node in ray.nodes())
    if (args.ray_cpus or 1) > most:
        raise ValueError(
            f"--ray-cpus {args.ray_cpus or 1}: no machine of the cluster has more than "
            f"{most}"
        )


def _variables() -> dict[str, str]:
    """Returns variables that make a process compute what this one would."""
    sent = {name: v for name, v in os.environ.items() if name.startswith(_SENT)}
    if jax.config.jax_num_cpu_devices > 0:
        sent["JAX_NUM_CPU_DEVICES"] = str(jax.config.jax_num_cpu_devices)
    return sent | {"PYTHONPATH": processes.python_path()}


def add_flags(group: argparse._ActionsContainer) -> None:
    """`--ray` and `--ray-cpus`, for `of`."""
    group.add_argument(
        "--ray",
        nargs="?",
        const=str(os.cpu_count() or 1),
        type=address,
        metavar="N|ADDRESS",
        help="share the work out: over N Ray workers here (without a value: one a "
        "core), or over the cluster at auto or HOST:PORT; the results are those of "
        "one process",
    )
    cli.add(
        group,
        """
        --ray-cpus N  cores of a machine that a task of --ray has (default: 1); all of
            them, for times that no other task disturbs
        """,
    )
