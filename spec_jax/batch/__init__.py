"""Several sequences at once: each in a slot of its own, all in one forward a round."""
