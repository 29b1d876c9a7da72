from .model import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
