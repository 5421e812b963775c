"""Sinks part of trainpath."""
