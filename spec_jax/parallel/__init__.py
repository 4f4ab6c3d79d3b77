"""One model on several devices: a mesh, and sums in the same order on every mesh."""
