"""A cluster in one process, for tests: what is sent is pickled, as Ray does.

Tasks are done when they are waited for, the last one first. `deaths` says how often
each task is begun in vain: done, and its results lost with its process.
"""

import importlib.machinery
import pickle
import types


class RayError(Exception):
    """As Ray's: something of the cluster failed."""


class WorkerCrashedError(RayError):
    """As Ray's: begun too often."""


class RayTaskError(RayError):
    """As Ray's: what a task raised is its cause."""

    def __init__(self, cause):
        self.cause = cause


class _Remote:
    def __init__(self, function, options=None):
        self._function, self._options = function, options

    def options(self, **options):
        return _Remote(self._function, options)

    def remote(self, *values):
        return _Waiting(self._function, pickle.dumps(values), self._options)


class _Waiting:
    def __init__(self, function, sent, options):
        self.function, self.sent, self.options = function, sent, options


def module(*, cores: int = 2, deaths: int = 0) -> types.ModuleType:
    """Returns what stands for the module `ray`; `begun` there has all options."""
    ray = types.ModuleType("ray")
    ray.__spec__ = importlib.machinery.ModuleSpec("ray", None)
    ray.begun, ray.joined = [], []
    ray.exceptions = types.SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def get(waiting):
        for _ in range(1 + min(deaths, waiting.options["max_retries"])):
            ray.begun.append(waiting.options)
            try:
                found = waiting.function(*pickle.loads(waiting.sent))
            except Exception as error:
                raise RayTaskError(error) from None
        if deaths > waiting.options["max_retries"]:
            raise WorkerCrashedError
        return pickle.loads(pickle.dumps(found))

    def init(*, address, **_):
        if address == "nowhere:1":
            raise ConnectionError("no answer")
        ray.joined.append(address)

    ray.init, ray.get, ray.put, ray.remote = init, get, lambda value: value, _Remote
    ray.wait = lambda waiting, num_returns: (waiting[-1:], waiting[:-1])
    ray.nodes = lambda: [{"Resources": {"CPU": float(cores)}}, {"Resources": {}}]
    ray.shutdown = lambda: ray.joined.append("left")
    return ray
