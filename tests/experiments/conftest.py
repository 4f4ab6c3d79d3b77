"""Fixtures for tests of scripts: heads and targets of a tiny pair."""

import pytest
import tiny_pair

from spec_jax.native import build


@pytest.fixture(scope="session")
def needs_native():
    """Skips tests where native kernels cannot be built."""
    try:
        build.load()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def head(folders, tmp_path_factory):
    """Returns the folder of an EAGLE-3 head for the target."""
    return tiny_pair.write_head(tmp_path_factory.mktemp("pair") / "head", folders[0])


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """Returns the folder of a target of three layers, for training drafters."""
    folder = tmp_path_factory.mktemp("drafter") / "target"
    return tiny_pair.write_model(folder, tiny_pair.config(num_layers=3), seed=0)


@pytest.fixture(scope="session")
def work(target, tmp_path_factory):
    """Returns a folder with its rollouts and their cache."""
    import head_runs  # Training is an extra, which not every file needs.

    folder = tmp_path_factory.mktemp("work")
    for stage in ("rollouts", "cache"):
        head_runs.run(target, folder, stage)
    return folder
