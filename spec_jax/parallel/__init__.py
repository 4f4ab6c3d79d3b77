"""One model on several devices: a mesh, and sums whose order it does not change."""
