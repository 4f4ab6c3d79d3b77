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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from experiments.lib import cli, processes, records


Task = Any  # Hashable, and can be sent, as its results can
Worker = Callable[[Task], Iterable[Any]]
Found = Iterator[tuple[Task, Iterable[Any]]]
Fan = Callable[[Worker, Sequence[Task]], Found]
"""Yields each task with its results, in the order in which they come."""

RETRIES = 3
"""How often Ray begins a task anew whose process has died."""

_SENT = ("JAX_", "XLA_", "SPEC_JAX_", "TF_CPP_")
"""Beginnings of variables that decide what a process computes."""


def address(text: str) -> str:
    """The type of a flag that says where a cluster is: see `add_flags`."""
    if not (text == "auto" or ":" in text or (text.isdecimal() and int(text))):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of workers, nor auto, nor HOST:PORT"
        )
    if importlib.util.find_spec("ray") is None:
        raise argparse.ArgumentTypeError("needs Ray; pip install -e '.[cluster]'")
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
    if any(
        str(s).startswith("-") for s in (named if isinstance(named, list) else [named])
    ):
        raise ValueError("--prompts -: workers of --ray cannot read it; name a file")
    return functools.partial(_on_ray, args, Job(make=make, values=values))


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what rows with times say of a cluster: nothing of one process."""
    if args.ray is None:
        return {}
    return {"ray": args.ray, "ray_cpus": args.ray_cpus or 1}


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
        os.chdir(self.folder)  # Flags may name files from there.
        own = records.provenance()
        for name, value in self.place.items():
            if own[name] != value:
                raise ValueError(
                    f"--ray: {name} of a worker is {own[name]!r}, and here it is "
                    f"{value!r}, which rows would say; have all machines alike"
                )
        return self.make(*self.values)


_workers: dict[str, Worker] = {}
"""The worker of the job which this process had last, by its name."""


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
    with _cluster(args.ray) as address, contextlib.ExitStack() as stack:
        import ray  # Here: it reads the variables that `_cluster` sets.

        how = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address=address, runtime_env={"env_vars": _variables()}, **how)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"--ray {args.ray}: no cluster there ({error})") from None
        stack.callback(ray.shutdown)
        most = max(node["Resources"].get("CPU", 0) for node in ray.nodes())
        if (args.ray_cpus or 1) > most:  # Its tasks would wait for ever.
            raise ValueError(
                f"--ray-cpus {args.ray_cpus}: machines have {most:g} cores"
            )
        on_gpu = jax.default_backend() == "gpu"
        remote = ray.remote(call).options(
            num_cpus=args.ray_cpus or 1,
            num_gpus=(getattr(args, "devices", None) or 1) if on_gpu else 0,
            max_retries=RETRIES,
        )
        sent = ray.put(job)
        waiting = {remote.remote(sent, task): task for task in tasks}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            task = waiting.pop(done)
            try:
                yield task, ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                raise RuntimeError(
                    f"--ray: no worker finished {task} ({type(error).__name__}); the "
                    "same command goes on from there"
                ) from None


_HEAD = """
import sys, ray
ray.init(address="local", num_cpus=int(sys.argv[1]), include_dashboard=False)
print("at", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
"""Starts a cluster, which ends when standard input does."""


@contextlib.contextmanager
def _cluster(where: str) -> Iterator[str]:
    """Yields the address of a cluster: of one of its own, where that is a number.

    Another process starts it: Ray forks, which a process with JAX's threads must not.
    """
    if not where.isdecimal():
        yield where
        return
    # None but this process may have tasks done by its cluster.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", _HEAD, where],
        env=os.environ | _variables() | {"RAY_USAGE_STATS_ENABLED": "0"},
        stderr=subprocess.DEVNULL,
        text=True,
        **pipes,
    ) as head:
        assert head.stdout is not None
        lines = (line for line in head.stdout if line.startswith("at "))
        address = next(lines, "").removeprefix("at ").strip()
        if not address:
            raise RuntimeError(f"--ray {where}: Ray did not start here")
        yield address


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
