"""From a problem and a configuration to CUDA source, and from source to a shared library."""
