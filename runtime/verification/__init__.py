"""The third gate: are a kernel's gradients right?

`verifier` compares them with an fp64 reference on small problems, for a search and for `tuner verify`. `verdicts` has
that done once, in a process of its own, for a library that another compiler made than the one that was timed.
"""
