"""What every process has: settings, a main that stops in order, logs, traces, metrics, a health probe."""
