"""Inference engines, by name: `producer.engine` of the run file."""
