"""Instruments: what every row of a run saw, and what is equal of two runs."""
