"""EAGLE-2 (arXiv 2406.16858), batch-first, pure torch: expand, rerank, verify, accept, commit.

Shapes: B sequences, N nodes (root included), K top_k, D depth, V vocabulary, H hidden size, C candidates.
Read ``cycle.py`` first: one cycle on one screen.
"""
