"""Shipped helpers for tests: rank pools, faulty stores, contract suites."""
