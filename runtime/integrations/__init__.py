"""Ways in for libraries of models."""
