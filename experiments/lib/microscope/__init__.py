"""The microscope: which operation is the first to differ between two runs of a window.

A `scene` is a window and the K/V before it; `record` runs it and keeps every operation;
`compare` says where two records part; `faults` are planted, as the negative control.
"""
