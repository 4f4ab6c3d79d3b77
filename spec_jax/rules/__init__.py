"""Which drafted tokens stay, and how tokens are drawn: pure functions of arrays."""
