"""Sources part of trainpath."""
