"""A model on a mesh: the same bits on any number of devices."""

import json
import pathlib

import pytest
from script_runs import run_python
from slow_cases import slow


PROGRAM = pathlib.Path(__file__).parent / "mesh_program.py"


def run(*arguments: str) -> dict:
    """Returns the row that the program prints, in a process of eight devices."""
    done = run_python(PROGRAM, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "family", ["qwen3", *map(slow, ("q8_0", "q4_1", "qwen2", "gpt_neox"))]
)
@pytest.mark.parametrize("impl", [slow("xla"), "native"])
def test_bits_are_the_same_on_any_mesh(impl, family):
    """Compares logits and K/V of a tree and, with native kernels, of two slots' chains.

    Fails if a product, a norm or a softmax is computed in a shape that depends on the
    number of devices, if the backend orders a sum, or if its bias is not added exactly
    once. The negative controls are sums in another order, which differ by rounding, and
    a model with other norms and biases.
    """
    found = run(family, impl)
    assert found == {
        "equal": [True, False],
        "close": [True, True, False],
        "all_reduce": False,
        # Two sums and the logits of each slab, and native has two slabs.
        "all_gathers": 3 if impl == "xla" else 6,
    }


FOUR = ("1", "2", "4", "8")
COUNTS = dict.fromkeys(("draft-model", "cut", "eagle3", "dflash", "dspark"), FOUR)
COUNTS |= {"gpt_neox": FOUR, "q8_0": FOUR[:2]}


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["native", "xla"])
@pytest.mark.parametrize("drafter", COUNTS)
def test_generations_are_the_same_on_any_mesh(drafter, impl):
    """Compares tokens, log-probabilities, K/V and drafts in decoding, chains and trees.
    Fails if a drafter sees other features on another mesh, or drafts other tokens. The
    negative control has sums of one segment, whose bits differ."""
    assert run("generations", drafter, impl, *COUNTS[drafter]) == {
        "equal": [True] * len(COUNTS[drafter]),
        "drafted": True,
        "other_sums": False,
    }
