"""The kernels of an accelerator that Triton compiles for: products, rows, attention, and the choice of a token."""
