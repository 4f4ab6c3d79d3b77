"""Tasks of a script: here, one after the other, or on the workers of a Ray cluster.

What does the tasks is a callable, the worker, which returns the results of one task. On
a cluster each process makes its own from values that can be sent, and the results of a
task come whole, once. Knows no models; imports Ray where it is asked for.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
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

_SENT = ("JAX_", "XLA_", "SPEC_JAX_", "TF_CPP_")
"""Beginnings of variables that decide what a process computes."""


def address(text: str) -> str:
    """The type of a flag that says where a cluster is: see `add_flags`."""
    if text != "auto" and ":" not in text:
        raise ValueError(f"{text!r} is neither auto nor HOST:PORT")
    if importlib.util.find_spec("ray") is None:
        raise ValueError("needs Ray; pip install -e '.[cluster]'")
    return text


def add_flags(group: argparse._ActionsContainer) -> None:
    """`--ray` and `--ray-cpus`, for `of`."""
    cli.add(
        group,
        """
        --ray ADDRESS  share the work out over the Ray cluster at auto or HOST:PORT,
            which `ray start --head` makes; the results are those of one process
        --ray-cpus N=1  cores of a machine that a task of --ray has; all of them, for
            times that no other task disturbs
        """,
        ADDRESS=address,
    )


def here(worker: Worker, tasks: Sequence[Task]) -> Found:
    """Does the tasks in this process, in their order."""
    for task in tasks:
        yield task, worker(task)


def of(args: argparse.Namespace, make: Callable[..., Worker], *values: Any) -> Fan:
    """Returns how the flags of `add_flags` have tasks done.

    Args:
      make: a function of a module, which makes a worker in a process of a cluster.
      values: its arguments, which can be sent.
    """
    if args.ray is None:
        return here
    job = Job(make=make, values=values)
    return functools.partial(_on_ray, args, job)


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what rows with times say of a cluster: nothing of one process."""
    return {} if args.ray is None else {"ray": args.ray, "ray_cpus": args.ray_cpus}


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


_workers: dict[str, Worker] = {}
"""The worker of the job which this process had last, by its name."""


def call(job: Job, task: Task) -> list[Any]:
    """Returns the results of a task, in a process of a cluster.

    Raises:
      ValueError: a process whose results would be of another code or machine.
    """
    if job.name not in _workers:
        os.chdir(job.folder)  # Flags may name files from there.
        own = records.provenance()
        for name, value in job.place.items():
            if own[name] != value:
                raise ValueError(
                    f"--ray: {name} of a worker is {own[name]!r}, and here it is "
                    f"{value!r}, which rows would say; have all machines alike"
                )
        _workers.clear()
        _workers[job.name] = job.make(*job.values)
    return list(_workers[job.name](task))


def _on_ray(
    args: argparse.Namespace, job: Job, worker: Worker, tasks: Sequence[Task]
) -> Found:
    """Does the tasks on a cluster, which begins those anew whose process dies;
    `worker`, of this process, does none.

    Raises:
      ValueError: no cluster there.
      Exception: what a worker raised.
    """
    del worker
    import ray

    sent = {name: v for name, v in os.environ.items() if name.startswith(_SENT)}
    sent |= {"PYTHONPATH": processes.python_path()}
    if jax.config.jax_num_cpu_devices > 0:
        sent["JAX_NUM_CPU_DEVICES"] = str(jax.config.jax_num_cpu_devices)
    how = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address=args.ray, runtime_env={"env_vars": sent}, **how)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"--ray {args.ray}: no cluster there ({error})") from None
    try:
        on_gpu = jax.default_backend() == "gpu"
        num_gpus = (getattr(args, "devices", None) or 1) if on_gpu else 0
        how = {"num_cpus": args.ray_cpus, "num_gpus": num_gpus}
        remote, job = ray.remote(call).options(**how), ray.put(job)
        waiting = {remote.remote(job, task): task for task in tasks}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        ray.shutdown()
