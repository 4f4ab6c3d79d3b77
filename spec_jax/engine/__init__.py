"""The engine: what a round asks of its parts, the round, and who runs it.

Reads from the inside out: `protocols`, `state`, `rows`, `verification`, `round`,
`scheduler`. `baseline` is autoregressive decoding, the oracle of all of it.
"""
