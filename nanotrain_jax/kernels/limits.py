"""What kernels can take: known without importing Pallas."""

MAX_ELEMENTS = 2**31 - 1  # of an array: Triton computes addresses in 32 bits
GROUPED_CAPABILITY = 9  # major compute capability of GPUs for which tokamax has both grouped matmuls
GROUPED_TILE = 64  # divides both dims of matrices, and the rows, of these: copies to shared memory round nothing
