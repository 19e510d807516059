"""The CUDA itself: Jinja2 templates and plain headers. Data of the package, rendered by `bwdtune.gen.render`."""
