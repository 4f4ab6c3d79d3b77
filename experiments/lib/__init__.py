"""Code that the scripts share, whatever they measure."""

from experiments.lib import cli


cli.require("experiments")
