"""How the built-in demo model is made: data, parts, learning, judging. Used by `train_demo.py`."""
