"""The engine: the protocols of a round's parts, the round, and the scheduler.

Read it from the inside out: `protocols`, `state`, `rows`, `verification`, `round`,
`scheduler`. `baseline` is autoregressive decoding, the oracle of all of it.
"""
