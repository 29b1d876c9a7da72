"""The table of all analyses: a new one is a module of its own and one line here."""

from hf_vit.analysis.analyses.analysis import Analysis
from hf_vit.analysis.analyses.cka import CKA, CKABetween
from hf_vit.analysis.analyses.distance import AttentionDistance
from hf_vit.analysis.analyses.entropy import AttentionEntropy
from hf_vit.analysis.analyses.equivariance import Equivariance
from hf_vit.analysis.analyses.filters import PatchFilters
from hf_vit.analysis.analyses.head_maps import HeadMaps
from hf_vit.analysis.analyses.permutation import PatchPermutation
from hf_vit.analysis.analyses.positions import PositionSimilarity
from hf_vit.analysis.analyses.receptive_field import ReceptiveField
from hf_vit.analysis.analyses.rollout import AttentionRollout
from hf_vit.analysis.analyses.shape_bias import ShapeBias

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
