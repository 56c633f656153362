"""Paired benchmark evaluation: the same problems through several engines, compared item by item. See `docs/evaluate.md`."""
