"""Designs that came before, for `history.py`: none is part of the library."""
