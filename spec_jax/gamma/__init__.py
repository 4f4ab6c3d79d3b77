"""Adaptive gamma: how many tokens to draft next, decided on the device."""
