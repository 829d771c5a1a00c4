"""curlfree: measure, train and use vector fields that should be gradients."""

__version__ = "0.1.0"
