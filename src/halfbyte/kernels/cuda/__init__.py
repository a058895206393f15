"""Kernels for CUDA GPUs, in Triton and Gluon, one file each; how they are chosen and launched."""
