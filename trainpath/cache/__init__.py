"""Cache part of trainpath."""
