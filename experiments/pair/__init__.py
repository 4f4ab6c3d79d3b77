"""How the embedded pair was trained: corpus, optimiser loop, distillation."""
