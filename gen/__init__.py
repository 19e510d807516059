"""A problem and a configuration become CUDA source, and the source a shared library."""
