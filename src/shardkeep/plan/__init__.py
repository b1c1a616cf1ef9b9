"""What goes where: pure functions on columns."""
