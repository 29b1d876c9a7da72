"""The table of all analyses: a new one is a module of its own and one line here."""

from hf_vit.analysis.cka import CKA, CKABetween
from hf_vit.analysis.distance import AttentionDistance
from hf_vit.analysis.entropy import AttentionEntropy
from hf_vit.analysis.equivariance import Equivariance
from hf_vit.analysis.filters import PatchFilters
from hf_vit.analysis.frame import Analysis
from hf_vit.analysis.head_maps import HeadMaps
from hf_vit.analysis.permutation import PatchPermutation
from hf_vit.analysis.positions import PositionSimilarity
from hf_vit.analysis.receptive_field import ReceptiveField
from hf_vit.analysis.rollout import AttentionRollout
from hf_vit.analysis.shape_bias import ShapeBias

# In the order in which they are made and shown: name -> class.
ANALYSES: dict[str, type[Analysis]] = {
    analysis.name: analysis
    for analysis in (
        PatchFilters,
        PositionSimilarity,
        AttentionDistance,
        AttentionEntropy,
        AttentionRollout,
        HeadMaps,
        CKA,
        CKABetween,
        Equivariance,
        PatchPermutation,
        ReceptiveField,
        ShapeBias,
    )
}
