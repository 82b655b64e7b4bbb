"""Kernels of our own, in Pallas, where XLA reads memory more than once (README.md)."""
