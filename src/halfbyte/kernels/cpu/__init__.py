"""Kernels that run on the CPU, compiled by Numba."""
