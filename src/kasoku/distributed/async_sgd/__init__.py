"""Asynchronous SGD: workers add their updates to shared weights without waiting."""
