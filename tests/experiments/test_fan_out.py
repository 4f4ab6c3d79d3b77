"""Tasks here and on a cluster: the same results, each once, whoever dies."""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time

import exactness_commands as commands
import fake_ray
import psutil
import pytest
import tiny_pair
from script_runs import assert_fails_with, models_of, rows_of

from experiments import exactness, replay, sweep, train_drafter, train_pair
from experiments.lib import fan_out, processes


class Doubled:
    """Twice each task; the fifth is bad input."""

    made = 0

    def __init__(self, factor: int):
        type(self).made += 1
        self._factor = factor

    def __call__(self, task: int):
        if task == 5:
            raise ValueError(f"task {task} cannot be used")
        yield self._factor * task
        yield -self._factor * task


def flags(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    fan_out.add_flags(parser)
    return parser.parse_args(given)


@pytest.fixture
def cluster(monkeypatch):
    """Puts a cluster in the place of Ray."""

    def install(**options):
        ray = fake_ray.module(**options)
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setattr(fan_out, "_workers", {})
        started = lambda count: contextlib.nullcontext(f"here:{count}")
        monkeypatch.setattr(fan_out, "_started", started)
        return ray

    return install


def results(args: argparse.Namespace, tasks) -> dict:
    found = fan_out.of(args, Doubled, 2)(Doubled(2), tasks)
    return {task: list(results) for task, results in found}


@pytest.mark.parametrize("deaths", [0, 2])
def test_results_are_those_of_one_process(cluster, deaths):
    """Fails if a task is lost, or counted again when its process has died."""
    ray, tasks = cluster(deaths=deaths), [3, 1, 2]
    alone = results(flags(), tasks)
    assert not ray.joined and alone == {3: [6, -6], 1: [2, -2], 2: [4, -4]}
    Doubled.made = 0
    assert results(flags("--ray", "2"), tasks) == alone
    assert ray.joined == ["here:2", "left"]
    assert len(ray.begun) == 3 * (1 + deaths)
    assert Doubled.made == 2  # One here, one for all tasks of a process.
    found = fan_out.of(flags("--ray", "2"), Doubled, 2)(Doubled(2), tasks)
    assert [task for task, _ in found] == [2, 1, 3]  # As they come, and in order:
    found = fan_out.of(flags("--ray", "2"), Doubled, 2)(Doubled(2), tasks)
    assert [one[0] for one in fan_out.in_order(found, tasks)] == [6, 2, 4]


def test_failures_on_a_cluster(cluster):
    """Each in one line, and the cluster is left."""
    ray = cluster()
    with pytest.raises(ValueError, match="task 5 cannot be used"):
        results(flags("--ray", "2"), [1, 5])
    assert ray.joined[-1] == "left"
    with pytest.raises(ValueError, match="--ray nowhere:1: no cluster there .no answ"):
        results(flags("--ray", "nowhere:1"), [1])
    with pytest.raises(ValueError, match="--ray-cpus 3: no machine of the cluster has"):
        results(flags("--ray", "2", "--ray-cpus", "3"), [1])
    with pytest.raises(ValueError, match="--ray-cpus is of --ray"):
        results(flags("--ray-cpus", "3"), [1])
    cluster(deaths=fan_out.RETRIES + 1)
    with pytest.raises(RuntimeError, match="no worker finished 1, begun 4 times"):
        results(flags("--ray", "2"), [1])


def test_a_worker_of_another_machine_or_code_is_refused(tmp_path):
    """Rows say where they come from: fails if they come from elsewhere."""
    job = fan_out.Job(make=Doubled, values=(2,))
    assert list(job.start()(3)) == [6, -6]
    other = fan_out.Job(make=Doubled, values=(2,), place={"jax_version": "0.0"})
    with pytest.raises(ValueError, match="jax_version of a worker is .* '0.0', which"):
        other.start()
    gone = fan_out.Job(make=Doubled, values=(2,), folder=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="a worker has no folder .*gone"):
        gone.start()


def test_what_decides_bits_is_sent(monkeypatch):
    monkeypatch.setenv("SPEC_JAX_ISA", "avx2")
    monkeypatch.setenv("XLA_FLAGS", "--a")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    sent = fan_out._variables()
    assert sent["SPEC_JAX_ISA"] == "avx2" and sent["XLA_FLAGS"] == "--a"
    assert "SECRET_TOKEN" not in sent
    assert sent["PYTHONPATH"].split(os.pathsep)[0] == str(processes.ROOT)


def test_unusable_flags(cluster, monkeypatch, capsys):
    cluster()
    pair = ["--stage", "export", "--ray", "2"]
    for main, arguments, words in (
        (sweep.main, ["--ray", "soon"], "'soon' is no number of workers"),
        (exactness.main, ["--ray", "0"], "'0' is no number of workers"),
        (train_pair.main, pair, "--ray is of --stage rollouts"),
        (
            train_drafter.main,
            [*pair, "--family", "eagle3"],
            "--ray is of --stage rollouts",
        ),
    ):
        assert_fails_with(main, capsys, arguments, words)
    with pytest.raises(ValueError, match="--prompts -: workers of --ray have another"):
        args = flags("--ray", "2")
        args.prompts = "-"
        fan_out.of(args, Doubled, 2)
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(argparse.ArgumentTypeError, match=r"needs Ray; pip install -e "):
        fan_out.address("auto")


def without_times(rows: list[dict]) -> list[dict]:
    """Rows, without what a clock or a cluster says."""
    kept = ("drafter", "gamma", "matched", "counters", "texts", "prompts_sha256")
    kept += ("rounds_by_rows", "gamma_policy")
    return [{name: row[name] for name in kept if name in row} for row in rows]


def test_scripts_write_the_same_rows(cluster, folders, tmp_path, capsys):
    """Fails if a script's worker cannot be sent, or makes other rows there."""
    cluster(deaths=1)
    base = [*models_of(folders), "--gen-tokens", "4", "--prompts", "2", "--impl", "xla"]
    traces = [tmp_path / f"{name}.jsonl" for name in ("here", "there")]
    outs = [tmp_path / f"{name}_rows.jsonl" for name in ("here", "there")]
    for path, out, more in zip(traces, outs, ([], ["--ray", "2"]), strict=True):
        target = ["--target", str(folders[0]), *base[4:]]
        assert replay.main(["--record", str(path), *target, *more]) == 0
        found = [str(path), "--drafter", "ngram,suffix", "--gamma", "1,2", *more]
        assert replay.main([*found, "--out", str(out)]) == 0
    assert traces[0].read_bytes() == traces[1].read_bytes()
    by_task = [
        sorted(without_times(rows_of(out)), key=lambda r: (r["drafter"], r["gamma"]))
        for out in outs
    ]
    assert by_task[0] == by_task[1] and len(by_task[0]) == 4


@pytest.mark.slow
def test_sweep_and_exactness_write_the_same(cluster, folders, tmp_path, capsys):
    """Rows of the one, and the other's certificate, begun anew and taken up."""
    cluster(deaths=1)
    base = [*models_of(folders), "--gen-tokens", "4", "--prompts", "2", "--impl", "xla"]
    outs = [tmp_path / "here.jsonl", tmp_path / "there.jsonl"]
    for out, more in zip(outs, ([], ["--ray", "2"]), strict=True):
        axes = ["--drafter", "ngram,suffix", "--gamma", "1,2", "--out", str(out)]
        assert sweep.main([*base, *axes, *more]) == 0
    here, there = (rows_of(out) for out in outs)
    assert {row.get("ray") for row in there} == {"2"} and "ray" not in here[0]
    assert without_times(there)[::-1] == without_times(here)
    outs[1].write_text("".join(json.dumps(row) + "\n" for row in there[:3]))
    more = ["--drafter", "ngram,suffix", "--gamma", "1,2", "--ray", "2"]
    assert sweep.main([*base, *more, "--out", str(outs[1])]) == 0
    assert without_times(rows_of(outs[1]))[::-1] == without_times(here)
    certificates = [tmp_path / "here.json", tmp_path / "there.json"]
    for path, more in zip(certificates, ([], ["--ray", "2"]), strict=True):
        grid = commands.one_cell(folders, "--gamma", "2,1", "--impl", "xla")
        assert exactness.main([*grid, *commands.certifying(path), *more]) == 0
    assert certificates[0].read_bytes() == certificates[1].read_bytes()


def _kill_one(ended: threading.Event, out) -> None:
    """Kills one of this process's Ray workers at its task, when a row is there."""
    while not ended.is_set():
        time.sleep(0.05)
        if not out.exists() or out.read_text().count('"prompt"') < 1:
            continue
        for child in psutil.Process().children(recursive=True):
            try:
                if child.name().startswith("ray::call") or any(
                    word.startswith("ray::call") for word in child.cmdline()
                ):
                    os.kill(child.pid, signal.SIGKILL)
                    ended.killed = True
                    return
            except (psutil.Error, ProcessLookupError):
                continue


@pytest.mark.slow
def test_four_workers_one_of_them_killed(tmp_path, capsys):
    """Ray itself: the certificate is that of one process; needs the extra cluster."""
    if importlib.util.find_spec("ray") is None:  # Not imported: see `fan_out._joined`.
        pytest.skip(f"no Ray: {fan_out.INSTALL}")
    folders = tiny_pair.write(tmp_path)
    grid = commands.one_cell(folders, "--gamma", "2,1", "--page-size", "8,16")
    grid += ["--drafter", "oracle,ngram", "--sampling", "greedy,sampled"]
    alone, shared = tmp_path / "alone.json", tmp_path / "shared.json"
    assert exactness.main([*grid, *commands.certifying(alone)]) == 0
    out, ended = tmp_path / "rows.jsonl", threading.Event()
    ended.killed = False
    killer = threading.Thread(target=_kill_one, args=(ended, out))
    killer.start()
    more = ["--out", str(out), "--ray", "4"]
    try:
        assert exactness.main([*grid, *commands.certifying(shared), *more]) == 0
    finally:
        ended.set()
        killer.join()
    assert ended.killed
    assert shared.read_bytes() == alone.read_bytes()
    prompts = [(row["cell"], row["index"]) for row in rows_of(out, "prompt")]
    assert len(prompts) == len(set(prompts)) == 5 * commands.NUM_PROMPTS
