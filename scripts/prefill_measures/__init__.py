"""What measure_prefill.py measures: times, captures, memory, sameness. Knows any causal LM of
transformers that it is given; which one, and what is written where, is the script's matter."""
