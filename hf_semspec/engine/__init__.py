"""What every scheme stands on: a call's state, its rounds, models with ragged caches, processors, ends, outputs."""
