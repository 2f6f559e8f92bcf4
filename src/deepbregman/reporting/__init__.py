"""Run folders to tables and figures; no torch, never recomputes."""
