"""Profiles of some steps with torch.profiler: each rank writes its own trace."""
