"""Overlap part of trainpath."""
