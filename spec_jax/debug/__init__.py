"""Instruments: what every row of a run saw, and which operation differs."""
