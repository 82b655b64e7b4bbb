"""What kernels can take: known without importing Pallas."""

MAX_ELEMENTS = 2**31 - 1  # of an array: Triton computes addresses in 32 bits
