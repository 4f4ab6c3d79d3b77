"""Tasks of a script, done in this process, or by the processes of a Ray cluster.

A worker is a callable that returns the results of one task. On a cluster each process
makes its own worker from values that can be sent, and the results of a task arrive
together, once. This module handles no models, and imports Ray only for a cluster.
"""

import argparse
import dataclasses
import importlib.util
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from experiments.lib import processes, records


Task = Any  # Hashable; it and its results can be sent to a process
Worker = Callable[[Task], Iterable[Any]]

_SENT = ("JAX_", "XLA_", "SPEC_JAX_", "TF_CPP_")
"""Beginnings of environment variables that decide what a process computes."""


def address(text: str) -> str:
    """Parses the flag that says where a cluster is."""
    if text != "auto" and ":" not in text:
        raise ValueError(f"{text!r} is neither auto nor HOST:PORT")
    if importlib.util.find_spec("ray") is None:
        raise ValueError("needs Ray; pip install -e '.[cluster]'")
    return text


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of rows with times that name the cluster; none without one."""
    return {} if args.ray is None else {"ray": args.ray, "ray_cpus": args.ray_cpus}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Values from which a process of a cluster makes a worker.

    Attributes:
      place: the code, libraries and machine that rows name as their origin.
    """

    make: Callable[..., Worker]
    values: tuple[Any, ...]
    folder: str = dataclasses.field(default_factory=os.getcwd)
    place: Mapping[str, Any] = dataclasses.field(default_factory=records.provenance)
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)


_workers: dict[str, Worker] = {}
"""The worker of this process's latest job, by the job's name."""


def call(job: Job, task: Task) -> list[Any]:
    """Returns the results of a task, in a process of a cluster.

    Raises:
      ValueError: a process of other code, or on another kind of machine.
    """
    if job.name not in _workers:
        os.chdir(job.folder)  # Flags may name files relative to it.
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


def each(
    args: argparse.Namespace,
    tasks: Sequence[Task],
    worker: Worker,
    make: Callable[..., Worker],
    *values: Any,
) -> Iterator[tuple[Task, Iterable[Any]]]:
    """Does tasks where `--ray` and `--ray-cpus` say, and yields each with its results.

    They come as they finish: in this process, in their order. A cluster repeats a task
    whose process dies.

    Args:
      worker: for this process.
      make: a module's function that makes such a worker, in each process of a cluster.
      values: its arguments, which can be sent.

    Raises:
      ValueError: no cluster there.
      Exception: what a worker raised.
    """
    if args.ray is None:
        yield from ((task, worker(task)) for task in tasks)
        return
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
        remote = ray.remote(call).options(num_cpus=args.ray_cpus, num_gpus=num_gpus)
        job = ray.put(Job(make=make, values=values))
        waiting = {remote.remote(job, task): task for task in tasks}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        ray.shutdown()
