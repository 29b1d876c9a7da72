from .model import LoadedModel, load_model, load_models

__all__ = ["LoadedModel", "load_model", "load_models"]
