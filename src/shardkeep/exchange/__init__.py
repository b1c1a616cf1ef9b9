"""Checkpoints that go elsewhere: exported for inference, or converted from one layout to another."""
