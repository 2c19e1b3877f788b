"""megatron_lite: distributed pretraining that one person can read."""

__version__ = "0.1.0"
