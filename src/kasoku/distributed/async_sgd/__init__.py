"""Asynchronous SGD: workers push updates to parameter servers without waiting."""
