"""A model on a mesh: the same bits on any number of devices."""

import json
import pathlib

import pytest
from script_runs import run_python
from slow_cases import slow


PROGRAM = pathlib.Path(__file__).parent / "mesh_program.py"


def run(*arguments: str) -> dict:
    """What the program prints, in a process of eight devices."""
    done = run_python(PROGRAM, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "family", ["qwen3", *map(slow, ("q8_0", "q4_1", "qwen2", "gpt_neox"))]
)
@pytest.mark.parametrize("impl", [slow("xla"), "native"])
def test_bits_are_the_same_on_any_mesh(impl, family):
    """Logits and K/V of a tree and, with native kernels, of chains of two slots.

    Fails if a product, a norm or a softmax is computed in a shape that depends on the
    number of devices, if a sum is the backend's, or if its bias is not added once. A
    norm or a bias that is another is the control.
    """
    found = run(family, impl)
    assert found == {
        "equal": True,
        "close": [True, False],
        "all_reduce": False,
        # Of each slab, of which native has two: two sums and the logits.
        "all_gathers": 3 if impl == "xla" else 6,
    }


FOUR = ("1", "2", "4", "8")
COUNTS = dict.fromkeys(("draft-model", "cut", "eagle3", "dflash", "dspark"), FOUR)
COUNTS |= {"gpt_neox": FOUR, "q8_0": FOUR[:2]}


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["native", "xla"])
@pytest.mark.parametrize("drafter", COUNTS)
def test_generations_are_the_same_on_any_mesh(drafter, impl):
    """Decoding, a batch of chains and a tree: tokens, log-probabilities, K/V, drafts.

    Fails if a drafter sees other features on another mesh, or drafts otherwise. Sums of
    one segment are the control: their bits are others.
    """
    assert run("generations", drafter, impl, *COUNTS[drafter]) == {
        "equal": [True] * len(COUNTS[drafter]),
        "drafted": True,
        "other_sums": False,
    }


def test_faults_in_the_sum_are_caught():
    """Each of them is a sum too, up to rounding."""
    right = {"ordered_sum": True}
    assert run("faults") == right | dict.fromkeys(
        ("rotated", "rounded", "reduced"), False
    )
