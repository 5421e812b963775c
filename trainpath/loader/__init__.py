"""Loader part of trainpath."""
