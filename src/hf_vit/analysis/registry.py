"""All analyses by name."""

from hf_vit.analysis.analysis import Analysis
from hf_vit.analysis.cka import CKA, CKABetween
from hf_vit.analysis.distance import AttentionDistance
from hf_vit.analysis.entropy import AttentionEntropy
from hf_vit.analysis.equivariance import Equivariance
from hf_vit.analysis.filters import PatchFilters
from hf_vit.analysis.head_maps import HeadMaps
from hf_vit.analysis.permutation import PatchPermutation
from hf_vit.analysis.positions import PositionSimilarity
from hf_vit.analysis.receptive_field import ReceptiveField
from hf_vit.analysis.rollout import AttentionRollout
from hf_vit.analysis.shape_bias import ShapeBias

# Name -> class, in the order in which they run and are shown.
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
