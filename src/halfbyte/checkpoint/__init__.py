"""Safetensors checkpoints: headers, sharded reading, atomic writing."""
