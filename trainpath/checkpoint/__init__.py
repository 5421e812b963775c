"""Checkpoint part of trainpath."""
