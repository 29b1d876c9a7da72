"""Seeing how models see: the analyses of the papers. Nothing is imported before it is used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
