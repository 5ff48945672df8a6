"""Parts of every process: settings, a main that stops in order, logs, traces, metrics, a health probe."""
