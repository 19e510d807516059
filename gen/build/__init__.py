"""Sources become shared libraries: the compiler, its jobs and the cache."""
