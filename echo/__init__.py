"""What both sides of Echo agree on: records, control messages, topics, weights, configuration and metrics.

Refuses to import torch, vllm or transformers, and knows neither `producers` nor `consumers`.
"""

__version__ = "0.1.0"
