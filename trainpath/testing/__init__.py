"""Testing part of trainpath."""
