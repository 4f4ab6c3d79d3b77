"""Instruments: a record of every row of a run, and a comparison of two runs."""
