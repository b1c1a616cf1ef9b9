"""Modules, optimizers and other objects that stand in a state as they are, and the plain state that stands for them."""
