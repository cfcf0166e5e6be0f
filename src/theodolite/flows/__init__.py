"""Flows and diffusion: paths, training, fields, samplers, flow maps, guidance and the quality of samples."""

from theodolite.flows.fields import Field, denoiser_field, field_of
from theodolite.flows.guidance import CountedField, guided, projection
from theodolite.flows.interpolants import (
    LINEAR,
    TRIGONOMETRIC,
    VARIANCE_PRESERVING,
    Interpolant,
    Quantity,
    convert,
    find_interpolant,
)
from theodolite.flows.inversion import Inversion, StepBound, invert, step_bound
from theodolite.flows.maps import FlowMap, map_batches, map_loss, sample_map
from theodolite.flows.mixture import GaussianMixture, three_gaussians
from theodolite.flows.quality import (
    FeatureDistance,
    feature_distance,
    frechet_distance,
    map_error,
    sliced_wasserstein,
)
from theodolite.flows.sampling import sample
from theodolite.flows.training import noisy, velocity_loss

__all__ = [
    # paths between noise and data
    "LINEAR",
    "TRIGONOMETRIC",
    "VARIANCE_PRESERVING",
    "Interpolant",
    "Quantity",
    "convert",
    "find_interpolant",
    # training
    "noisy",
    "velocity_loss",
    # velocity fields
    "Field",
    "denoiser_field",
    "field_of",
    # samplers
    "sample",
    # flow maps
    "FlowMap",
    "map_batches",
    "map_loss",
    "sample_map",
    # guidance
    "CountedField",
    "guided",
    "projection",
    # inversion of samplers
    "Inversion",
    "StepBound",
    "invert",
    "step_bound",
    # quality of samples
    "FeatureDistance",
    "feature_distance",
    "frechet_distance",
    "map_error",
    "sliced_wasserstein",
    # data whose flow is known
    "GaussianMixture",
    "three_gaussians",
]
