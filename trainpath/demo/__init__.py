"""`trainpath demo`: a real training job, first the stock way, then with trainpath."""
