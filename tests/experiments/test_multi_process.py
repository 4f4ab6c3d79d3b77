"""Several processes of one machine: what they write, and flags that are refused."""

import pytest
import tiny_pair

from experiments import multi_process


def test_flags_that_do_not_go_together(capsys):
    for more, words in (
        (["--devices", "3"], "--devices 3 are not as many on each of --processes 2"),
        (["--worker", "0"], "--worker and --coordinator go together"),
    ):
        with pytest.raises(SystemExit):
            multi_process.parse_args(more)
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path, capsys):
    """Plain, chain, tree and batch; fails if a sum is of another order, or a device's
    part is of another piece."""
    target, draft = tiny_pair.write(tmp_path)
    config = tiny_pair.config(num_heads=4, num_kv_heads=2)
    tiny_pair.write_model(target, config, seed=0)
    arguments = ["--target", str(target), "--draft", str(draft), "--gamma", "2"]
    assert (
        multi_process.main([*arguments, "--gen-tokens", "4", "--impl", "native"]) == 0
    )
    out = capsys.readouterr().out
    assert out.count(" equal ") == 4 and "DIFFERENT" not in out
