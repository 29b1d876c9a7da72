"""The model that is looked at; it is the one that evaluations measure."""

from hf_vit.evaluation.subject import Subject, open_subject

__all__ = ["Subject", "open_subject"]
