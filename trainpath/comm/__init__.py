"""Comm part of trainpath."""
