"""What a machine with a GPU is asked in one call; see `bench/gpu.sh` and docs/machines/gpu.md."""
