"""bwdtune: tuned CUDA attention-backward kernels for PyTorch."""

__version__ = "0.1.0"
