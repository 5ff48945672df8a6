"""A real vLLM on CPU with guesses of our draft service, beside its own ways to guess: `python -m bench.vllm`."""
