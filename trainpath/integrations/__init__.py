"""Integrations part of trainpath."""
